"""Tiny models on the CUDA backend, its kernels interpreted, say what they say on the CPU."""

from tests.triton_interpreter import INTERPRETED

# isort: split
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from diptych.engine.backends.base import Backend
from diptych.engine.backends.choice import make_backend
from diptych.engine.backends.cuda import fp8_linear
from diptych.engine.backends.cuda.fp8_linear import DeviceFp8Linear, round_rows
from diptych.engine.backends.cuda.grouped_linear import GroupedLinear
from diptych.engine.backends.torch.backend import of_rank
from diptych.engine.backends.torch.fp8_linear import Rounded
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.rank_share import RankShare
from diptych.engine.runner import Runner
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence as Generated
from diptych.engine.scheduling.sequence import SequenceKey, SequenceState
from diptych.engine.scheduling.step import Chunk, StepPlan
from diptych.errors import ConfigurationError
from diptych.formats import DeviceName, PrefillAttentionName, Quantization
from diptych.sampling_params import SamplingParams
from tests.attention_config import config_of
from tests.engine_logits import chunk_logits
from tests.engines import CPU, load_decoder
from tests.grouped_weights import Scheme, write_pair
from tests.tiny_model import ARCHITECTURES, write_tiny_model
from tests.unit.engine.backends.cuda import fake_flashinfer

# Numbers that are none are asked of a part without tokens, and not used.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)

BLOCK_SIZE = 8
TOLERANCE = 1e-4  # of logits


class Answer(NamedTuple):
    token_ids: list[int]
    num_preemptions: int


class Rig:
    """A scheduler, a pool and a runner, stepped by hand. All is NaN that nobody wrote."""

    def __init__(
        self, folder: Path, backend: Backend, num_blocks: int, quantization: Quantization = "none"
    ) -> None:
        model = load_decoder(folder, quantization=quantization, backend=backend)
        self.cache = KVCache(
            model.config, num_blocks, BLOCK_SIZE, model.dtype, allocate=backend.kv_memory
        )
        self.cache.tensor.fill_(torch.nan)
        self.runner = Runner(model, self.cache, backend)
        config = SchedulerConfig(
            max_model_len=num_blocks * BLOCK_SIZE, max_batched_tokens=24, max_num_seqs=4
        )
        self._scheduler = Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE))

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Answer]:
        """All at once, prompts in chunks beside single tokens; greedy, drawn of all and of some."""
        sequences = [self._start(*numbered, num_tokens) for numbered in enumerate(prompts)]
        while any(seq.state is not SequenceState.FINISHED for seq in sequences):
            plan = self._scheduler.schedule()
            assert plan is not None
            self._scheduler.update(plan, self.runner.execute(plan))
        return [
            Answer(seq.token_ids[seq.num_prompt_tokens :], seq.num_preemptions) for seq in sequences
        ]

    def _start(self, number: int, token_ids: Sequence[int], num_tokens: int) -> Generated:
        temperature, top_p = (0.9 if number else 0.0), (0.9 if number == 2 else 1.0)
        seq = Generated(
            key=SequenceKey("router", number),
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(
                temperature=temperature, top_p=top_p, seed=number, max_tokens=num_tokens
            ),
        )
        self._scheduler.reserve(seq)
        self._scheduler.start(seq, [], compute_missing=True)
        return seq


def tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(5, 512, (count,), generator=generator).tolist()
    return ids


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_logits(family: str, tmp_path: Path) -> None:
    """A prompt in chunks and then single tokens, on blocks in no order; windows of 32."""
    num_layers = None if family in ("llama", "gemma3") else 1
    write_tiny_model(tmp_path, family, num_layers=num_layers)
    table = [9, 3, 11, 0, 7, 5, 2]
    ids = tokens(1, 50)
    on_cpu, on_device = (
        torch.cat(list(chunk_logits(rig.runner, ids, (20, 1, 27, 1, 1), table)))
        for rig in (Rig(tmp_path, backend, 12) for backend in (CPU, INTERPRETED))
    )
    assert (on_device - on_cpu).abs().max().item() <= TOLERANCE


