"""What runs showed: a table for people, and the form in which measured goodput is written. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from diptych.simulation.cluster import Split
from diptych.simulation.outcome import Objective, Outcome, goodput
from diptych.simulation.simulation import Run

TTFT_MULTIPLES, TPOT_MULTIPLES = (3.0, 5.0, 10.0), (1.5, 2.0, 3.0)
_NUM_BINS = 60  # of a run's time, in the picture
_SHARES = (0.5, 0.9, 0.99)

Json = Mapping[str, object]


class Case(NamedTuple):
    """One run, and what was run."""

    split: Split
    placement: str
    rate: float  # requests per second that came
    run: Run

    @property
    def name(self) -> str:
        """The deployment's."""
        return f"{self.split.name} {self.placement}"


class Measured(NamedTuple):
    """All runs of one command, over the same arrivals; ``objective`` is the table's."""

    unit: Objective  # unloaded medians, of which the map's objectives are multiples
    objective: Objective
    duration_s: float
    cases: Sequence[Case]


def table(measured: Measured) -> str:
    """A row for each run."""
    rows = [_HEAD, *(_row(case, measured) for case in measured.cases)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    unit, goal = measured.unit, measured.objective
    lines.append(
        f"simulated; goodput: requests/s with TTFT <= {goal.ttft_s:.3f} s and TPOT <= "
        f"{1000 * goal.tpot_s:.1f} ms (unloaded: {unit.ttft_s:.3f} s, {1000 * unit.tpot_s:.1f} ms)"
    )
    return "\n".join(lines)


_HEAD = (
    *("workers", "placement", "req/s", "goodput", "TTFT p50/p90/p99 s", "TPOT p50/p90/p99 ms"),
    *("ITL p50/p99 ms", "TTFT foretold, off by p50/p90/p99", "not answered", "busy", "KV"),
)


def _row(case: Case, measured: Measured) -> tuple[str, ...]:
    run = case.run
    ttft = [o.ttft_s for o in run.outcomes if o.ttft_s is not None]
    tpot = [1000 * o.tpot_s for o in run.outcomes if o.tpot_s is not None]
    itl = [run.gaps.quantile(share) for share in (0.5, 0.99)]
    off = [each.error_ratio for each in run.foretold]
    busy = " ".join(f"{role[0]}{use.busy_ratio:.0%}" for role, use in run.pools.items())
    kv = " ".join(f"{role[0]}{use.kv_ratio:.0%}" for role, use in run.pools.items())
    refused = ", ".join(f"{num} {why}" for why, num in sorted(run.refusals.items()))
    return (
        case.split.name,
        case.placement,
        f"{case.rate:.2f}",
        f"{goodput(run.outcomes, measured.objective, measured.duration_s):.2f}",
        "/".join(f"{value:.2f}" for value in quantiles(ttft)),
        "/".join(f"{value:.1f}" for value in quantiles(tpot)),
        "/".join("-" if gap is None else f"{1000 * gap:.0f}" for gap in itl),
        "/".join(f"{ratio:.0%}" for ratio in quantiles(off)) or "-",
        refused or "0",
        busy,
        kv,
    )


def quantiles(values: Sequence[float]) -> list[float]:
    """At a half, nine of ten and 99 of a hundred; none of none."""
    ordered = sorted(values)
    return [
        ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in _SHARES if ordered
    ]


def document(measured: Measured, environment: Json) -> Json:
    """As ``python -m tests.bench.goodput`` writes it, with what only a simulation knows."""
    return {
        "environment": environment,
        "duration_s": measured.duration_s,
        "unloaded": measured.unit._asdict(),
        "map": list(_cells(measured)),
        "runs": [_told(case) for case in measured.cases],
    }


def _told(case: Case) -> Json:
    run = case.run
    return {
        "deployment": case.name,
        "rate": case.rate,
        "outcomes": run.outcomes,
        "refusals": run.refusals,
        "itl_s": {f"p{share:.0%}"[:-1]: run.gaps.quantile(share) for share in _SHARES},
        "first_tokens_foretold_s": run.foretold,
        "pools": {role: use._asdict() for role, use in run.pools.items()},
        "num_events": run.num_events,
        "num_steps": run.num_steps,
    }


def _cells(measured: Measured) -> Iterator[Json]:
    """For each objective each deployment's peak over the rates."""
    for ttft in TTFT_MULTIPLES:
        for tpot in TPOT_MULTIPLES:
            objective = Objective(ttft * measured.unit.ttft_s, tpot * measured.unit.tpot_s)
            peaks: dict[str, float] = {}
            for case in measured.cases:
                value = goodput(case.run.outcomes, objective, measured.duration_s)
                peaks[case.name] = max(value, peaks.get(case.name, 0.0))
            fixed = [case for case in measured.cases if not case.split.num_soft]
            split = {c.name: peaks[c.name] for c in fixed if c.split.num_prefill}
            together = {c.name: peaks[c.name] for c in fixed if not c.split.num_prefill}
            apart_name, apart = _best(split)
            together_name, colocated = _best(together)
            yield {
                "ttft_multiple": ttft,
                "tpot_multiple": tpot,
                "goodput": peaks,
                "disaggregated": apart,
                "disaggregated_setting": apart_name,
                "colocated": colocated,
                "colocated_setting": together_name,
                "ratio": apart / colocated if apart is not None and colocated else None,
            }


def _best(peaks: Mapping[str, float]) -> tuple[str | None, float | None]:
    name = max(peaks, key=lambda each: peaks[each], default=None)
    return name, None if name is None else peaks[name]


def series(measured: Measured) -> dict[str, list[tuple[float, float]]]:
    """Of each run, goodput by the time at which requests came: (s, requests/s)."""
    width_s = measured.duration_s / _NUM_BINS
    drawn: dict[str, list[tuple[float, float]]] = {}
    for case in measured.cases:
        bins: list[list[Outcome]] = [[] for _ in range(_NUM_BINS)]
        for due_s, outcome in zip(case.run.due_s, case.run.outcomes, strict=True):
            bins[min(_NUM_BINS - 1, int(due_s / width_s))].append(outcome)
        drawn[f"{case.name} at {case.rate:g}/s"] = [
            ((place + 0.5) * width_s, goodput(each, measured.objective, width_s))
            for place, each in enumerate(bins)
        ]
    return drawn
