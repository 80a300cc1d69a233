"""What online requests lose beside a batch, simulated: the time to first token, with and without.

    python -m tests.bench.simulated_batch [NAME...]

The same arrivals (Poisson) alone, beside lines of a batch that are treated as any other request,
and beside lines for which nobody else has to wait. The figure is the P95 of the time to first
token, of what it is alone.
"""

import argparse
import random
from collections.abc import Iterator
from typing import NamedTuple
from unittest.mock import patch

from diptych.simulation import journey
from diptych.simulation.cluster import Split, Workers
from diptych.simulation.engine import EngineLimits
from diptych.simulation.measured_steps import DEMO
from diptych.simulation.simulation import BatchLoad, Run, Setup, Simulation
from diptych.simulation.workload import Shape
from diptych.step_model import StepCost, StepModel

_DRAIN_S = 60.0
_SEED = 1
# Made up: a step takes 6 ms, one with parts of prompts 10 ms and 25 us for each of their tokens.
_GPU = StepModel(
    StepCost(0.006, 3e-5, 2e-8, 0.0, 0.0, 1.15, 100),
    StepCost(0.010, 3e-5, 2e-8, 2.5e-5, 1e-10, 1.15, 100),
)


class Case(NamedTuple):
    """A cluster, the requests that come, on average, and the batch beside them."""

    split: Split
    model: StepModel
    rate: float  # requests per second
    num_prompt_tokens: int
    num_output_tokens: int
    batch: BatchLoad
    max_batched_tokens: int
    duration_s: float

    def arrivals(self) -> Iterator[Shape]:
        """Lengths are half as much more or less."""
        rng, at_s = random.Random(5), 0.0
        while (at_s := at_s + rng.expovariate(self.rate)) < self.duration_s:
            prompt, output = self.num_prompt_tokens, self.num_output_tokens
            yield Shape(
                at_s,
                rng.randrange(prompt // 2, prompt * 3 // 2),
                rng.randrange(output // 2, output * 3 // 2),
            )

    def run(self, batch: BatchLoad) -> Run:
        """With the default placement."""
        limits = EngineLimits(
            max_num_seqs=64,
            max_batched_tokens=self.max_batched_tokens,
            max_model_len=4096,
            num_blocks=8192,
        )
        setup = Setup(self.split, Workers(limits, limits, self.model), seed=_SEED, batch=batch)
        return Simulation(setup, self.arrivals()).run(self.duration_s, _DRAIN_S)


CASES = {
    "4+4": Case(Split(4, 4), DEMO, 3.0, 256, 64, BatchLoad(32, 256, 64), 512, 100.0),
    "gpu": Case(Split(2, 2), _GPU, 10.0, 1500, 200, BatchLoad(64, 1000, 200), 2048, 60.0),
    "short": Case(Split(1, 1), DEMO, 0.7, 256, 64, BatchLoad(16, 48, 16), 512, 200.0),
    "long": Case(Split(1, 1), DEMO, 0.7, 256, 64, BatchLoad(16, 128, 32), 512, 200.0),
}


def p95_s(run: Run) -> float:
    """Of the time to first token."""
    ttft = sorted(each.ttft_s for each in run.outcomes if each.ttft_s is not None)
    return ttft[int(0.95 * len(ttft))]


def figures(case: Case) -> str:
    """One line."""
    alone = case.run(BatchLoad())
    with patch.object(journey, "BATCH_SPARE_ONLY_S", 0.0):
        as_any = case.run(case.batch)
    beside = case.run(case.batch)
    length_s = case.duration_s + _DRAIN_S
    told = [
        f"{p95_s(run) / p95_s(alone):.2f} ({run.num_lines / length_s:.1f} lines/s)"
        for run in (as_any, beside)
    ]
    return f"alone {p95_s(alone):.3f} s, batch as any other {told[0]}, with room left {told[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[*CASES], help=", ".join(CASES))
    for name in parser.parse_args().names:
        print(f"{name}: {figures(CASES[name])}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
