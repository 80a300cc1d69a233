"""A model of a GGUF file runs on the file's own numbers, with the bits of float32 weights."""

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.engine.backends.cpu.linear import compact_works, make_linear
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.compact import CompactWeight, Weight, widened
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.parts import Linear
from diptych.engine.model.weights import DecoderWeights, load_weights
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import Chunk, SampleSpec, StepPlan
from diptych.errors import ConfigurationError
from diptych.formats import Quantization
from diptych.models.compact import FILE_NAME, block_size_of, row_bytes
from diptych.models.gguf_import import import_gguf
from diptych.progress import silent
from diptych.sampling_params import SamplingParams
from tests.engines import CPU, PLAIN
from tests.text_models import write_gguf
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.skipif(not compact_works(), reason="needs AVX-512, or AVX2 and FMA")

PROMPT_LEN, BLOCK_SIZE = 130, 16
GREEDY = SampleSpec(params=SamplingParams(temperature=0.0, max_tokens=9), allow_stop=False)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def imported(folder: Path, family: str, kind: str) -> Path:
    """A tiny model that went through a GGUF file with matrices of this type."""
    file = folder / "m.gguf"
    write_tiny_model(folder / "tiny", family)
    write_gguf(folder / "tiny", file, matrix_type=gguf.GGMLQuantizationType[kind])
    (folder / "imported").mkdir()
    import_gguf(file, folder / "imported", silent)
    return folder / "imported"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return imported(tmp_path, "llama", "Q8_0")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Weight]:
    """The weights of all linear layers that are made."""
    weights: list[Weight] = []

    def make(weight: Weight, bias: torch.Tensor | None) -> Linear:
        weights.append(weight)
        return make_linear(weight, bias)

    monkeypatch.setattr("diptych.engine.backends.cpu.backend.make_linear", make)
    return weights


def load(folder: Path, *, compact: bool = True) -> DecoderWeights:
    config = ModelConfig.from_folder(folder)
    return load_weights(folder, config, CPU.weights(torch.float32, "none", compact=compact))


@torch.inference_mode()
def bits_of_steps(folder: Path, weights: DecoderWeights) -> tuple[torch.Tensor, list[str]]:
    """What a prompt and then decode steps write into the cache, and what they sample."""
    config = ModelConfig.from_folder(folder)
    model = Decoder(config, weights, CPU.layer_ops(config, torch.float32))
    cache = KVCache(config, 40, BLOCK_SIZE, torch.float32)
    runner, table = Runner(model, cache, CPU), tuple(range(12))
    prompt = tuple(5 + position % 400 for position in range(PROMPT_LEN))
    chunks = [Chunk(token_ids=prompt, start=0, block_table=table, sample=GREEDY)]
    chunks += [
        Chunk(token_ids=(7 + step,), start=PROMPT_LEN + step, block_table=table, sample=GREEDY)
        for step in range(3)
    ]
    tokens = [str(runner.execute(StepPlan(chunks=(chunk,))).tokens) for chunk in chunks]
    return cache.tensor.clone().view(torch.int32), tokens


def check_same_bits(folder: Path, weights: DecoderWeights) -> None:
    want_cache, want_tokens = bits_of_steps(folder, load(folder, compact=False))
    got_cache, got_tokens = bits_of_steps(folder, weights)
    assert torch.equal(got_cache, want_cache)
    assert got_tokens == want_tokens


@pytest.mark.parametrize(("family", "kind"), [("llama", "Q4_1"), ("gemma3", "Q5_0")])
def test_steps_have_the_bits_of_float32_weights(
    family: str, kind: str, tmp_path: Path, kept: list[Weight]
) -> None:
    folder = imported(tmp_path, family, kind)
    weights = load(folder)
    assert isinstance(weights.embedding, CompactWeight)
    assert len(kept) == len(weights.linears)
    assert all(isinstance(weight, CompactWeight) for weight in kept)
    check_same_bits(folder, weights)


