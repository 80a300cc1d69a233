"""What `tests.bench.goodput` measured, simulated: the same arrivals, lengths and objectives.

    .venv/bin/python -m tests.bench.simulated_goodput bench-goodput.json --trace X.csv

Each run of the file is simulated with what steps took, as each of its workers had learned it by
its end: what one knew nothing of with the median of the file's runs of such a deployment, or that
of ``--steps``. For each rate and each pair of objectives: what was measured and what was simulated,
requests/s, and whether the better one of a split and two colocated engines is the same.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from diptych.simulation.cluster import Split, Workers
from diptych.simulation.engine import EngineLimits
from diptych.simulation.measured_steps import DEMO, cost_of, read_steps
from diptych.simulation.outcome import Objective, Outcome, goodput
from diptych.simulation.router import Wires
from diptych.simulation.simulation import Placing, Setup, Simulation
from diptych.simulation.trace_file import read_trace
from diptych.simulation.workload import Shape
from diptych.step_model import StepCost, StepModel
from router.placement.query import Objectives
from tests.bench.goodput import DRAIN_S
from tests.bench.goodput_runs import (
    ADMITTED,
    APART,
    BOTH,
    PREDICTED,
    TOGETHER,
    TPOT_MULTIPLES,
    TTFT_MULTIPLES,
    unit_of,
)
from tests.bench.measured_cells import Cell, MeasuredCells
from tests.bench.slo import scaled
from tests.bench.workload import Workload

_LIMITS: Final = EngineLimits(max_num_seqs=32, max_model_len=1296, num_blocks=1065)  # 768 MiB
_DECODE_BUDGET: Final = 512  # the default of a decode worker that computes no prompts
_SPLITS: Final = {APART: Split(1, 1), TOGETHER: Split(0, 2), BOTH: Split(0, 0, 2)}
_WIRES: Final = Wires(bytes_per_s=4e9)  # as pairs of one machine tell that they move over nixl
_TIED: Final = 0.03  # of the better one: who is ahead by less is so by chance
_CLOSE: Final = 0.1


class Run(NamedTuple):
    """One that was measured, as its key says."""

    kind: str
    budget: int
    placement: str
    wanted: str  # multiples of the unloaded medians that requests told; any: none
    rate: float
    seed: int

    @classmethod
    def of(cls, cell: Cell) -> "Run":
        kind, budget, placement, wanted, rate, seed = cell["key"]
        return cls(kind, int(budget), placement, wanted, float(rate), int(seed))

    def setup(self, steps: Sequence[StepModel], unit: Objective) -> Setup:
        """The same deployment; ``steps``: of each worker; ``unit``: the unloaded medians."""
        limits = _LIMITS._replace(max_batched_tokens=self.budget)
        decode = limits
        if self.kind == APART:
            decode = limits._replace(max_batched_tokens=_DECODE_BUDGET, local_prefill=False)
        below = 0 if self.kind == APART else 64
        placing = Placing(self.placement, local_below_tokens=below, cuts_off=True)
        if self.placement == PREDICTED:
            ttft, tpot = map(float, self.wanted.split("x"))
            wanted = Objectives(ttft * unit.ttft_s, tpot * unit.tpot_s)
            placing = placing._replace(objectives=wanted, may_refuse=True)
        workers = Workers(limits, decode, steps[0], models=tuple(steps))
        return Setup(_SPLITS[self.kind], workers, _WIRES, placing=placing, seed=self.seed)


class Compared(NamedTuple):
    """One deployment where one pair of objectives is wanted, at one rate. Requests/s."""

    kind: str
    is_admitted: bool
    rate: float
    ttft: float
    tpot: float
    measured: float
    simulated: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.measured if self.measured else float("nan")


def learned(done: Iterable[Cell], kind: str, otherwise: StepModel) -> StepModel:
    """What steps took where such a deployment was measured: the median of its workers."""
    told = [steps for cell in done if cell["key"][0] == kind for steps in cell.get("steps", ())]
    costs = []
    for name, least in otherwise._asdict().items():
        known = [cost for cost in (cost_of(steps[name]) for steps in told) if cost.is_known]
        costs.append(_median(known) if known else least)
    return StepModel(*costs)


def _median(costs: Sequence[StepCost]) -> StepCost:
    """Of each part of them."""
    plain = (name for name in StepCost._fields if name.endswith(("_s", "_ratio")))
    medians = {
        name: statistics.median(getattr(cost, name) for cost in costs)
        for name in plain
        if name != "more_row_s"
    }
    more = itertools.zip_longest(*(cost.more_row_s for cost in costs), fillvalue=0.0)
    return costs[0]._replace(**medians, more_row_s=tuple(map(statistics.median, more)))


def steps_of(cell: Cell, otherwise: StepModel) -> list[StepModel]:
    """What the steps of each of its workers took; ``otherwise``: what it knew nothing of."""
    found = []
    for steps in cell.get("steps", ()):
        costs = {name: cost_of(cost) for name, cost in steps.items()}
        known = {name: cost for name, cost in costs.items() if cost.is_known}
        found.append(otherwise._replace(**known))
    return found or [otherwise] * sum(_SPLITS[cell["key"][0]])


def outcomes(
    run: Run, steps: Sequence[StepModel], *, work: Workload, unit: Objective, duration_s: float
) -> list[Outcome]:
    """What comes of the load that the measurement offered."""
    shapes = (
        Shape(at_s, lengths.prompt, lengths.output)
        for at_s, lengths in work.arrivals(run.rate, duration_s, run.seed)
    )
    simulation = Simulation(run.setup(steps, unit), shapes)
    return simulation.run(duration_s, DRAIN_S).outcomes


def compared(
    rows: Sequence[tuple[Run, Sequence[Outcome], Sequence[Outcome]]],
    unit: Objective,
    duration_s: float,
) -> Iterator[Compared]:
    """Of what was measured and simulated; of several seeds the means, of several budgets the best.

    What requests did not tell is compared with every pair of objectives.
    """
    for ttft, tpot in itertools.product(TTFT_MULTIPLES, TPOT_MULTIPLES):
        objective = Objective(ttft * unit.ttft_s, tpot * unit.tpot_s)
        found: dict[tuple[str, bool, float], dict[int, list[tuple[float, float]]]] = {}
        for run, measured, simulated in rows:
            if run.wanted in ("any", f"{ttft:g}x{tpot:g}"):
                both = (
                    goodput(measured, objective, duration_s),
                    goodput(simulated, objective, duration_s),
                )
                of_budget = found.setdefault((run.kind, run.placement == PREDICTED, run.rate), {})
                of_budget.setdefault(run.budget, []).append(both)
        for (kind, is_admitted, rate), of_budget in found.items():
            means = [
                [statistics.fmean(values) for values in zip(*pairs, strict=True)]
                for pairs in of_budget.values()
            ]
            best = [max(values) for values in zip(*means, strict=True)]
            yield Compared(kind, is_admitted, rate, ttft, tpot, *best)


def has_same_winner(those: Sequence[Compared]) -> bool | None:
    """Whether the better one of the fixed regimes is the same; None: there are not two."""
    fixed = [each for each in those if each.kind != BOTH]
    if len(fixed) != len(_SPLITS) - 1:
        return None
    best = max(fixed, key=lambda each: each.simulated)
    return best.measured >= (1.0 - _TIED) * max(each.measured for each in fixed)


def table(those: Iterable[Compared]) -> str:
    """A line for each rate and pair of objectives, and what follows from all."""
    groups: dict[tuple[bool, float, float, float], list[Compared]] = {}
    for each in those:
        groups.setdefault((each.is_admitted, each.rate, each.ttft, each.tpot), []).append(each)
    lines = ["rate TTFT TPOT: measured, simulated (ratio)"]
    for is_admitted in sorted({key[0] for key in groups}):
        own = {key: group for key, group in groups.items() if key[0] == is_admitted}
        lines.append("with admission" if is_admitted else "plain")
        for (_, rate, ttft, tpot), group in own.items():
            told = (
                f"{ADMITTED[each.kind]} {each.measured:.2f} {each.simulated:.2f} ({each.ratio:.2f})"
                for each in group
            )
            lines.append(f"{rate:g} {ttft:g}x {tpot:g}x: {', '.join(told)}")
        for kind in dict.fromkeys(each.kind for group in own.values() for each in group):
            ratios = [e.ratio for group in own.values() for e in group if e.kind == kind]
            num_close = sum(abs(ratio - 1.0) <= _CLOSE for ratio in ratios)
            lines.append(
                f"{ADMITTED[kind]}: {num_close} of {len(ratios)} within a tenth,"
                f" median {statistics.median(ratios):.2f}"
            )
        same = [has_same_winner(group) for group in own.values()]
        known = [each for each in same if each is not None]
        lines.append(f"the better fixed one is the same in {sum(known)} of {len(known)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path, help="what tests.bench.goodput wrote")
    parser.add_argument("--trace", type=Path, required=True, help="as of diptych simulate")
    parser.add_argument("--steps", type=Path, help="of runs that tell none; else the demo model's")
    options = parser.parse_args()
    done = MeasuredCells(options.measured, {"trace": options.trace.name})
    told, unit = done.common, unit_of(done)
    otherwise = DEMO if options.steps is None else read_steps(options.steps)
    shapes = read_trace(options.trace)
    lengths = scaled(shapes, told["divide"], told["max_prompt"], told["max_output"])
    moments_s = [shape.at_s for shape in shapes] if told["arrivals"] == "trace" else []
    cells = [cell for cell in done if cell["key"][0] in _SPLITS]
    runs = [Run.of(cell) for cell in cells]
    simulate = partial(
        outcomes,
        work=Workload(lengths, 1000, moments_s),
        unit=unit,
        duration_s=told["duration"],
    )
    medians = {kind: learned(cells, kind, otherwise) for kind in _SPLITS}
    steps = [steps_of(cell, medians[cell["key"][0]]) for cell in cells]
    with ProcessPoolExecutor() as processes:
        simulated = list(processes.map(simulate, runs, steps))
    measured = [[Outcome(*each) for each in cell["outcomes"]] for cell in cells]
    rows = list(zip(runs, measured, simulated, strict=True))
    print(table(compared(rows, unit, told["duration"])))  # noqa: T201


if __name__ == "__main__":
    main()
