"""The load of the goodput benchmark: times run from the plan, and each side has its best budget."""

import argparse
import asyncio
import itertools
import time
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from diptych.simulation.outcome import Objective, Outcome
from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel
from diptych.v1 import worker_pb2
from tests.bench import goodput
from tests.bench.goodput import FINISHED, Deployment, Point, Told, is_warm, one, turns
from tests.bench.goodput_runs import (
    APART,
    BOTH,
    FORETOLD_WHOLE,
    PREDICTED,
    TOGETHER,
    UNLOADED,
    cells,
    runs,
    table,
    told_right,
)
from tests.bench.measured_cells import MeasuredCells
from tests.bench.slo import Lengths
from tests.call import Answer

CHANNEL = cast(grpc.aio.Channel, None)
PREFILL, DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE


async def test_a_request_that_was_sent_late_was_due_when_it_was_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, timeouts = 100.0, []

    async def answer(channel: Any, request: Any, *, timeout_s: float) -> Answer:
        timeouts.append(timeout_s)
        return Answer(times=[101.0, 101.5])

    monkeypatch.setattr(goodput, "generate", answer)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    told = await one(CHANNEL, [5], Lengths(1, 2), due_s=98.0, until_s=30.0)
    assert told == Told(Outcome(ttft_s=3.0, tpot_s=0.5, num_tokens=2), [0.5], FINISHED)
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


async def test_a_request_says_what_it_wants_from_when_it_was_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    async def answer(channel: Any, request: Any, *, timeout_s: float) -> Answer:
        asked.append((request.ttft_ms, request.tpot_ms))
        return Answer()

    monkeypatch.setattr(goodput, "generate", answer)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    await one(CHANNEL, [5], Lengths(1, 2), 99.5, 30.0, Objective(2.0, 0.08))
    assert asked == [(1500.0, 80.0)]


@pytest.mark.parametrize(
    ("roles", "local_prefill", "kinds"),
    [
        ([PREFILL], False, {"prefill"}),
        ([DECODE], False, {"decode"}),
        ([DECODE], True, {"prefill", "decode"}),
        ([PREFILL, DECODE], False, {"prefill", "decode"}),
    ],
)
def test_a_worker_is_warm_once_it_knows_the_steps_that_it_is_asked_for(
    roles: list[worker_pb2.WorkerRole], local_prefill: bool, kinds: set[str]
) -> None:
    known = StepCost(0.1, num_steps=NUM_KNOWN_STEPS)
    for decode, prefill in itertools.product((StepCost(), known), repeat=2):
        told = StepModel(decode, prefill).to_proto()
        state = worker_pb2.WorkerState(roles=roles, local_prefill=local_prefill, step_model=told)
        knows = {kind for kind, cost in (("decode", decode), ("prefill", prefill)) if cost is known}
        assert is_warm(state) is (kinds <= knows)


def test_with_admission_each_objective_is_a_run() -> None:
    options = argparse.Namespace(
        ttft_multiple=[3.0, 5.0], tpot_multiple=[2.0], rate=[1.0, 2.0], seed=[11]
    )
    assert Deployment(APART, 512).points(options) == [Point(1.0, 11), Point(2.0, 11)]
    admitted = Deployment(BOTH, 512, PREDICTED).points(options)
    assert [point.key for point in admitted] == [
        ("3x2", "1", "11"),
        ("3x2", "2", "11"),
        ("5x2", "1", "11"),
        ("5x2", "2", "11"),
    ]


def test_by_turns_a_load_comes_to_each_before_the_next_and_none_is_always_first(
    tmp_path: Path,
) -> None:
    done = MeasuredCells(tmp_path / "goodput.json", {})
    options = argparse.Namespace(ttft_multiple=[5.0], tpot_multiple=[2.0], rate=[1.0], seed=[1, 2])
    soft, fixed = (Deployment(kind, 512, PREDICTED) for kind in (BOTH, TOGETHER))
    first, second = soft.points(options)
    every = [(soft, first), (fixed, first), (fixed, second), (soft, second)]
    assert turns([soft, fixed], options, done) == every
    done.add(fixed.key + first.key, {})
    assert turns([soft, fixed], options, done) == [*every[:1], *every[2:]]
    plain = Deployment(TOGETHER, 512)  # asked for nothing: loads of its own
    missing = turns([plain, soft], options, done)
    assert [each for each, _ in missing] == [plain, plain, soft, soft]


def test_runs_of_a_file_become_the_map_with_the_peak_of_each_objective(tmp_path: Path) -> None:
    done = MeasuredCells(tmp_path / "goodput.json", {})
    done.add(UNLOADED, {"ttft_s": 1.0, "tpot_s": 1.0})

    def add(deployment: Deployment, point: Point, num_good: int) -> None:
        outcomes = [Outcome(0.1, 0.01)] * num_good + [Outcome(None, None)]
        done.add(deployment.key + point.key, {"outcomes": outcomes, "cpu": {}})

    for seed, num_good in ((11, 2), (12, 4)):  # of one rate: their mean counts
        add(Deployment(APART, 512), Point(1.0, seed), num_good)
    add(Deployment(TOGETHER, 512), Point(1.0, 11), 6)
    for ttft in (3.0, 5.0):
        add(Deployment(BOTH, 512, PREDICTED), Point(1.0, 11, (ttft, 2.0)), int(2 * ttft))
    told = {(c["ttft_multiple"], c["tpot_multiple"]): c for c in cells(runs(done), UNIT, 2.0)}
    assert told[3.0, 2.0]["disaggregated"] == 1.5
    assert told[3.0, 2.0]["ratio"] == 0.5
    assert told[3.0, 2.0]["soft_admitted"] == 3.0
    assert told[5.0, 2.0]["soft_admitted"] == 5.0
    assert "soft_admitted" not in told[10.0, 2.0]
    lines = table(list(told.values())).splitlines()
    assert lines[0].endswith("soft, admitted")
    assert lines[2].split()[-1] == "3.00"
    assert lines[-1].split()[-1] == "-"


def test_of_runs_with_admission_it_is_counted_what_came_as_foretold(tmp_path: Path) -> None:
    done = MeasuredCells(tmp_path / "goodput.json", {})
    for seed in (11, 12):
        foretold = {"0.8": 1.0, "0.88": 2.0, "1.0": 5.0, "1.12": 8.0, "+Inf": 10.0}
        point = Point(1.0, seed, (3.0, 2.0))
        whole = {"0.88": 1.0, "1.12": 10.0, "+Inf": 10.0}
        cell = {"outcomes": [], "cpu": {}, "foretold": foretold, "foretold_whole": whole}
        done.add(Deployment(BOTH, 512, PREDICTED).key + point.key, cell)
    done.add(Deployment(BOTH, 512).key + Point(1.0, 11).key, {"outcomes": [], "cpu": {}})
    assert told_right(done, BOTH) == "0.60 of 20"
    assert told_right(done, BOTH, FORETOLD_WHOLE) == "0.90 of 20"
    assert told_right(done, APART) == "0.00 of 0"


UNIT = Objective(1.0, 1.0)