def test_the_same_tokens_when_a_sequence_is_preempted(tmp_path: Path) -> None:
    """Greedy and seeded; a pool too small for all, so that one is computed anew."""
    write_tiny_model(tmp_path, "qwen3", num_layers=1)
    prompts = [tokens(seed, count) for seed, count in ((1, 10), (2, 15), (3, 20))]
    wanted, got = (
        Rig(tmp_path, backend, 10).answers(prompts, 16) for backend in (CPU, INTERPRETED)
    )
    assert got == wanted
    assert sum(answer.num_preemptions for answer in got) > 0


@pytest.mark.parametrize("scheme", [Scheme("gptq", act_order=True), Scheme("awq")], ids=str)
def test_the_same_tokens_of_whole_numbers_by_groups(scheme: Scheme, tmp_path: Path) -> None:
    """Kept as they are on a device; on the CPU floats, or in the compact form."""
    small, wide = write_pair(tmp_path, scheme, "qwen2", num_layers=1)
    prompts = [tokens(seed, count) for seed, count in ((1, 20), (2, 5))]
    on_device = Rig(small, INTERPRETED, 12)
    assert all(
        isinstance(linear, GroupedLinear) for linear in on_device.runner.model.weights.linears[:-1]
    )
    got = on_device.answers(prompts, 8)
    assert got == Rig(small, CPU, 12).answers(prompts, 8) == Rig(wide, CPU, 12).answers(prompts, 8)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_blocks_of_one_backend_are_gone_on_with_by_the_other(family: str, tmp_path: Path) -> None:
    """What is moved between workers of two kinds: the bytes of blocks, and nothing else."""
    write_tiny_model(tmp_path, family, num_layers=None if family == "gemma3" else 1)
    ids, table = tokens(1, 44), [1, 4, 0, 5, 3, 2]
    wanted = torch.cat(list(chunk_logits(Rig(tmp_path, CPU, 6).runner, ids, (40, 1, 3), table)))
    for source, reader in ((CPU, INTERPRETED), (INTERPRETED, CPU)):
        prefilled, decoding = Rig(tmp_path, source, 6), Rig(tmp_path, reader, 6)
        list(chunk_logits(prefilled.runner, ids[:40], (40,), table))
        decoding.cache.memory.bytes.copy_(prefilled.cache.memory.bytes)
        for begin, end in ((40, 41), (41, 44)):
            chunk = Chunk(
                token_ids=tuple(ids[begin:end]), start=begin, block_table=tuple(table), sample=None
            )
            got = decoding.runner.logits(StepPlan(chunks=(chunk,)))
            assert (got - wanted[begin:end]).abs().max().item() <= TOLERANCE


def test_the_same_tokens_in_8_bit_floats(tmp_path: Path) -> None:
    """Weights and inputs rounded by rows, on both."""
    write_tiny_model(tmp_path, "qwen3", num_layers=1)
    wanted, got = (
        Rig(tmp_path, backend, 12, "fp8").answers([tokens(1, 20), tokens(2, 5)], 8)
        for backend in (CPU, INTERPRETED)
    )
    assert got == wanted