def test_float32_weights_can_be_asked_for(folder: Path, kept: list[Weight]) -> None:
    weights = load(folder, compact=False)
    assert isinstance(weights.embedding, torch.Tensor)
    assert not any(isinstance(weight, CompactWeight) for weight in kept)


@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.bfloat16, "none"), (torch.float32, "int8")]
)
def test_other_forms_are_made_of_the_float32_weights(
    folder: Path, dtype: torch.dtype, quantization: Quantization
) -> None:
    config = ModelConfig.from_folder(folder)
    for backend in (CPU, PLAIN):
        weights = load_weights(folder, config, backend.weights(dtype, quantization))
        assert isinstance(weights.embedding, torch.Tensor)


def test_parts_of_other_types_share_the_smaller_blocks(folder: Path, kept: list[Weight]) -> None:
    tensors = load_file(folder / FILE_NAME)
    memory = tensors[Q_PROJ]
    smaller = CompactWeight(torch.empty(len(memory), row_bytes(64, 16), dtype=torch.uint8), 16)
    smaller.fill(CompactWeight(memory, 32))
    save_file({**tensors, Q_PROJ: smaller.memory}, folder / FILE_NAME)
    weights = load(folder)
    sizes = [weight.block_size for weight in kept if isinstance(weight, CompactWeight)]
    assert sorted(sizes) == [16] + [32] * (len(kept) - 1)
    check_same_bits(folder, weights)


def test_a_part_without_the_form_makes_all_of_a_layer_float32(
    folder: Path, kept: list[Weight]
) -> None:
    tensors = load_file(folder / FILE_NAME)
    del tensors[Q_PROJ]
    save_file(tensors, folder / FILE_NAME)
    weights = load(folder)
    assert [isinstance(weight, CompactWeight) for weight in kept].count(False) == 1
    check_same_bits(folder, weights)


def test_what_is_not_the_model_any_more_is_not_used(
    folder: Path, kept: list[Weight], caplog: pytest.LogCaptureFixture
) -> None:
    """Trained further, say: the folder's float32 weights are the model."""
    tensors = load_file(folder / "model.safetensors")
    tensors[DOWN] = tensors[DOWN] * 1.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    weights = load(folder)
    (found,) = (weight for weight in kept if not isinstance(weight, CompactWeight))
    assert torch.equal(found, tensors[DOWN])
    assert "not that of the model" in caplog.text
    check_same_bits(folder, weights)


def test_digests_are_of_the_floats_that_the_form_stands_for(folder: Path) -> None:
    """So workers that read either are a pair; a change that nobody compares is another model."""
    digest = load(folder).source.digest
    assert load(folder, compact=False).source.digest == digest
    tensors = load_file(folder / FILE_NAME)
    tensors[DOWN][5, -1] ^= 1
    save_file(tensors, folder / FILE_NAME)
    assert load(folder, compact=False).source.digest == digest
    assert load(folder).source.digest != digest


@pytest.mark.parametrize("change", ["shape", "type"])
def test_a_form_of_another_shape_is_not_used(folder: Path, change: str) -> None:
    tensors = load_file(folder / FILE_NAME)
    broken = tensors[DOWN][:-1] if change == "shape" else tensors[DOWN].view(torch.float32)
    save_file({**tensors, DOWN: broken.contiguous()}, folder / FILE_NAME)
    check_same_bits(folder, load(folder))


def test_a_damaged_file_is_refused(folder: Path) -> None:
    (folder / FILE_NAME).write_bytes(b"damaged")
    with pytest.raises(ConfigurationError, match="compact"):
        load(folder)


def test_the_file_says_the_same_as_the_checkpoint(folder: Path) -> None:
    floats, compact = (load_file(folder / name) for name in ("model.safetensors", FILE_NAME))
    assert compact.keys() == {name for name, tensor in floats.items() if tensor.dim() == 2}
    for name, memory in compact.items():
        block_size = block_size_of(memory.shape[1], floats[name].shape[1])
        assert block_size is not None
        assert torch.equal(widened(CompactWeight(memory, block_size)), floats[name])
