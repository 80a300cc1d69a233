"""What ``make gpu`` does, as far as it goes without a GPU: in the interpreter, on small shapes."""

from tests.triton_interpreter import INTERPRETED

# isort: split
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from diptych.engine.backends.cuda.backend import CudaBackend
from diptych.engine.scheduling.step import SampledToken
from tests.gpu import attention, digests, draws, free_running, golden, handoff, overlap, products
from tests.integration.transfer_rig import Reader
from tests.unit.engine.backends.cuda.recorded_graphs import RecordedGraphs

# Numbers that are none are asked of a part without tokens, and not used.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)

TINY = golden.Shape(
    name="tiny", family="qwen3", num_layers=1, num_tokens=50, vocab_size=512, sizes={}
)


def once(do: Callable[[], object]) -> float:
    do()
    return 1.0


@pytest.mark.parametrize(
    "case",
    [
        attention.Case(4, 2, 64, num_seqs=2, context=70, num_queries=1),
        attention.Case(2, 1, 64, num_seqs=1, context=70, num_queries=70),
        attention.Case(2, 1, 64, num_seqs=2, context=70, num_queries=9),
        attention.Case(2, 1, 64, num_seqs=2, context=70, num_queries=1, cache="int8"),
        attention.Case(2, 1, 64, num_seqs=2, context=70, num_queries=9, cache="fp8"),
    ],
    ids=str,
)
def test_attention_is_compared(case: attention.Case) -> None:
    measured = attention.check(case, INTERPRETED, torch.float32, once)
    assert measured.error < 1e-4
    assert measured.holds
    num_bytes = 4 if case.cache == "auto" else 1
    assert measured.kv_bytes_per_s == 2 * case.num_seqs * case.num_kv_heads * 70 * 64 * num_bytes
    assert attention.copy_bytes_per_s(torch.device("cpu"), 100, once) == 8 * 200


@pytest.mark.parametrize("is_sampled", [False, True])
def test_digests_are_compared(is_sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = digests.Case(4104, 5, is_sampled)
    found = digests.check(case, torch.device("cpu"), once)
    assert found.holds
    assert found.bytes_per_s == 5 * 4104
    monkeypatch.setattr(digests, "block_digest", lambda *_: b"")
    assert not digests.check(case, torch.device("cpu"), once).holds


def test_draws_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    found = draws.check(draws.Case("plain", 4, 600), torch.device("cpu"), once)
    assert (found.num_wrong, found.holds) == (0, True)
    monkeypatch.setattr(draws, "sample", lambda *_: [SampledToken(0, 1.0)] * 4)
    found = draws.check(draws.Case("plain", 4, 600), torch.device("cpu"), once)
    assert (found.num_wrong, found.holds) == (4, False)


@pytest.mark.parametrize("stored", ["4 bits", "8 bits", "fp8 by groups", "fp8"])
def test_products_are_compared(
    stored: Literal["4 bits", "8 bits", "fp8 by groups", "fp8"], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = products.Case(stored, 3, 64, 256)
    measured = products.check(case, INTERPRETED, torch.float32, once)
    assert measured.error < 1e-5
    assert measured.holds
    stored_bytes = {
        "4 bits": 8192 + 128 * 5,
        "8 bits": 16_384 + 128 * 5,
        "fp8 by groups": 16_384 + 128 * 4,
        "fp8": 16_384,
    }
    assert measured.weight_bytes_per_s == stored_bytes[stored]
    monkeypatch.setattr(products, "MAX_ERROR", -1.0)
    assert not products.check(case, INTERPRETED, torch.float32, once).holds


def test_the_golden_rule_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = golden.check(TINY, INTERPRETED, (torch.float32,))
    assert found.holds
    assert 0 < found.float32_error < 1e-3

    def wrong(*args: object) -> torch.Tensor:
        return torch.full((golden.NUM_DECODED + 1, 512), math.nan)

    monkeypatch.setattr(golden, "engine", wrong)
    assert not golden.check(TINY, INTERPRETED, (torch.float32,)).holds


def test_free_running_is_checked() -> None:
    (found,) = free_running.check(TINY, INTERPRETED, (torch.float32,), num_seqs=2, num_tokens=3)
    assert (found.num_tokens, found.dtype, found.holds) == (6, "float32", True)
    assert found.margin == 2 * golden.FLOAT32_ERROR


@pytest.mark.parametrize(
    ("below", "num_ties", "holds"), [(0.0, 0, True), (0.5, 1, True), (1.5, 1, False)]
)
def test_a_token_that_is_not_near_the_best_is_told(
    below: float, num_ties: int, holds: bool
) -> None:
    truth = torch.tensor([[3.0, 0.0, 3.0 + below], [0.0, 5.0, 0.0]])
    found = free_running.judged(TINY, torch.float32, [[7, 7, 0], [7, 7, 1]], truth, 1.0)
    assert (found.num_ties, found.furthest, found.holds) == (num_ties, below, holds)
    assert not free_running.judged(TINY, torch.float32, [[0], [0]], truth * math.nan, 1.0).holds


def test_graphs_and_two_steps_in_flight_are_compared_with_neither() -> None:
    graphed = CudaBackend(torch.device("cpu"), RecordedGraphs())
    found = overlap.check(
        TINY, INTERPRETED, graphed, torch.float32, num_seqs=2, num_tokens=3, num_rounds=1
    )
    assert found.holds
    assert (found.num_equal, found.num_ahead) == (2, 2)


def small(source: str, reader: str, transport: str) -> handoff.Case:
    return handoff.Case(source, reader, transport, num_heads=1, num_blocks=8)


def test_pulls_over_each_way_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    found = handoff.check(small("device", "host", "staged"), "cpu")
    assert (found.holds, found.message) == (True, "")
    assert found.way == "VRAM of device 0 at the source, DRAM at the reader, staged at the source"
    assert found.bytes_per_s > 0
    monkeypatch.setattr(Reader, "content", lambda *_: b"others")
    assert not handoff.check(small("host", "device", "inline"), "cpu").holds


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run make gpu")
def test_a_way_that_is_not_there_is_no_success() -> None:
    found = handoff.check(small("device", "device", "nixl"), "cpu")
    assert (found.holds, found.message) == (False, "the source ended at its start")


def test_every_pair_of_memories_is_among_the_cases() -> None:
    joined = {(case.source, case.reader) for case in handoff.CASES}
    assert joined == {("device", "device"), ("device", "host"), ("host", "device")}
    assert handoff.Case("device", "device", "nixl") in handoff.CASES


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run make gpu")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.check", "--out", str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("skipped, nothing was checked: device cuda: ")
    assert not out.exists()
