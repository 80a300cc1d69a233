"""Workers of both roles: they part the work among themselves, as what is foretold tells them."""

import random
import statistics
from collections.abc import Iterator

import pytest

from diptych.simulation.cluster import Split, Workers
from diptych.simulation.measured_steps import DEMO
from diptych.simulation.outcome import Objective, goodput
from diptych.simulation.router import Wires
from diptych.simulation.simulation import Placing, Run, Setup, Simulation
from diptych.simulation.workload import Shape
from router.placement.predicted import Predicted
from router.placement.query import Objectives
from tests.unit.simulation.small import SMALL

GOAL = Objective(1.7, 0.082)
LONG_S = 60.0


BURST_S = 15.0  # and as long a lull


def requests(
    rate: float, seed: int, burst_ratio: float = 1.0, short_ratio: float = 0.0
) -> Iterator[Shape]:
    """``burst_ratio``: in a burst so many times as many come as in a lull, the first of both.

    ``short_ratio``: of answers, that are two tokens.
    """
    rng, at_s = random.Random(seed), 0.0
    high = 2 * rate * burst_ratio / (burst_ratio + 1)
    while at_s < LONG_S:
        at_s += rng.expovariate(high if at_s % (2 * BURST_S) < BURST_S else high / burst_ratio)
        num_output = 2 if rng.random() < short_ratio else rng.randrange(10, 110)
        yield Shape(at_s, rng.randrange(50, 600), num_output, ())


def run(
    placement: str,
    split: Split,
    rate: float,
    seed: int,
    burst_ratio: float = 1.0,
    short_ratio: float = 0.0,
) -> Run:
    shapes = requests(rate, seed, burst_ratio, short_ratio)
    return simulation(placement, split, seed, shapes).run(LONG_S, 10.0)


def simulation(placement: str, split: Split, seed: int, shapes: Iterator[Shape]) -> Simulation:
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
    return Simulation(setup, shapes)


def goodput_of(
    placement: str, split: Split, rate: float, seed: int, short_ratio: float = 0.0
) -> float:
    done = run(placement, split, rate, seed, short_ratio=short_ratio)
    return goodput(done.outcomes, GOAL, LONG_S)


def num_met_in_second_burst(placement: str, split: Split, seed: int) -> int:
    done = run(placement, split, 5.5, seed, 3.0)
    came = zip(done.due_s, done.outcomes, strict=True)
    return sum(GOAL.met_by(outcome) for due_s, outcome in came if due_s >= 2 * BURST_S)


@pytest.mark.parametrize("seed", [1, 2])
def test_they_do_better_than_by_load(seed: int) -> None:
    """Some come to compute prompts, and others to decode: those are interrupted by few."""
    soft = Split(num_soft=8)
    foretold = goodput_of("predicted", soft, 6.5, seed)
    assert foretold >= 1.05 * goodput_of("least-loaded", soft, 6.5, seed)


@pytest.mark.parametrize("seed", [1, 3])
def test_a_burst_finds_them_parted_as_well_as_the_best_fixed_split(seed: int) -> None:
    """The best has four that compute prompts; the first burst tells what requests are like."""
    soft = num_met_in_second_burst("predicted", Split(num_soft=8), seed)
    assert soft >= 0.97 * num_met_in_second_burst("least-loaded", Split(4, 4), seed)


def test_answers_of_two_tokens_are_kept_as_well_as_by_colocated_engines() -> None:
    """Their pace is the hand-off alone, which any part of a step may be before."""

    def kept(split: Split) -> float:
        return sum(goodput_of("predicted", split, 4.0, seed, short_ratio=0.3) for seed in (1, 2))

    assert kept(Split(num_soft=8)) >= 0.98 * kept(Split(num_decode=8))


def test_what_first_tokens_were_foretold_is_kept_beside_what_they_took() -> None:
    done = run("predicted", Split(4, 4), 4.0, 1)
    assert len(done.foretold) == sum(each.ttft_s is not None for each in done.outcomes)
    assert statistics.median(each.error_ratio for each in done.foretold) <= 0.12


def short_and_long() -> Iterator[Shape]:
    """Answers of 8 and of 120 tokens, and each request allows as many as it will have."""
    rng, at_s = random.Random(1), 0.0
    while (at_s := at_s + rng.expovariate(2.0)) < LONG_S:
        yield Shape(at_s, rng.randrange(50, 600), rng.choice((8, 120)), ())


def test_workers_part_by_what_answers_had_and_not_by_what_they_were_expected_to_have() -> None:
    """An answer that may have 120 tokens is expected to have 64, and that of 8 no more than 8."""
    done = simulation("predicted", Split(num_soft=4), 1, short_and_long())
    done.run(LONG_S, 10.0)
    policy = done.cluster.routers[0].policy
    assert isinstance(policy, Predicted)
    assert policy._parting._mix.num_output_tokens == pytest.approx(64, rel=0.15), "31 by guesses"
