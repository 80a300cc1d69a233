"""Runs of the goodput benchmark, as they were written, and the map that they make."""

import itertools
from collections.abc import Sequence
from typing import Any

from diptych.simulation.outcome import Objective, Outcome, goodput
from tests.bench.measured_cells import MeasuredCells
from tests.bench.slo import best

TTFT_MULTIPLES, TPOT_MULTIPLES = (3.0, 5.0, 10.0), (1.5, 2.0, 3.0)
# How deployments are named, and their best budget; static batches by how many requests they have.
APART, TOGETHER, BOTH, STATIC = "prefill budget", "budget", "soft budget", "static batch"
# In the map.
ADMITTED = {APART: "disaggregated", TOGETHER: "colocated", BOTH: "soft", STATIC: "static"}
PREDICTED = "predicted"
# Of first tokens what was foretold: from their placement on, and since their request came.
FORETOLD, FORETOLD_WHOLE = "foretold", "foretold_whole"
UNLOADED = ("unloaded",)
Multiples = tuple[float, float]  # of the unloaded medians of TTFT and TPOT


def unit_of(done: MeasuredCells) -> Objective:
    """The unloaded medians."""
    told = done[UNLOADED]
    return Objective(told["ttft_s"], told["tpot_s"])


def told_right(done: MeasuredCells, kind: str, what: str = FORETOLD) -> str:
    """How many of one kind of deployment's took what was foretold, within 12 %."""
    of_kind = [cell[what] for cell in done if cell["key"][0] == kind and what in cell]
    num_right, num_all = (
        sum(run.get(until, 0.0) - run.get(over, 0.0) for run in of_kind)
        for until, over in (("1.12", "0.88"), ("+Inf", ""))
    )
    return f"{num_right / max(1.0, num_all):.2f} of {num_all:.0f}"


def runs(done: MeasuredCells) -> list[dict[str, Any]]:
    """All that was measured so far, as ``cells`` takes it."""
    found = []
    for cell in done:
        if tuple(cell["key"]) != UNLOADED:
            kind, budget, placement, wanted, rate, seed = cell["key"]
            row = {
                "deployment": f"{kind} {budget}",
                "placement": placement,
                "rate": float(rate),
                "seed": int(seed),
                "outcomes": [Outcome(*each) for each in cell["outcomes"]],
                "ended": cell.get("ended"),
                "itl_s": cell.get("itl_s"),
            }
            if wanted != "any":
                row["multiples"] = tuple(map(float, wanted.split("x")))
            found.append(row)
    return found


def cells(
    rows: Sequence[dict[str, Any]], unit: Objective, duration_s: float
) -> list[dict[str, Any]]:
    """The map: for each objective each deployment's peak over the rates, and their ratio.

    With admission each deployment has its own peak, of runs of that objective. Seeds of one rate
    count as their mean.
    """
    result = []
    for multiples in itertools.product(TTFT_MULTIPLES, TPOT_MULTIPLES):
        ttft, tpot = multiples
        objective = Objective(ttft * unit.ttft_s, tpot * unit.tpot_s)
        plain = [row for row in rows if "multiples" not in row]
        peaks = _peaks(plain, objective, duration_s)
        setting, apart = _best(APART, peaks)
        name, together = _best(TOGETHER, peaks)
        cell = {
            "ttft_multiple": ttft,
            "tpot_multiple": tpot,
            "disaggregated": apart,
            "disaggregated_setting": setting,
            "colocated": together,
            "colocated_setting": name,
            "ratio": apart / together if apart and together else None,
        }
        admitted = [row for row in rows if row.get("multiples") == multiples]
        peaks = _peaks(admitted, objective, duration_s)
        for kind, told in ADMITTED.items():
            setting, value = _best(kind, peaks)
            if value is not None:
                cell |= {f"{told}_admitted": value, f"{told}_admitted_setting": setting}
        result.append(cell)
    return result


def _peaks(
    rows: Sequence[dict[str, Any]], objective: Objective, duration_s: float
) -> dict[str, float]:
    """Of each deployment, over its rates."""
    values: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        value = goodput(row["outcomes"], objective, duration_s)
        values.setdefault((row["deployment"], row.get("rate", 0.0)), []).append(value)
    peaks: dict[str, float] = {}
    for (name, _), of_seeds in values.items():
        peaks[name] = max(sum(of_seeds) / len(of_seeds), peaks.get(name, 0.0))
    return peaks


def _best(kind: str, peaks: dict[str, float]) -> tuple[str | None, float | None]:
    own = _of(kind, peaks)
    return best(own) if own else (None, None)


def _of(kind: str, peaks: dict[str, float]) -> dict[str, float]:
    return {name: peak for name, peak in peaks.items() if name.startswith(f"{kind} ")}


def table(result: Sequence[dict[str, Any]]) -> str:
    admitted = [told for told in ADMITTED.values() if any(f"{told}_admitted" in c for c in result)]
    lines = ["TTFT  TPOT  disaggregated (best budget)  colocated (best budget)  ratio"]
    lines[0] += "".join(f"  {told}, admitted" for told in admitted)
    for cell in result:
        lines.append(
            f"{cell['ttft_multiple']:>3g}x  {cell['tpot_multiple']:>3g}x"
            f"  {_told(cell['disaggregated']):>13} ({cell['disaggregated_setting']})"
            f"  {_told(cell['colocated']):>9}"
            f" ({cell['colocated_setting']})  {_told(cell['ratio'])}"
        )
        lines[-1] += "".join(f"  {_told(cell.get(f'{told}_admitted')):>9}" for told in admitted)
    return "\n".join(lines)


def _told(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
