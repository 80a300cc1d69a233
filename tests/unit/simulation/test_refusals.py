"""More requests than workers: those that look lost are refused, so that the others are in time."""

import random
from collections.abc import Iterator

from diptych.errors import DeadlineUnreachableError
from diptych.simulation.cluster import Split, Workers
from diptych.simulation.journey import UNFINISHED
from diptych.simulation.measured_steps import DEMO
from diptych.simulation.outcome import Objective, goodput
from diptych.simulation.router import RouterLimits, Wires
from diptych.simulation.simulation import Placing, Run, Setup, Simulation
from diptych.simulation.workload import Shape
from diptych.step_model import StepCost, StepModel
from router.placement.query import Objectives
from tests.unit.simulation.small import ROUND, SMALL

GOAL = Objective(1.7, 0.082)
LONG_S, RATE = 30.0, 6.0


def requests() -> Iterator[Shape]:
    rng, at_s = random.Random(1), 0.0
    while (at_s := at_s + rng.expovariate(RATE)) < LONG_S:
        yield Shape(at_s, rng.randrange(50, 600), rng.randrange(10, 110), ())


def run(placement: str, *, may_refuse: bool) -> Run:
    limits = SMALL._replace(
        max_num_seqs=64, max_batched_tokens=512, max_model_len=1024, num_blocks=2048
    )
    placing = Placing(placement, Objectives(*GOAL), is_guarded=False, may_refuse=may_refuse)
    setup = Setup(
        Split(num_soft=4), Workers(limits, limits, DEMO), Wires(), placing=placing, seed=1
    )
    return Simulation(setup, requests()).run(LONG_S, 10.0)


def test_who_is_refused_makes_room_for_those_that_can_be_in_time() -> None:
    served, refusing = run("predicted", may_refuse=False), run("predicted", may_refuse=True)
    good = goodput(refusing.outcomes, GOAL, LONG_S)
    assert good >= 1.2 * goodput(served.outcomes, GOAL, LONG_S)
    assert refusing.refusals.keys() == {DeadlineUnreachableError.reason}
    answered = [outcome for outcome in refusing.outcomes if outcome.ttft_s is not None]
    assert len(answered) + sum(refusing.refusals.values()) == len(refusing.outcomes)
    assert sum(map(GOAL.met_by, answered)) >= 0.85 * len(answered)


def chats() -> Iterator[Shape]:
    """Of each prompt all but 64 tokens are those of many others."""
    rng, at_s = random.Random(1), 0.0
    while (at_s := at_s + rng.expovariate(10.0)) < LONG_S:
        topic = 3 * rng.randrange(4)
        yield Shape(at_s, 1600, rng.randrange(15, 30), (topic, topic + 1, topic + 2))


def test_what_waits_and_is_cached_lets_nobody_be_refused() -> None:
    limits = SMALL._replace(
        max_num_seqs=6, max_batched_tokens=512, max_model_len=2048, num_blocks=3000
    )
    steps = StepModel(
        StepCost(0.03, 0.001, 0, 0, 0, 1.1, 100), StepCost(0.06, 0.001, 0, 1e-3, 0, 1.1, 100)
    )
    placing = Placing("predicted", Objectives(2.5, 0.2), local_below_tokens=0, may_refuse=True)
    wires = Wires(kv_bytes_per_token=100.0)
    setup = Setup(Split(1, 2), Workers(limits, limits, steps), wires, placing=placing, seed=1)
    ended = Simulation(setup, chats()).run(LONG_S, 20.0)
    num_refused = sum(ended.refusals.values())
    assert num_refused <= 0.15 * len(ended.outcomes), "0.26 where whole prompts count"


def test_who_foretells_nothing_refuses_nobody() -> None:
    served, refusing = run("least-loaded", may_refuse=False), run("least-loaded", may_refuse=True)
    assert served.outcomes == refusing.outcomes


def test_who_is_never_asked_is_judged_when_its_first_token_is_due() -> None:
    """As the router does: a place that others keep says nothing of when it comes free."""
    limits = SMALL._replace(num_blocks=64)
    placing = Placing("predicted", Objectives(0.5), is_guarded=False, may_refuse=True)
    setup = Setup(
        Split(num_soft=1),
        Workers(limits, limits, ROUND),
        Wires(),
        RouterLimits(max_concurrent=1),
        placing,
        seed=1,
    )
    long, waiting = Shape(0.0, 20, 200, ()), Shape(0.1, 20, 10, ())
    told = Simulation(setup, iter([long, waiting])).run(0.5, 0.5)
    assert told.refusals == {DeadlineUnreachableError.reason: 1, UNFINISHED: 1}
