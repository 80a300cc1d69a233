"""The map of ``tests.bench.goodput``, simulated: its deployments, arrivals, lengths, objectives.

    .venv/bin/python -m tests.bench.simulated_goodput --trace AzureLLMInferenceTrace_conv.csv

Both print the same table, so that what was simulated can be held against what was measured.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from diptych.simulation.cluster import Split, Workers
from diptych.simulation.engine import EngineLimits
from diptych.simulation.measured_steps import DEMO, read_steps
from diptych.simulation.outcome import Objective, Outcome
from diptych.simulation.simulation import Placing, Setup, Simulation
from diptych.simulation.workload import Shape, read_trace
from tests.bench.goodput import APART, DRAIN_S, TOGETHER, Workload, cells, table
from tests.bench.slo import scaled

LIMITS = EngineLimits(max_num_seqs=32, max_model_len=1296, num_blocks=1065)  # 768 MiB
MAX_PROMPT, MAX_OUTPUT = 1024, 256
DECODE_BUDGET = 512  # the default of a decode worker that computes no prompts


def setups(options: argparse.Namespace) -> Iterator[tuple[str, Setup]]:
    """Each deployment by its name in the map."""
    model = DEMO if options.steps is None else read_steps(options.steps)
    placing = Placing(local_below_tokens=0)
    for budget in options.prefill_budget:
        workers = Workers(_limits(budget), _limits(DECODE_BUDGET), model)
        yield f"{APART} {budget}", Setup(Split(1, 1), workers, placing=placing)
    for budget in options.budget:
        workers = Workers(_limits(budget), _limits(budget), model)
        yield f"{TOGETHER} {budget}", Setup(Split(0, 2), workers, placing=placing)


def _limits(budget: int) -> EngineLimits:
    return LIMITS._replace(max_batched_tokens=budget)


def outcomes(setup: Setup, work: Workload, rate: float, duration_s: float) -> list[Outcome]:
    """Of the load that the measurement offers."""
    shapes = (
        Shape(at_s, lengths.prompt, lengths.output)
        for at_s, lengths in work.arrivals(rate, duration_s)
    )
    return Simulation(setup, shapes).run(duration_s, DRAIN_S).outcomes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="as of diptych simulate")
    parser.add_argument("--steps", type=Path, help="step model; without it the demo model's")
    parser.add_argument("--divide", type=float, default=4.0, help="all lengths by this")
    parser.add_argument("--rate", type=float, nargs="+", default=[1.2, 2.0])
    parser.add_argument("--duration", type=float, default=30.0, help="s of arrivals per rate")
    parser.add_argument("--budget", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--prefill-budget", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--unit-ttft", type=float, default=0.346, help="unloaded median, s")
    parser.add_argument("--unit-tpot", type=float, default=0.0412, help="unloaded median, s")
    options = parser.parse_args()
    lengths = scaled(read_trace(options.trace), options.divide, MAX_PROMPT, MAX_OUTPUT)
    work = Workload(lengths, vocab=1000)
    rows = [
        {"deployment": name, "outcomes": outcomes(setup, work, rate, options.duration)}
        for name, setup in setups(options)
        for rate in options.rate
    ]
    unit = Objective(options.unit_ttft, options.unit_tpot)
    print(table(cells(rows, unit, options.duration)))  # noqa: T201


if __name__ == "__main__":
    main()
