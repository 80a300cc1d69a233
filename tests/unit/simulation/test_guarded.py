"""Workers that say what is not true of their steps: that costs goodput for a while only."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from diptych.simulation.cluster import Split, Workers
from diptych.simulation.outcome import Objective
from diptych.simulation.router import Wires
from diptych.simulation.simulation import Placing, Setup, Simulation
from diptych.simulation.workload import Shape
from diptych.step_model import StepCost, StepModel
from router.placement.guard import LOOK_S, STAY_S, SURE_S, Guard, Regime
from router.placement.guarded import Guarded
from router.placement.query import Objectives
from tests.unit.simulation.small import SMALL

TRUE = StepModel(
    StepCost(0.03, 0.0042, 0.0, 0.0, 0.0, 1.1, 100),
    StepCost(0.06, 0.0042, 0.0, 1e-3, 0.0, 1.1, 100),
)
# By these it does not matter how many sequences one worker has.
WRONG = StepModel(TRUE.decode._replace(row_s=0.0), TRUE.prefill._replace(row_s=0.0))
GOALS = Objectives(2.0, 0.07)
RATE, LONG_S, WRONG_UNTIL_S = 4.0, 120.0, 85.0


LIMITS = SMALL._replace(
    max_num_seqs=32, max_batched_tokens=256, max_model_len=1024, num_blocks=1024
)
WIRES = Wires(kv_bytes_per_token=100.0)


def requests(rate: float = RATE, long_s: float = LONG_S) -> Iterator[Shape]:
    rng, at_s = random.Random(1), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < long_s:
        yield Shape(at_s, rng.randrange(200, 500), rng.randrange(20, 60), ())


class Turned(NamedTuple):
    """A run in which workers told wrongly how long their steps take, at first."""

    turns: list[tuple[float, Regime]]  # and when; the first comes with the first request
    met: list[tuple[float, bool]]  # by when it was due, each request


def run_with_a_wrong_step_model(seed: int) -> Turned:
    workers = Workers(LIMITS, LIMITS, TRUE, told=WRONG, told_until_s=WRONG_UNTIL_S)
    placing = Placing("predicted", GOALS, local_below_tokens=0)
    setup = Setup(Split(2, 2), workers, WIRES, placing=placing, seed=seed)
    simulation = Simulation(setup, requests())
    policy = simulation.cluster.routers[0].policy
    assert isinstance(policy, Guarded)
    turns = [(0.0, Regime.FREE)]

    def watch(share: float) -> None:
        if policy.guard.regime is not turns[-1][1]:
            turns.append((share * LONG_S, policy.guard.regime))

    done = simulation.run(LONG_S, 30.0, watch)
    goal = Objective(GOALS.ttft_s or 0.0, GOALS.tpot_s or 0.0)
    outcomes = zip(done.due_s, done.outcomes, strict=True)
    return Turned(turns, [(due_s, goal.met_by(each)) for due_s, each in outcomes])


def test_a_wrong_step_model_costs_goodput_for_a_while_and_a_right_one_is_used_again() -> None:
    """Of eight runs all keep so much together: one alone keeps 0.8 to 0.98 once it has turned, as
    nearly all of two prefill workers' time is taken.
    """
    runs = [run_with_a_wrong_step_model(seed) for seed in range(1, 9)]
    before, after = list[bool](), list[bool]()
    for turns, met in runs:
        _, (fell_s, fallen), (back_s, back) = turns
        before += [is_met for due_s, is_met in met if due_s < fell_s]
        after += [is_met for due_s, is_met in met if due_s >= fell_s]
        assert (fallen, back) == (Regime.APART, Regime.FREE)
        assert fell_s <= SURE_S + 4 * LOOK_S
        assert back_s - fell_s <= STAY_S + LOOK_S
    assert sum(before) < 0.6 * len(before)
    assert sum(after) > 0.9 * len(after)


def test_workers_of_both_roles_are_helped_too() -> None:
    """By a replay of what they measured, badly placed, nothing would be better."""
    kept: dict[bool, int] = {}
    goal = Objective(GOALS.ttft_s or 0.0, GOALS.tpot_s or 0.0)
    for is_guarded in (False, True):
        workers = Workers(LIMITS, LIMITS, TRUE, told=WRONG, told_until_s=1e9)
        placing = Placing("predicted", GOALS, local_below_tokens=0, is_guarded=is_guarded)
        setup = Setup(Split(num_soft=4), workers, WIRES, placing=placing, seed=3)
        done = Simulation(setup, requests()).run(LONG_S, 30.0)
        kept[is_guarded] = sum(map(goal.met_by, done.outcomes))
    assert kept[True] > 4 * kept[False]


def test_in_a_fixed_regime_more_than_can_be_served_is_refused_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each request is late for all that were taken before it, and nobody's is kept."""
    monkeypatch.setattr(Guard, "look", lambda guard, rates: False)
    goal = Objective(GOALS.ttft_s or 0.0, GOALS.tpot_s or 0.0)
    kept: dict[Regime, int] = {}
    for regime in (Regime.FREE, Regime.APART):
        placing = Placing("predicted", GOALS, local_below_tokens=0, may_refuse=True)
        workers = Workers(LIMITS, LIMITS, TRUE)
        setup = Setup(Split(2, 2), workers, WIRES, placing=placing, seed=3)
        simulation = Simulation(setup, requests(2 * RATE, 60.0))
        policy = simulation.cluster.routers[0].policy
        assert isinstance(policy, Guarded)
        policy.guard.regime = regime
        kept[regime] = sum(map(goal.met_by, simulation.run(60.0, 30.0).outcomes))
    assert kept[Regime.FREE] > 0.95 * RATE * 60.0
    assert kept[Regime.APART] > 0.7 * kept[Regime.FREE]