def test_the_head_takes_what_the_last_norm_has_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch less for each step; the same bits."""
    write_tiny_model(tmp_path, "qwen3", num_layers=1)
    model = load_decoder(tmp_path, quantization="fp8", backend=INTERPRETED)
    if not isinstance(model.weights.head, DeviceFp8Linear):
        pytest.skip("this torch has no product of 8-bit floats on a CPU")
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, model.config.hidden_size, generator=generator)
    want = model.weights.head(model.normed(hidden))
    num_rounded: list[int] = []

    def counted(x: Tensor) -> Rounded:
        num_rounded.append(len(x))
        return round_rows(x)

    monkeypatch.setattr(fp8_linear, "round_rows", counted)
    got = [model.logits(hidden) for _ in range(2)]
    assert num_rounded == [3], "the first product alone, which says that there are such"
    assert all(torch.equal(each, want) for each in got)


@pytest.mark.parametrize(
    ("capability", "dtype", "says"),
    [
        ((8, 6), torch.bfloat16, r"needs a GPU of compute capability \(9, 0\) .*got \(8, 6\)"),
        ((9, 0), torch.float32, "needs dtype bfloat16 on device cuda"),
        ((9, 0), torch.bfloat16, "this torch multiplies no such weights"),
    ],
)
def test_8_bit_floats_are_refused_where_they_are_not_multiplied(
    capability: tuple[int, int], dtype: torch.dtype, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("diptych.engine.backends.torch.fp8_linear.works", lambda *of: False)
    with pytest.raises(ConfigurationError, match=f"fp8.* {says}"):
        type(INTERPRETED)(torch.device("cuda", 0)).weights(dtype, "fp8")


def test_the_same_tokens_with_weights_in_int8(tmp_path: Path) -> None:
    """The host's are rounded to the same numbers, and widened."""
    write_tiny_model(tmp_path, "qwen3", num_layers=1)
    rounded, host = (Rig(tmp_path, each, 12, "int8-weights") for each in (INTERPRETED, CPU))
    assert all(isinstance(linear, GroupedLinear) for linear in rounded.runner.model.weights.linears)
    prompts = [tokens(1, 20), tokens(2, 5)]
    assert rounded.answers(prompts, 8) == host.answers(prompts, 8)
    (chunk,) = chunk_logits(rounded.runner, tokens(3, 9), (9,), [0, 1])
    (wanted,) = chunk_logits(host.runner, tokens(3, 9), (9,), [0, 1])
    (plain,) = chunk_logits(Rig(tmp_path, CPU, 12).runner, tokens(3, 9), (9,), [0, 1])
    assert (chunk - wanted).abs().max().item() <= TOLERANCE < (chunk - plain).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_rounded_to_int8_by_rows(dtype: torch.dtype) -> None:
    """By half a scale at most, those of rows of zeros not at all; in a quarter of float32."""
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] = 0
    linear = INTERPRETED.weights(dtype, "int8-weights").linear(weight, None)
    assert isinstance(linear, GroupedLinear)
    held = sum(part.nbytes for part in vars(linear).values() if isinstance(part, Tensor))
    assert held == weight.numel() + 4 * len(weight), "a byte each, and a scale for each row"
    kept = linear(torch.eye(96)).t()
    halves = weight.float().abs().amax(1, keepdim=True) / 127 / 2
    assert bool(((kept - weight.float()).abs() <= halves * 1.001).all())


@pytest.mark.parametrize("weight", [torch.zeros(4, 40), torch.full((4, 32), torch.inf)])
def test_weights_that_cannot_be_rounded_to_int8(weight: Tensor) -> None:
    store = INTERPRETED.weights(torch.float32, "int8-weights")
    with pytest.raises(ConfigurationError, match=r"int8.* (40 inputs|not a finite number)"):
        store.linear(weight, None)


def test_int8_with_rounded_inputs_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"quantization int8 .*int8-weights"):
        INTERPRETED.weights(torch.float32, "int8")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_chosen_where_all_is_there(name: DeviceName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    backend = make_backend(name)
    assert isinstance(backend, type(INTERPRETED))
    assert backend.device == torch.device("cuda", 1)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a backend asks, which is not used."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("one_gpu")
def test_flashinfer_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    says = r"^prefill_attention flashinfer .*pip install -e '\.\[flashinfer\]'"
    with pytest.raises(ConfigurationError, match=says):
        make_backend("cuda", prefill_attention="flashinfer")


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(("name", "num_wrappers"), [("own", 0), ("flashinfer", 2)])
def test_flashinfer_attends_where_the_setting_says_so(
    name: PrefillAttentionName, num_wrappers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrapper for each step in flight."""
    created: list[object] = []
    monkeypatch.setattr(fake_flashinfer, "CREATED", created)
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    gpu = SimpleNamespace(multi_processor_count=1, shared_memory_per_block_optin=99 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    config = config_of(2, 1, 64, None)
    cache = KVCache(config, 2, BLOCK_SIZE, torch.bfloat16)
    backend = make_backend("cuda", prefill_attention=name)
    backend.attention(config, cache, torch.bfloat16)
    assert len(created) == num_wrappers


def test_each_rank_is_on_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for rank in (0, 1):
        backend = make_backend("cuda", RankShare(rank, 2))
        assert backend.device == torch.device("cuda", rank)
    assert chosen == [1], "rank 0 has the one that is chosen anyway"
    assert of_rank(torch.device("cuda", 2), 3) == torch.device("cuda", 5)
