"""What ``make gpu`` does with a whole cluster, on the CPU: two rounds, and a worker killed."""

import pytest
import torch

from tests.cluster import Process
from tests.gpu import served
from tests.gpu.golden import Shape

TINY = Shape(name="tiny", family="qwen3", num_layers=2, num_tokens=50, vocab_size=512, sizes={})


def test_a_whole_cluster_is_held_against_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = served.check(TINY, torch.device("cpu"), num_seqs=4, num_prompt=80, num_tokens=64)
    assert found.ways == ["nixl: DRAM at the source, DRAM at the reader, direct"]
    assert (found.num_tokens, found.holds) == (2 * 4 * 64, True)
    assert found.furthest <= found.margin
    assert min(found.first_token_s, found.token_s, found.killed_token_s, found.num_retries) > 0

    said = served._answers

    async def wrong(*args: object) -> list[list[int]]:
        return [[*text[:-1], (text[-1] + 1) % 512] for text in await said(*args)]  # type: ignore[arg-type]

    monkeypatch.setattr(served, "_answers", wrong)
    found = served.check(TINY, torch.device("cpu"), num_seqs=2, num_prompt=40, num_tokens=12)
    assert found.furthest > found.margin
    assert not found.holds


def test_a_worker_that_is_not_killed_in_time_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "kill", lambda victim: None)
    found = served.check(TINY, torch.device("cpu"), num_seqs=2, num_prompt=40, num_tokens=12)
    assert (found.num_retries, found.holds) == (0, False)
    assert found.furthest <= found.margin
