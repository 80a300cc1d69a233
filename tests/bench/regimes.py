"""Workers of both roles against every fixed regime, simulated: steady, in bursts, in a drift.

    .venv/bin/python -m tests.bench.regimes --trace AzureLLMInferenceTrace_conv.csv --out X.json

A cell is one deployment of so many workers, under one load, with one seed. Each is written when
it is done, and what is in the file already is not simulated again: ``--cells 20`` makes twenty
more. ``--table`` only prints. Fixed regimes are colocated engines and splits; each is placed by
load, and by ``predicted`` with its admission. Arrivals are Poisson, the same for all.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from diptych.cli.simulate import unloaded
from diptych.simulation.outcome import Objective, goodput
from diptych.simulation.settings import SimulationConfig
from diptych.simulation.simulation import Placing, Run, Setup, Simulation
from diptych.simulation.trace_file import read_trace
from router.placement.query import Objectives
from tests.bench.measured_cells import Cell, MeasuredCells

LOADS: Final = {
    "steady": {"burst_ratio": 1.0, "drift_ratio": 1.0},
    "bursts": {"burst_ratio": 3.0, "drift_ratio": 1.0},
    "drift": {"burst_ratio": 1.0, "drift_ratio": 8.0},
}
SHARES: Final = (0.0, 0.25, 0.375, 0.5, 0.625)  # of workers, that only compute prompts
TTFT_MULTIPLE, TPOT_MULTIPLE = 5.0, 2.0
BIN_S: Final = 5.0
_AS_GOOD: Final = 0.9  # of what is met at the end of a phase


class Regime(NamedTuple):
    """How many workers of which roles, and what places."""

    workers: str
    placement: str


class Load(NamedTuple):
    """What comes, for so many workers."""

    num_workers: int
    name: str
    seed: int


def regimes(num_workers: int) -> Iterator[Regime]:
    """The soft one first."""
    yield Regime(f"soft={num_workers}", "predicted")
    nums = sorted({round(share * num_workers) for share in SHARES})
    for placement, num in itertools.product(("least-loaded", "predicted"), nums):
        split = f"prefill={num},decode={num_workers - num}" if num else f"decode={num_workers}"
        yield Regime(split, placement)


class Bench:
    """Simulates cells, one at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._shapes = [shape._replace(prefix=()) for shape in read_trace(options.trace)]
        config = self._config("decode=2", Load(2, "steady", 1))
        unit = unloaded(config, config.step_model(), self._shapes)
        self.goal = Objective(TTFT_MULTIPLE * unit.ttft_s, TPOT_MULTIPLE * unit.tpot_s)

    def cell(self, regime: Regime, load: Load) -> Cell:
        """Its goodput, and what was met in each ``BIN_S``."""
        options, config = self._options, self._config(regime.workers, load)
        setup = Setup(
            config.splits[0],
            config.engines(config.step_model()),
            config.wires(),
            config.limits(),
            Placing(
                regime.placement,
                Objectives(*self.goal),
                config.local_prefill_below_tokens,
                may_refuse=True,
            ),
            load.seed,
            options.divide,
        )
        rate = options.rate * load.num_workers
        run = Simulation(setup, config.requests(self._shapes, rate)).run(options.duration, 10.0)
        return {
            "goodput": round(goodput(run.outcomes, self.goal, options.duration), 3),
            "offered": round(len(run.outcomes) / options.duration, 3),
            "refused": sum(run.refusals.values()),
            **self._bins(run),
        }

    def _bins(self, run: Run) -> dict[str, list[int]]:
        came, met = ([0] * round(self._options.duration / BIN_S) for _ in range(2))
        for due_s, outcome in zip(run.due_s, run.outcomes, strict=True):
            place = min(len(came) - 1, int(due_s / BIN_S))
            came[place] += 1
            met[place] += self.goal.met_by(outcome)
        return {"came": came, "met": met}

    def _config(self, workers: str, load: Load) -> SimulationConfig:
        options = self._options
        return SimulationConfig(
            trace=options.trace,
            workers=workers,
            rate=[options.rate * load.num_workers],
            divide=options.divide,
            duration_s=options.duration,
            period_s=options.period,
            max_queue=4096,
            max_concurrent=8192,
            seed=load.seed,
            **LOADS[load.name],
        )


