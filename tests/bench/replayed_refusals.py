"""Of those that were refused, how many would have been in time? Simulated.

    .venv/bin/python -m tests.bench.replayed_refusals --trace AzureLLMInferenceTrace_conv.csv

For each request that is refused the same run is made again, in which this one is served whatever
is foretold of it. It would have made it if it then keeps both of its objectives; it was refused for
nothing if no fewer of the others do. As a step's noise falls elsewhere in that run, some others
keep theirs or not by chance, so what they lose on average says more: refusing is right where that
is more than the share that would have made it. For each pair of objectives, all seeds together.

How much of that is chance ``--again 8`` says, of a part of the refused (``--share``): the run in
which one is served and one in which it never came, eight times, each time with other noise from its
arrival on. Refusing it cost something for sure where serving it gains more than 1.645 standard
errors, which one in twenty does by chance.
"""

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from diptych.cli.simulate import unloaded
from diptych.errors import DeadlineUnreachableError
from diptych.simulation.journey import Journey
from diptych.simulation.outcome import Objective
from diptych.simulation.report import TPOT_MULTIPLES, TTFT_MULTIPLES
from diptych.simulation.settings import SimulationConfig
from diptych.simulation.simulation import Placing, Setup, Simulation
from diptych.simulation.trace_file import read_trace
from diptych.simulation.workload import Shape
from router.placement.query import Objectives

_SURE: Final = 1.645  # standard errors


class Replayed(NamedTuple):
    """Of the requests of one run, or of several."""

    num_offered: int = 0
    num_met: int = 0
    num_refused: int = 0
    num_made_it: int = 0  # of the refused, each served in a run of its own
    num_for_nothing: int = 0  # of these, beside whom no fewer others made it
    num_others_lost: int = 0  # that made it beside none of the refused, all runs together

    def plus(self, other: "Replayed") -> "Replayed":
        return Replayed(*map(sum, zip(self, other, strict=True)))


class Bench(NamedTuple):
    """What comes, to which workers."""

    config: SimulationConfig
    shapes: Sequence[Shape]

    def goals(self) -> Iterator[tuple[float, float, Objective]]:
        """Of the map of goodput, with their multiples of the unloaded medians."""
        unit = unloaded(self.config, self.config.step_model(), self.shapes)
        for ttft, tpot in itertools.product(TTFT_MULTIPLES, TPOT_MULTIPLES):
            yield ttft, tpot, Objective(ttft * unit.ttft_s, tpot * unit.tpot_s)

    def replayed(self, goal: Objective) -> Replayed:
        """One run, and one more for each that was refused."""
        ended = self._run(goal, frozenset())
        kept = [goal.met_by(journey.outcome) for journey in ended]
        refused = [place for place, each in enumerate(ended) if is_refused(each)]
        made_it = for_nothing = others_lost = 0
        for place in refused:
            again = [goal.met_by(each.outcome) for each in self._run(goal, frozenset({place}))]
            made_it += again[place]
            lost = sum(kept) - (sum(again) - again[place])
            for_nothing += again[place] and lost <= 0
            others_lost += lost
        return Replayed(len(ended), sum(kept), len(refused), made_it, for_nothing, others_lost)

    def gains(self, goal: Objective, share: float, num_times: int) -> Iterator[Sequence[int]]:
        """Of some that are refused: how many more are met if it is served than if it never came."""
        rng = random.Random(self.config.seed)
        ended = self._run(goal, frozenset())
        for place in [place for place, each in enumerate(ended) if is_refused(each)]:
            if rng.random() < share:
                yield [self._gain(goal, place, seed) for seed in range(num_times)]

    def _gain(self, goal: Objective, place: int, seed: int) -> int:
        served = self._run(goal, frozenset({place}), place, seed)
        without = self._run(goal, frozenset(), place, seed, comes=False)
        met, met_without = (
            sum(goal.met_by(each.outcome) for each in run) for run in (served, without)
        )
        return met - met_without

    def _run(
        self,
        goal: Objective,
        but_never: frozenset[int],
        place: int | None = None,
        seed: int = 0,
        *,
        comes: bool = True,
    ) -> list[Journey]:
        """From the arrival at ``place`` on with the noise of ``seed``; it ``comes`` or not."""
        config = self.config
        placing = Placing(
            "predicted",
            Objectives(*goal),
            config.local_prefill_below_tokens,
            may_refuse=True,
            but_never=but_never,
            cuts_off=True,
        )
        setup = Setup(
            config.splits[0],
            config.engines(config.step_model()),
            config.wires(),
            config.limits(),
            placing,
            config.seed,
            config.divide,
        )
        (rate,) = config.rate
        requests = list(config.requests(self.shapes, rate))
        moment_s = None if place is None else requests[place].at_s
        if place is not None and not comes:
            del requests[place]
        simulation = Simulation(setup, iter(requests))
        if moment_s is not None:
            simulation.agenda.at(moment_s, lambda: simulation.cluster.noise.renew(seed))
        simulation.run(config.duration_s, config.drain_s)
        return simulation.journeys


