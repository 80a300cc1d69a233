"""What FlashInfer is given for prompts: a stand-in computes with it what the definition says."""

from tests import triton_interpreter  # noqa: F401

# isort: split
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diptych.engine.backends.cuda import flashinfer_prefill
from diptych.engine.backends.cuda.attention import PagedAttention
from diptych.engine.backends.cuda.backend import CudaBackend
from diptych.engine.backends.cuda.flashinfer_prefill import FlashInferPrefill
from diptych.engine.backends.cuda.query_tiles import TileShape
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.runner import Runner
from diptych.errors import ConfigurationError
from tests.attention_config import config_of
from tests.engine_logits import chunk_logits
from tests.engines import CPU, load_decoder
from tests.tiny_model import write_tiny_model
from tests.unit.engine.backends.cuda import fake_flashinfer
from tests.unit.engine.backends.cuda.paged_step import Asked, Case
from tests.unit.engine.backends.cuda.recorded_graphs import RecordedGraphs

# Numbers that are none are asked of a part without tokens, and not used.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)

CHUNKS = [Asked(0, 2), Asked(1, 30), Asked(31, 33), Asked(40, 1)]


@pytest.fixture(autouse=True)
def float32_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter multiplies no bfloat16; and of what was made nothing is there before."""
    monkeypatch.setattr(flashinfer_prefill, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(flashinfer_prefill, "_HEAD_DIMS", (32, 64))
    fake_flashinfer.CREATED.clear()
    yield
    fake_flashinfer.CREATED.clear()


def attention_of(case: Case) -> PagedAttention:
    flashinfer = FlashInferPrefill(fake_flashinfer, case.config, case.cache, torch.float32, 2)
    shape = TileShape(64, 64, 64)
    return PagedAttention(case.config, case.cache, 1, shape, flashinfer=flashinfer)


@pytest.mark.parametrize("window", [None, 20])
def test_chunks_beside_single_tokens(window: int | None) -> None:
    """Both layers, with a window and without, from the cache's own memory."""
    case = Case.of(config_of(4, 2, 64, window), CHUNKS, 16)
    case.cache.tensor.nan_to_num_(0.0)  # the stand-in adds up what has no weight, too
    step = attention_of(case).begin_step(case.inputs)
    for layer in (0, 1):
        out = torch.full_like(case.q, torch.nan)
        step(layer, case.q, case.kv, out)
        assert (out.double() - case.expected(layer)).abs().max() < 2e-5
    blocks = [case.cache.of_layer(layer) for layer in (0, 1)]
    read = [place for wrapper in fake_flashinfer.CREATED for place in wrapper.read]
    assert sorted(read) == sorted(each[:, which].data_ptr() for each in blocks for which in (0, 1))


def test_a_step_is_planned_while_another_is_in_flight() -> None:
    """Wrappers keep their plans until the step after the next one."""
    config = config_of(2, 1, 64, None)
    first = Case.of(config, [Asked(0, 30)], 16)
    first.cache.tensor.nan_to_num_(0.0)
    second = Case.of(config, [Asked(0, 7)], 16, cache=first.cache)
    attention = attention_of(first)
    steps = [attention.begin_step(case.inputs) for case in (first, second)]
    for step, case in zip(steps, (first, second), strict=True):
        out = torch.full_like(case.q, torch.nan)
        step(0, case.q, case.kv, out)
        assert (out.double() - case.expected(0)).abs().max() < 2e-5


@pytest.mark.parametrize("with_graphs", [False, True])
def test_a_model_says_what_it_says_on_a_cpu(with_graphs: bool, tmp_path: Path) -> None:
    """Single tokens are ours: with graphs and without."""
    folder = write_tiny_model(tmp_path, "qwen3", num_layers=1)
    graphs = RecordedGraphs() if with_graphs else None
    backend = CudaBackend(torch.device("cpu"), graphs, flashinfer=fake_flashinfer)
    config, ids = ModelConfig.from_folder(folder), [5 + 7 * n % 99 for n in range(20)]
    on_cpu, got = (
        torch.cat(
            list(
                chunk_logits(
                    Runner(load_decoder(folder, backend=each), KVCache(config, 4, 8), each),
                    ids,
                    (11, 7, 1, 1),
                    (2, 0, 3),
                )
            )
        )
        for each in (CPU, backend)
    )
    assert (got - on_cpu).abs().max() <= 1e-4
    assert sum(len(wrapper.read) for wrapper in fake_flashinfer.CREATED) == 2 * 2


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "says"),
    [
        (80, torch.bfloat16, torch.bfloat16, r"heads of \(32, 64\) \(the model's have 80\)"),
        (64, torch.float16, torch.float32, r"dtype bfloat16 \(got float16\)"),
        (64, torch.float32, torch.int8, r"kv_cache_dtype bfloat16 \(got int8\)"),
    ],
)
def test_what_it_has_no_kernels_for_is_refused(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, says: str
) -> None:
    config = config_of(2, 1, head_dim, None)
    cache = KVCache(config, 2, 16, kv_dtype)
    with pytest.raises(ConfigurationError, match=f"^prefill_attention flashinfer needs {says}"):
        FlashInferPrefill(fake_flashinfer, config, cache, dtype, 2)


def test_capped_scores_are_refused() -> None:
    config = config_of(2, 1, 64, None, score_softcap=50.0)
    cache = KVCache(config, 2, 16, torch.bfloat16)
    says = r"^prefill_attention flashinfer serves no model with attn_logit_softcapping \(got 50.0\)"
    with pytest.raises(ConfigurationError, match=says):
        FlashInferPrefill(fake_flashinfer, config, cache, torch.bfloat16, 2)
