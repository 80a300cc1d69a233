"""What was measured is simulated run by run, and each is held against its own."""

import json

import pytest

from diptych.simulation.measured_steps import DEMO
from diptych.simulation.outcome import Objective, Outcome
from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel
from tests.bench.goodput_runs import APART, BOTH, PREDICTED, TOGETHER
from tests.bench.measured_cells import Cell
from tests.bench.simulated_goodput import (
    Compared,
    Run,
    compared,
    has_same_winner,
    learned,
    outcomes,
    steps_of,
    table,
)
from tests.bench.slo import Lengths
from tests.bench.workload import Workload

UNIT = Objective(1.0, 0.04)


def cell(kind: str, *fixed_s: float, num_steps: int = NUM_KNOWN_STEPS) -> Cell:
    """One that was measured, by workers whose steps without prompts took so long."""
    costs = [StepCost(each, 0.002, num_steps=num_steps) for each in fixed_s]
    unknown = StepCost()._asdict()
    steps = [{"decode": cost._asdict(), "prefill": unknown} for cost in costs]
    return {"key": [kind, "512", PREDICTED, "3x2", "2", "11"], "steps": steps}


def row(
    run: Run, num_measured: int, num_simulated: int
) -> tuple[Run, list[Outcome], list[Outcome]]:
    met = Outcome(0.1, 0.01)
    return run, [met] * num_measured, [met] * num_simulated


def of(kind: str, measured: float, simulated: float) -> Compared:
    return Compared(kind, True, 2.0, 3.0, 2.0, measured, simulated)


def test_steps_take_what_the_workers_of_such_a_deployment_had_learned() -> None:
    done = [cell(TOGETHER, 0.01, 0.03), cell(TOGETHER, 0.02, 0.5, num_steps=NUM_KNOWN_STEPS)]
    found = learned(done, TOGETHER, DEMO)
    assert found.decode == StepCost(0.025, 0.002, num_steps=NUM_KNOWN_STEPS)
    assert found.prefill == DEMO.prefill, "that nobody knew"
    assert learned(done, APART, DEMO) == DEMO
    assert learned([cell(APART, 0.01, num_steps=3)], APART, DEMO) == DEMO
    assert learned([{"key": [APART]}], APART, DEMO) == DEMO


def test_what_later_rows_cost_is_read_and_its_median_taken() -> None:
    done = json.loads(json.dumps(cell(TOGETHER, 0.01, 0.02, 0.03)))
    for steps, more in zip(done["steps"], ([0.003, 0.001], [], [0.001]), strict=True):
        steps["decode"]["more_row_s"] = more
    del done["steps"][1]["decode"]["more_row_s"]
    first, older, _ = steps_of(done, DEMO)
    assert first.decode.more_row_s == (0.003, 0.001)
    assert older.decode == StepCost(0.02, 0.002, num_steps=NUM_KNOWN_STEPS)
    assert learned([done], TOGETHER, DEMO).decode.more_row_s == (0.001, 0.0)


def test_each_worker_is_simulated_with_what_it_had_learned() -> None:
    medians = DEMO._replace(decode=StepCost(0.02, num_steps=NUM_KNOWN_STEPS))
    fast, slow = steps_of(cell(TOGETHER, 0.01, 0.03), medians)
    assert (fast.decode.fixed_s, slow.decode.fixed_s) == (0.01, 0.03)
    assert fast.prefill == slow.prefill == DEMO.prefill
    assert steps_of(cell(APART, 0.01, num_steps=3), medians) == [medians]
    assert steps_of({"key": [APART]}, medians) == [medians, medians]


def test_workers_may_differ() -> None:
    work = Workload([Lengths(64, 60)], vocab=1000)
    slow = DEMO._replace(decode=StepCost(0.2, num_steps=NUM_KNOWN_STEPS))
    run = Run(APART, 512, "least-loaded", "any", 0.2, 11)

    def pace_s(steps: list[StepModel]) -> float:
        found = outcomes(run, steps, work=work, unit=UNIT, duration_s=10.0)
        return max(each.tpot_s or 0.0 for each in found)

    assert pace_s([slow, DEMO]) < 0.15 < pace_s([DEMO, slow])


def test_of_seeds_the_mean_counts_and_of_budgets_the_best() -> None:
    run = Run(TOGETHER, 512, PREDICTED, "3x2", 2.0, 11)
    rows = [
        row(run, 10, 20),
        row(run._replace(seed=12), 20, 20),
        row(run._replace(budget=256), 5, 30),
        row(run._replace(wanted="3x3"), 1, 1),
    ]
    by_objectives = {(each.ttft, each.tpot): each for each in compared(rows, UNIT, 10.0)}
    assert set(by_objectives) == {(3.0, 2.0), (3.0, 3.0)}
    assert by_objectives[3.0, 2.0] == of(TOGETHER, 1.5, 3.0)
    assert by_objectives[3.0, 2.0].ratio == 2.0


def test_what_told_no_objectives_is_held_against_all() -> None:
    run = Run(APART, 512, "least-loaded", "any", 1.2, 11)
    found = list(compared([row(run, 4, 5)], UNIT, 2.0))
    assert len(found) == 9
    assert {(each.is_admitted, each.measured, each.simulated) for each in found} == {
        (False, 2.0, 2.5)
    }


@pytest.mark.parametrize(
    ("apart", "together", "is_same"),
    [
        ((1.0, 1.2), (2.0, 1.9), True),
        ((1.0, 2.0), (2.0, 1.9), False),
        ((1.96, 2.0), (2.0, 1.9), True),  # measured ahead by chance
    ],
)
def test_the_winner_of_the_fixed_regimes(
    apart: tuple[float, float], together: tuple[float, float], is_same: bool
) -> None:
    fixed = [of(APART, *apart), of(TOGETHER, *together)]
    assert has_same_winner([*fixed, of(BOTH, 9.0, 0.1)]) is is_same
    assert has_same_winner(fixed[:1]) is None
    text = table([*fixed, of(BOTH, 2.0, 2.1)])
    assert f"the better fixed one is the same in {int(is_same)} of 1" in text
    assert "soft: 1 of 1 within a tenth" in text


@pytest.mark.parametrize("kind", [APART, TOGETHER, BOTH])
@pytest.mark.parametrize("placement", ["least-loaded", PREDICTED])
def test_each_deployment_is_simulated_with_its_own_arrivals(kind: str, placement: str) -> None:
    work = Workload([Lengths(200, 20), Lengths(20, 60)], vocab=1000)
    wanted = "10x3" if placement == PREDICTED else "any"
    run = Run(kind, 512, placement, wanted, 1.0, 11)

    def simulated(of_run: Run) -> list[Outcome]:
        return outcomes(of_run, [DEMO, DEMO], work=work, unit=UNIT, duration_s=15.0)

    found = simulated(run)
    assert len(found) == len(work.arrivals(1.0, 15.0, 11))
    assert sum(map(Objective(10.0, 0.12).met_by, found)) > len(found) / 2
    assert found == simulated(run)
    assert found != simulated(run._replace(seed=12))
