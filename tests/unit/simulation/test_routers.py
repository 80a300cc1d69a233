"""Several routers over the same workers, each of which knows of the others by the workers alone."""

import random
from collections.abc import Iterator

from diptych.simulation.cluster import Split, Workers
from diptych.simulation.outcome import Objective, goodput
from diptych.simulation.router import Wires
from diptych.simulation.simulation import Placing, Setup, Simulation
from diptych.simulation.workload import Shape
from diptych.step_model import StepCost, StepModel
from router.placement.query import Objectives
from tests.unit.simulation.small import SMALL

STEPS = StepModel(
    StepCost(0.03, 0.001, 0.0, 0.0, 0.0, 1.2, 100), StepCost(0.06, 0.001, 0.0, 1e-3, 0.0, 1.2, 100)
)
GOAL = Objective(1.5, 0.045)
RATE, LONG_S = 4.5, 60.0


def requests() -> Iterator[Shape]:
    rng, at_s = random.Random(2), 0.0
    while (at_s := at_s + rng.expovariate(RATE)) < LONG_S:
        yield Shape(at_s, rng.randrange(200, 500), rng.randrange(20, 60), ())


def goodput_of(num_routers: int) -> float:
    limits = SMALL._replace(
        max_num_seqs=32, max_batched_tokens=512, max_model_len=1024, num_blocks=2048
    )
    simulation = Simulation(
        Setup(
            Split(num_decode=8),
            Workers(limits, limits, STEPS),
            Wires(kv_bytes_per_token=100.0),
            placing=Placing("predicted", Objectives(*GOAL), 0),
            seed=3,
            num_routers=num_routers,
        ),
        requests(),
    )
    return goodput(simulation.run(LONG_S, 20.0).outcomes, GOAL, LONG_S)


def test_three_routers_do_as_well_as_one() -> None:
    """They do not send what comes together to the same idle worker."""
    assert goodput_of(3) >= 0.97 * goodput_of(1)


def apart(num_routers: int) -> float:
    """Sequences wait for prompts that are computed elsewhere, where hardly more are run."""
    rng, at_s, shapes = random.Random(1), 0.0, list[Shape]()
    while (at_s := at_s + rng.expovariate(2 * RATE)) < LONG_S:
        shapes.append(Shape(at_s, rng.randrange(200, 500), rng.randrange(60, 200), ()))
    limits = SMALL._replace(
        max_num_seqs=16, max_batched_tokens=512, max_model_len=1024, num_blocks=4096
    )
    steps = StepModel(STEPS.decode._replace(fixed_s=0.02), STEPS.prefill._replace(fixed_s=0.03))
    setup = Setup(
        Split(num_prefill=4, num_decode=3),
        Workers(limits, limits, steps),
        Wires(kv_bytes_per_token=100.0),
        placing=Placing("least-loaded", Objectives(), 0),
        seed=1,
        num_routers=num_routers,
    )
    done = Simulation(setup, iter(shapes)).run(LONG_S, 40.0)
    return goodput(done.outcomes, Objective(3.0, 0.04), LONG_S)


def test_three_routers_see_each_others_sequences_whose_prompts_are_being_computed() -> None:
    assert apart(3) >= 0.97 * apart(1)