def is_refused(journey: Journey) -> bool:
    """As its objectives were foretold to be missed."""
    return journey.failure == DeadlineUnreachableError.reason


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--workers", default="soft=2", help="one deployment, as simulate has it")
    parser.add_argument("--steps", type=Path, help="file with a worker's step model")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--duration", type=float, default=60.0, help="s")
    parser.add_argument("--divide", type=float, default=4.0, help="the trace's lengths")
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--again", type=int, default=0, help="with other noise, so often")
    parser.add_argument("--share", type=float, default=0.25, help="of the refused, for --again")
    options = parser.parse_args()
    shapes = read_trace(options.trace)
    benches = [
        Bench(
            SimulationConfig(
                trace=options.trace,
                workers=options.workers,
                steps=options.steps,
                rate=[options.rate],
                divide=options.divide,
                duration_s=options.duration,
                seed=seed,
            ),
            shapes,
        )
        for seed in options.seed
    ]
    if options.again:
        show_gains(benches, options.share, options.again)
        return
    print("TTFT  TPOT  offered  met  refused  would have made it  refused for nothing  others lost")  # noqa: T201
    whole = Replayed()
    for goals in zip(*(bench.goals() for bench in benches), strict=True):
        ttft, tpot, _ = goals[0]
        found = Replayed()
        for bench, (_, _, goal) in zip(benches, goals, strict=True):
            found = found.plus(bench.replayed(goal))
        print(f"{ttft:>3g}x {tpot:>4g}x  {_row(found)}", flush=True)  # noqa: T201
        whole = whole.plus(found)
    print(f"{'all':>10}  {_row(whole)}")  # noqa: T201


def show_gains(benches: Sequence[Bench], share: float, num_times: int) -> None:
    print(f"TTFT  TPOT  refused, {share:g} of them  gain of serving one  gains  gains for sure")  # noqa: T201
    whole: list[Sequence[int]] = []
    for goals in zip(*(bench.goals() for bench in benches), strict=True):
        ttft, tpot, _ = goals[0]
        found = [
            gains
            for bench, (_, _, goal) in zip(benches, goals, strict=True)
            for gains in bench.gains(goal, share, num_times)
        ]
        whole += found
        print(f"{ttft:>3g}x {tpot:>4g}x  {_gains_row(found)}", flush=True)  # noqa: T201
    print(f"{'all':>10}  {_gains_row(whole)}")  # noqa: T201


def _gains_row(found: Sequence[Sequence[int]]) -> str:
    means = [statistics.mean(gains) for gains in found]
    num_sure = sum(map(is_sure, found))
    num = max(1, len(found))
    num_gaining = sum(mean > 0 for mean in means)
    mean = statistics.mean(means) if means else 0.0
    return (
        f"{len(found):>22}{mean:>21.2f}{f'{num_gaining} ({num_gaining / num:.1%})':>14}"
        f"{f'{num_sure} ({num_sure / num:.1%})':>14}"
    )


def is_sure(gains: Sequence[int]) -> bool:
    """Whether they are above 0 by more than chance has it in one of twenty."""
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    return statistics.mean(gains) > _SURE * error


def _row(found: Replayed) -> str:
    made_it, for_nothing = (
        f"{num} ({num / max(1, found.num_refused):.1%})"
        for num in (found.num_made_it, found.num_for_nothing)
    )
    return (
        f"{found.num_offered:>7}{found.num_met:>5}{found.num_refused:>9}"
        f"{made_it:>20}{for_nothing:>21}{found.num_others_lost / max(1, found.num_refused):>13.2f}"
    )


if __name__ == "__main__":
    main()
