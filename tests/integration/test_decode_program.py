"""A decode step in one go has the bits of one that is called operation by operation."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from diptych.engine.backends.cpu.attention import CompiledAttention
from diptych.engine.backends.cpu.decode_program import DecodePrograms
from diptych.engine.backends.cpu.linear import MAX_THIN_ROWS, CompiledLinear
from diptych.engine.backends.torch.linear import PlainLinear
from diptych.engine.inputs import StepInputs, build_inputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.decoder import Decoder, EagerPass
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import Chunk, StepPlan
from diptych.formats import Quantization
from tests.engines import CPU, load_decoder
from tests.tiny_model import write_tiny_model
from tests.torch_threads import torch_threads

BLOCK_SIZE, NUM_BLOCKS = 8, 400
FLOATS: tuple[torch.dtype, Quantization] = (torch.float32, "none")


class Case:
    """A tiny model and a cache of random contexts."""

    def __init__(self, folder: Path, family: str, dtype: torch.dtype, weights: Quantization):
        write_tiny_model(folder, family)
        self.model = load_decoder(folder, quantization=weights)
        self.config = self.model.config
        self.cache = KVCache(self.config, NUM_BLOCKS, BLOCK_SIZE, dtype)
        bits = torch.randint(60, self.cache.tensor.view(-1).view(torch.uint8).shape)
        self.cache.tensor.view(-1).view(torch.uint8).copy_(bits)  # small numbers of each type

    def inputs(self, context_lens: list[int]) -> StepInputs:
        order = torch.randperm(NUM_BLOCKS).tolist()
        chunks = []
        for row, length in enumerate(context_lens):
            table = tuple(order.pop() for _ in range(-(-length // BLOCK_SIZE)))
            chunks.append(
                Chunk(token_ids=(5 + row,), start=length - 1, block_table=table, sample=None)
            )
        return build_inputs(StepPlan(chunks=tuple(chunks)), BLOCK_SIZE)

    def one_by_one(self, inputs: StepInputs) -> Tensor:
        attention = CompiledAttention(self.config, self.cache, self.model.dtype)
        return self.model.forward(inputs, attention)

    def programs(self, cache: KVCache | None = None) -> DecodePrograms | None:
        attention = CompiledAttention(self.config, self.cache, self.model.dtype)
        otherwise = EagerPass(self.model, attention)
        return DecodePrograms.of(self.model, cache or self.cache, otherwise)


@pytest.mark.parametrize(
    ("family", "dtype", "weights", "num_threads"),
    [
        ("llama", *FLOATS, 2),
        ("gemma3", *FLOATS, 1),
        ("qwen2", torch.int8, "none", 1),
        ("qwen3", torch.float32, "int8", 1),
    ],
)
@torch.inference_mode()
def test_the_same_bits(
    family: str, dtype: torch.dtype, weights: Quantization, num_threads: int, tmp_path: Path
) -> None:
    """Hidden states and what is written to the cache; other rows and contexts in each step."""
    torch.manual_seed(3)
    case = Case(tmp_path, family, dtype, weights)
    programs = case.programs()
    assert programs is not None
    with torch_threads(num_threads):
        for lens in ([7], [300, 1, 40], [500], [9, 129, 33], [20] * 17, [8] * MAX_THIN_ROWS):
            inputs = case.inputs(lens)
            blocks = case.cache.tensor.clone()
            want = case.one_by_one(inputs)
            written = case.cache.tensor.clone()
            case.cache.tensor.copy_(blocks)
            got = programs.decode(inputs)
            assert got is not None
            assert want.isfinite().all()
            assert torch.equal(got, want)
            assert torch.equal(case.cache.tensor, written)
            assert not torch.equal(blocks, written)


def test_other_steps_are_not_taken(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama", *FLOATS)
    programs = case.programs()
    assert programs is not None
    assert programs.decode(case.inputs([8] * (MAX_THIN_ROWS + 1))) is None
    prompt = Chunk(token_ids=(5, 6), start=0, block_table=(0,), sample=None)
    decode = Chunk(token_ids=(5,), start=3, block_table=(1,), sample=None)
    mixed = StepPlan(chunks=(prompt, decode))
    assert programs.decode(build_inputs(mixed, BLOCK_SIZE)) is None


def test_a_part_without_a_loop(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama", *FLOATS)
    bfloat16 = KVCache(case.config, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16)
    assert case.programs(bfloat16) is None
    layer = case.model.weights.layers[1]
    plain = PlainLinear(torch.zeros(layer.down.out_features, layer.down.in_features))
    assert not isinstance(plain, CompiledLinear)
    object.__setattr__(layer, "down", plain)
    assert case.programs() is None
    case.model.ops = object()  # type: ignore[assignment]
    assert case.programs() is None


def test_a_runner_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, "llama", *FLOATS)
    runner = Runner(case.model, case.cache, CPU)
    monkeypatch.setattr(Decoder, "forward", None)
    chunk = Chunk(token_ids=(5,), start=3, block_table=(1,), sample=None)
    runner.execute(StepPlan(chunks=(chunk,)))
