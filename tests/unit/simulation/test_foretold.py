"""First tokens come when they were foretold, where more is asked for than can be served."""

import math
import random
from collections.abc import Iterator

import pytest

from diptych.simulation.cluster import Split, Workers
from diptych.simulation.journey import Foretold
from diptych.simulation.outcome import Objective
from diptych.simulation.simulation import Placing, Run, Setup, Simulation
from diptych.simulation.workload import Shape
from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel
from router.placement.query import Objectives
from tests.unit.simulation.small import SMALL

# Of the demo model on one core with AVX-512.
STEPS = StepModel(
    StepCost(0.0115, 0.0025, 1.5e-6, 0.0, 0.0, 1.08, NUM_KNOWN_STEPS),
    StepCost(0.036, 0.001, 1e-6, 0.00205, 6e-7, 1.1, NUM_KNOWN_STEPS),
)
GOAL = Objective(3.0, 0.029)
RATE, LONG_S = 3.3, 90.0


def requests(seed: int) -> Iterator[Shape]:
    rng, at_s = random.Random(seed), 0.0
    while (at_s := at_s + rng.expovariate(RATE)) < LONG_S:
        num_prompt = rng.randrange(240, 360) if rng.random() < 0.6 else rng.randrange(40, 110)
        yield Shape(at_s, num_prompt, rng.randrange(15, 110))


def run(seed: int) -> Run:
    """One worker that computes prompts, and one that decodes."""
    limits = SMALL._replace(
        max_num_seqs=32, max_batched_tokens=512, max_model_len=1296, num_blocks=1065
    )
    placing = Placing("predicted", Objectives(*GOAL), local_below_tokens=0, may_refuse=True)
    setup = Setup(Split(1, 1), Workers(limits, limits, STEPS), placing=placing, seed=seed)
    return Simulation(setup, requests(seed)).run(LONG_S, 10.0)


@pytest.mark.parametrize("seed", [1, 2])
def test_of_a_worker_that_only_computes_prompts(seed: int) -> None:
    done = run(seed)
    errors = sorted(each.error_ratio for each in done.foretold)
    assert len(errors) > 100
    assert errors[len(errors) // 2] <= 0.12
    answered = [each for each in done.outcomes if each.ttft_s is not None]
    num_late = sum(each.ttft_s > GOAL.ttft_s for each in answered if each.ttft_s is not None)
    assert num_late <= 0.08 * len(answered)


def test_what_took_no_time_was_foretold_rightly_or_not_at_all() -> None:
    """Messages may be asked to take none, and steps may."""
    assert Foretold(3.0, 2.0).error_ratio == 0.5
    assert Foretold(0.0, 0.0).error_ratio == 0.0
    assert Foretold(1e-9, 0.0).error_ratio == math.inf
