"""Workers of both roles: they part the work among themselves, as what is foretold tells them."""

import random
from collections.abc import Iterator

import pytest

from diptych.simulation.cluster import Split, Workers
from diptych.simulation.measured_steps import DEMO
from diptych.simulation.outcome import Objective, goodput
from diptych.simulation.router import Wires
from diptych.simulation.simulation import Placing, Setup, Simulation
from diptych.simulation.workload import Shape
from router.placement.types import Objectives
from tests.unit.simulation.small import SMALL

GOAL = Objective(1.7, 0.082)
LONG_S = 60.0


def requests(rate: float, seed: int) -> Iterator[Shape]:
    rng, at_s = random.Random(seed), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < LONG_S:
        yield Shape(at_s, rng.randrange(50, 600), rng.randrange(10, 110), ())


def goodput_of(placement: str, split: Split, rate: float, seed: int) -> float:
    limits = SMALL._replace(
        max_num_seqs=64, max_batched_tokens=512, max_model_len=1024, num_blocks=2048
    )
    setup = Setup(
        split,
        Workers(limits, limits, DEMO),
        Wires(),
        placing=Placing(placement, Objectives(*GOAL), is_guarded=False),
        seed=seed,
    )
    return goodput(Simulation(setup, requests(rate, seed)).run(LONG_S, 10.0).outcomes, GOAL, LONG_S)


@pytest.mark.parametrize("seed", [1, 2])
def test_they_do_better_than_by_load(seed: int) -> None:
    """Some come to compute prompts, and others to decode: those are interrupted by few."""
    soft = Split(num_soft=8)
    foretold = goodput_of("predicted", soft, 6.5, seed)
    assert foretold >= 1.05 * goodput_of("least-loaded", soft, 6.5, seed)
