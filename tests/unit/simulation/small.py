"""Small simulated clusters, and requests for them."""

import random
from collections.abc import Iterator

from diptych.simulation.cluster import Split, Workers
from diptych.simulation.engine import EngineLimits
from diptych.simulation.router import RouterLimits, Wires
from diptych.simulation.simulation import Placing, Setup
from diptych.simulation.workload import Shape
from diptych.step_model import StepCost, StepModel

# A step takes 10 ms, one with parts of prompts 20 ms and 1 ms for each of their tokens.
ROUND = StepModel(
    StepCost(0.010, num_steps=100), StepCost(0.020, prefill_token_s=0.001, num_steps=100)
)
# As a real one, with noise.
VARIED = StepModel(
    StepCost(0.04, 0.002, 1e-5, 0.0, 0.0, 1.3, 100),
    StepCost(0.1, 0.002, 1e-5, 1e-3, 1e-7, 1.3, 100),
)
SMALL = EngineLimits(max_num_seqs=8, max_batched_tokens=64, max_model_len=256, num_blocks=48)


def setup(
    split: Split,
    *,
    model: StepModel = VARIED,
    limits: EngineLimits = SMALL,
    router: RouterLimits | None = None,
    placement: str = "least-loaded",
    may_leap: bool = True,
) -> Setup:
    return Setup(
        split,
        Workers(limits, limits, model, is_noisy=model is not ROUND, may_leap=may_leap),
        Wires(message_s=0.001, bytes_per_s=1e6, pull_s=0.002, kv_bytes_per_token=100.0),
        router or RouterLimits(),
        Placing(placement, local_below_tokens=0),
        seed=3,
    )


def some(num: int, seed: int, rate: float = 6.0) -> Iterator[Shape]:
    """Random requests; some share a prefix, some want a single token."""
    rng, at_s = random.Random(seed), 0.0
    for _ in range(num):
        at_s += rng.expovariate(rate)
        prefix = (rng.randrange(3),) if rng.random() < 0.3 else ()
        yield Shape(at_s, rng.randrange(1, 150), rng.randrange(1, 60), prefix)
