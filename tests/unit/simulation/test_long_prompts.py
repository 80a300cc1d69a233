"""Prompts that take five seconds, on workers of both roles that could serve them all."""

import random
from collections.abc import Iterator

from diptych.simulation.cluster import Split, Workers
from diptych.simulation.engine import EngineLimits
from diptych.simulation.measured_steps import DEMO
from diptych.simulation.router import Wires
from diptych.simulation.simulation import Placing, Setup, Simulation
from diptych.simulation.workload import Shape
from router.placement.query import Objectives

LIMITS = EngineLimits(max_num_seqs=64, max_batched_tokens=512, max_model_len=4096, num_blocks=2048)
GOALS = Objectives(26.7, 0.105)  # five times, and twice, what one has alone
RATE, LONG_S = 0.3, 240.0


def requests() -> Iterator[Shape]:
    rng, at_s = random.Random(12), 0.0
    while (at_s := at_s + rng.expovariate(RATE)) < LONG_S:
        yield Shape(at_s, rng.randrange(2500, 3900), rng.randrange(8, 32))


def test_nothing_is_refused_that_idle_workers_would_serve_in_time() -> None:
    """Whoever has just computed such a prompt is hardly slower for it: 4 of 81 were refused."""
    workers = Workers(LIMITS, LIMITS, DEMO)
    placing = Placing("predicted", GOALS, local_below_tokens=64, may_refuse=True)
    setup = Setup(Split(0, 0, 3), workers, Wires(), placing=placing)
    done = Simulation(setup, requests()).run(LONG_S, 60.0)
    assert len(done.outcomes) > 70
    assert not done.refusals
    kept = [GOALS.kept_by(each.ttft_s, each.tpot_s) for each in done.outcomes if each.ttft_s]
    assert sum(kept) >= 0.97 * len(done.outcomes)
