"""The load of the goodput benchmark: times run from the plan, and each side has its best budget."""

import asyncio
import time
from typing import Any, cast

import grpc
import pytest

from diptych.simulation.outcome import Objective, Outcome
from tests.bench import goodput
from tests.bench.goodput import APART, TOGETHER, Deployment, cells, one
from tests.bench.slo import Lengths
from tests.call import Answer

CHANNEL = cast(grpc.aio.Channel, None)


async def test_a_request_that_was_sent_late_was_due_when_it_was_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, timeouts = 100.0, []

    async def answer(channel: Any, request: Any, *, timeout_s: float) -> Answer:
        timeouts.append(timeout_s)
        return Answer(times=[101.0, 101.5])

    monkeypatch.setattr(goodput, "generate", answer)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    outcome = await one(CHANNEL, [5], Lengths(1, 2), due_s=98.0, until_s=30.0)
    assert outcome == Outcome(ttft_s=3.0, tpot_s=0.5)
    assert timeouts == [28.0]
    await asyncio.sleep(0)


def test_each_side_is_taken_at_its_best_budget() -> None:
    def row(kind: str, budget: int, num_good: int) -> dict[str, Any]:
        outcomes = [Outcome(0.1, 0.01)] * num_good + [Outcome(None, None)]
        return {"deployment": Deployment(kind, budget).name, "outcomes": outcomes}

    rows = [row(APART, 128, 2), row(APART, 512, 6), row(TOGETHER, 128, 3), row(TOGETHER, 512, 1)]
    for cell in cells(rows, Objective(1.0, 1.0), duration_s=2.0):
        assert (cell["disaggregated"], cell["disaggregated_setting"]) == (3.0, "prefill budget 512")
        assert (cell["colocated"], cell["colocated_setting"]) == (1.5, "budget 128")
        assert cell["ratio"] == 2.0