def key_of(regime: Regime, load: Load) -> tuple[str, ...]:
    return (str(load.num_workers), load.name, str(load.seed), *regime)


def recovered_s(cell: Cell, period_s: float) -> float | None:
    """The longest from a change of the load until as much is met as at that phase's end.

    None: nothing changed after the beginning.
    """
    half = round(period_s / 2 / BIN_S)
    ratios = [met / max(1, came) for met, came in zip(cell["met"], cell["came"], strict=True)]
    phases = [ratios[begin : begin + half] for begin in range(half, len(ratios), half)]
    return max((_until_good(phase) * BIN_S for phase in phases), default=None)


def _until_good(phase: list[float]) -> int:
    """Bins until one is as good as the last two are on average."""
    wanted = _AS_GOOD * sum(phase[-2:]) / len(phase[-2:])
    return next(place for place, ratio in enumerate(phase) if ratio >= wanted)


def table(cells: MeasuredCells, loads: Iterable[Load], period_s: float) -> str:
    """A row for each load: means of the seeds for which all is measured."""
    rows = [
        "workers  load    seeds  soft  least-loaded  predicted  over both  over split  recovered"
    ]
    groups: dict[tuple[int, str], list[Load]] = {}
    for load in loads:
        groups.setdefault((load.num_workers, load.name), []).append(load)
    for (num, _), group in groups.items():
        whole = [each for each in group if all(key_of(r, each) in cells for r in regimes(num))]
        if whole:
            rows.append(_row(cells, whole, period_s))
    return "\n".join(rows)


def _row(cells: MeasuredCells, group: list[Load], period_s: float) -> str:
    num, name, _ = group[0]

    def mean(regime: Regime) -> float:
        return sum(float(cells[key_of(regime, load)]["goodput"]) for load in group) / len(group)

    soft, *fixed = regimes(num)
    plain = [each for each in fixed if each.placement == "least-loaded"]
    best_plain, best = max(plain, key=mean), max((e for e in fixed if e not in plain), key=mean)
    best_split = max((each for each in plain if "prefill" in each.workers), key=mean)
    ever_best = max(mean(best_plain), mean(best))
    back_s = [recovered_s(cells[key_of(soft, load)], period_s) for load in group]
    told = "-" if name == "steady" else f"{max(each or 0.0 for each in back_s):g} s"
    return (
        f"{num:>7}  {name:<7} {len(group):>5}  {mean(soft):.2f}"
        f"  {mean(best_plain):.2f} ({best_plain.workers})  {mean(best):.2f} ({best.workers})"
        f"  {mean(soft) / ever_best:.3f}  {mean(soft) / mean(best_split):.2f}  {told}"
    )


def common(options: argparse.Namespace) -> dict[str, Any]:
    names = ("divide", "rate", "duration", "period")
    told = {name: getattr(options, name) for name in names}
    return {"simulated": True, "trace": options.trace.name, **told}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON of all cells so far")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--load", nargs="+", choices=LOADS, default=[*LOADS])
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rate", type=float, default=0.8, help="requests/s for each worker")
    parser.add_argument("--divide", type=float, default=4.0, help="all lengths by this")
    parser.add_argument("--duration", type=float, default=80.0, help="s of arrivals")
    parser.add_argument("--period", type=float, default=40.0, help="s, of bursts and the drift")
    parser.add_argument("--cells", type=int, help="so many more at the most")
    parser.add_argument("--table", action="store_true", help="simulate nothing")
    options = parser.parse_args()
    cells = MeasuredCells(options.out, common(options))
    nums_and_loads = itertools.product(options.workers, options.seed, options.load)
    loads = [Load(num, name, seed) for num, seed, name in nums_and_loads]
    todo = [
        (regime, load)
        for load in loads
        for regime in regimes(load.num_workers)
        if key_of(regime, load) not in cells
    ]
    if todo and not options.table:
        bench = Bench(options)
        for regime, load in todo[: options.cells]:
            cells.add(key_of(regime, load), bench.cell(regime, load))
            told = cells[key_of(regime, load)]
            print(*key_of(regime, load), told["goodput"], flush=True)  # noqa: T201
    print(table(cells, loads, options.period))  # noqa: T201


if __name__ == "__main__":
    main()
