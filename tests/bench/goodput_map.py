"""What `tests.bench.goodput` measured with admission, as a table and a picture.

    .venv/bin/python -m tests.bench.goodput_map bench-goodput.json [--png map.png]

For each objective: two workers of both roles beside the better of a split and two colocated
engines (or static batches on these, where they were measured), all of them with admission, at the
rate at which the better one has most. The same requests arrive at the same moments in each, so the
intervals (95 %, by bootstrap) are of pairs. Then what became of the requests of each deployment.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from diptych.errors import DeadlineUnreachableError
from diptych.simulation.outcome import Objective
from tests.bench.goodput_runs import (
    APART,
    BOTH,
    STATIC,
    TOGETHER,
    TPOT_MULTIPLES,
    TTFT_MULTIPLES,
    Multiples,
    runs,
    unit_of,
)
from tests.bench.intervals import Estimate, Indices, estimate
from tests.bench.measured_cells import MeasuredCells

_FIXED: Final = {APART: "split", TOGETHER: "colocated", STATIC: "static"}
_NEEDED: Final = {APART, TOGETHER, BOTH}
_WORST, _BEST = 0.5, 1.5  # ratios at which colours end

Key = tuple[str, str, float]  # kind of deployment, its name, rate
Met = np.ndarray[tuple[int, ...], np.dtype[np.float64]]  # of each request that arrived, 1 or 0


class Square(NamedTuple):
    """One objective. Goodput in requests/s."""

    multiples: Multiples  # of the unloaded medians of TTFT and TPOT
    num_offered: int
    soft: float
    fixed: float
    regime: str  # the fixed one that had it
    ratio: Estimate


def squares(rows: Sequence[Mapping[str, Any]], unit: Objective, duration_s: float) -> list[Square]:
    """Those objectives for which all three were run with admission.

    What was run with other seeds than both roles at that rate does not count.
    """
    found = []
    for multiples in itertools.product(TTFT_MULTIPLES, TPOT_MULTIPLES):
        ttft, tpot = multiples
        objective = Objective(ttft * unit.ttft_s, tpot * unit.tpot_s)
        own = [row for row in rows if row.get("multiples") == multiples]
        met = _met(own, objective)
        if not {kind for kind, _, _ in met} >= _NEEDED:
            continue
        rivals = {key: _rivals(own, key) for key in met if key[0] != BOTH}
        rates = {rate for kind, _, rate in met if kind == BOTH}
        seconds = {key: duration_s * len(_seeds(own, key)) for key in met}
        fixed = [key for key in rivals if rivals[key] or key[2] not in rates]
        best = max(fixed, key=lambda key: met[key].sum() / seconds[key], default=None)
        if best is None or not rivals[best]:
            continue
        soft = max(rivals[best], key=lambda key: met[key].sum() / seconds[key])
        ours, theirs = met[soft], met[best]
        found.append(
            Square(
                multiples,
                len(ours),
                float(ours.sum() / seconds[soft]),
                float(theirs.sum() / seconds[best]),
                _FIXED[best[0]],
                estimate(_ratio(ours, theirs), len(ours)),
            )
        )
    return found


def _key(row: Mapping[str, Any]) -> Key:
    kind = next(each for each in (BOTH, *_FIXED) if row["deployment"].startswith(each))
    return kind, row["deployment"], row["rate"]


def _met(rows: Iterable[Mapping[str, Any]], objective: Objective) -> dict[Key, Met]:
    """Of each deployment and rate, for every request, in order, whether it was met."""
    met: dict[Key, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        met.setdefault(_key(row), []).extend(map(objective.met_by, row["outcomes"]))
    return {key: np.asarray(values, dtype=np.float64) for key, values in met.items()}


def _seeds(rows: Iterable[Mapping[str, Any]], key: Key) -> list[int]:
    return sorted(row["seed"] for row in rows if _key(row) == key)


def _rivals(rows: Sequence[Mapping[str, Any]], fixed: Key) -> list[Key]:
    """Of both roles, those to which the same requests came."""
    keys = dict.fromkeys(_key(row) for row in rows)
    of_both = (key for key in keys if key[0] == BOTH and key[2] == fixed[2])
    return [key for key in of_both if _seeds(rows, key) == _seeds(rows, fixed)]


def _ratio(ours: Met, theirs: Met) -> Callable[[Indices], "np.floating[Any]"]:
    """Of chosen requests; where the other met none, as if it were one."""

    def of(chosen: Indices) -> "np.floating[Any]":
        return np.float64(ours[chosen].sum() / max(theirs[chosen].sum(), 1.0))

    return of


def table(found: Iterable[Square]) -> str:
    lines = ["TTFT  TPOT  offered  both roles  best fixed             ratio (95 %)"]
    for each in found:
        ttft, tpot = each.multiples
        lines.append(
            f"{ttft:>3g}x {tpot:>4g}x  {each.num_offered:>7}  {each.soft:>10.2f}"
            f"  {each.fixed:>10.2f} {each.regime:<10}"
            f"  {each.ratio.value:.2f} ({each.ratio.low:.2f} to {each.ratio.high:.2f})"
        )
    return "\n".join(lines)


class Account(NamedTuple):
    """What became of the requests of one deployment, at one rate, all objectives together."""

    deployment: str
    placement: str
    rate: float
    num_offered: int
    met: float  # requests/s that kept both objectives, mean of runs
    in_time: float  # that had ended when they would have if both had just been kept
    refused_ratio: float  # of those offered
    kept_ratio: float  # both objectives, of those that were admitted
    p99_gap_s: float  # between tokens: 99 of 100 are shorter; the median of runs


def accounts(
    rows: Iterable[Mapping[str, Any]], unit: Objective, duration_s: float
) -> list[Account]:
    """Of what was measured since it tells how requests ended.

    Runs whose requests said nothing of their objectives are held against each pair of them.
    """
    groups: dict[tuple[str, str, float], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("ended") and row.get("itl_s"):
            key = (row["deployment"], row["placement"], row["rate"])
            groups.setdefault(key, []).append(row)
    return [_account(key, group, unit, duration_s) for key, group in groups.items()]


def _account(
    key: tuple[str, str, float],
    group: Sequence[Mapping[str, Any]],
    unit: Objective,
    duration_s: float,
) -> Account:
    every = list(itertools.product(TTFT_MULTIPLES, TPOT_MULTIPLES))
    told = [
        (row, Objective(ttft * unit.ttft_s, tpot * unit.tpot_s))
        for row in group
        for ttft, tpot in ([row["multiples"]] if "multiples" in row else every)
    ]
    num_offered = sum(len(row["outcomes"]) for row, _ in told)
    num_refused = sum(_num_refused(row) for row, _ in told)
    num_met = sum(sum(map(wanted.met_by, row["outcomes"])) for row, wanted in told)
    num_in_time = sum(sum(map(wanted.in_time, row["outcomes"])) for row, wanted in told)
    seconds = duration_s * len(told)
    return Account(
        *key,
        sum(len(row["outcomes"]) for row in group),
        num_met / seconds,
        num_in_time / seconds,
        num_refused / num_offered,
        num_met / max(1, num_offered - num_refused),
        statistics.median(row["itl_s"]["p99"] for row in group),
    )


def _num_refused(row: Mapping[str, Any]) -> int:
    return int(row["ended"].get(DeadlineUnreachableError.reason, 0))


def account_table(found: Iterable[Account]) -> str:
    lines = ["rate  offered  met/s  in time/s  refused  kept  p99 gap, ms  deployment"]
    lines += [
        f"{each.rate:>4g}  {each.num_offered:>7}  {each.met:>5.2f}  {each.in_time:>9.2f}"
        f"  {each.refused_ratio:>7.2f}  {each.kept_ratio:>4.2f}  {1000 * each.p99_gap_s:>11.0f}"
        f"  {each.deployment}, {each.placement}"
        for each in found
    ]
    return "\n".join(lines)


def draw(found: Sequence[Square], path: Path) -> None:
    """A square for each objective, coloured by the ratio."""
    from matplotlib.figure import Figure

    by_multiples = {each.multiples: each for each in found}
    ratios = np.full((len(TTFT_MULTIPLES), len(TPOT_MULTIPLES)), np.nan)
    figure = Figure(figsize=(7.0, 5.2), layout="constrained")
    axes = figure.subplots()
    places = itertools.product(enumerate(TTFT_MULTIPLES), enumerate(TPOT_MULTIPLES))
    for (row, ttft), (column, tpot) in places:
        each = by_multiples.get((ttft, tpot))
        if each is None:
            continue
        ratios[row, column] = each.ratio.value
        told = (
            f"{each.ratio.value:.2f}\n({each.ratio.low:.2f} to {each.ratio.high:.2f})\n"
            f"{each.soft:.2f} / {each.fixed:.2f} {each.regime}"
        )
        axes.text(column, row, told, ha="center", va="center", fontsize=10)
    image = axes.imshow(ratios, cmap="RdYlGn", vmin=_WORST, vmax=_BEST, aspect="auto")
    axes.set_xticks(range(len(TPOT_MULTIPLES)), [f"{each:g}x" for each in TPOT_MULTIPLES])
    axes.set_yticks(range(len(TTFT_MULTIPLES)), [f"{each:g}x" for each in TTFT_MULTIPLES])
    axes.set_xlabel("time between tokens, of the unloaded median")
    axes.set_ylabel("time to first token, of the unloaded median")
    axes.set_title("Goodput, requests/s: two workers of both roles / the best fixed regime")
    figure.colorbar(image, label="ratio")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    done = MeasuredCells(options.measured, {})
    found = squares(runs(done), unit_of(done), done.common["duration"])
    print(table(found))  # noqa: T201
    print(account_table(accounts(runs(done), unit_of(done), done.common["duration"])))  # noqa: T201
    if options.png is not None:
        draw(found, options.png)


if __name__ == "__main__":
    main()
