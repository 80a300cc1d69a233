"""A list of checks gone through: what one of them breaks is told, and costs no other's result."""

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Check(NamedTuple):
    """Something to find out."""

    part: str  # of the report
    case: str
    do: Callable[[], Iterable[Any]]  # dataclasses, each with ``holds``


def go_through(
    checks: Sequence[Check],
    facts: Mapping[str, object],
    out: Path,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Whether all was checked and holds. The report is in ``out`` after each check.

    None begins later than ``budget_s`` after the first: what is left out then is named. A line of
    each is on stderr when it is over.
    """
    found: dict[str, list[dict[str, Any]]] = {check.part: [] for check in checks}
    left_out: list[str] = []
    begin_s = clock()
    for check in checks:
        if clock() - begin_s >= budget_s:
            left_out.append(f"{check.part}: {check.case}")
        else:
            before, check_s = len(found[check.part]), time.monotonic()
            _add(check, found[check.part])
            _tell(check, found[check.part][before:], time.monotonic() - check_s)
        report = {**facts, "seconds": clock() - begin_s, "left_out": left_out, **found}
        out.write_text(json.dumps(report, indent=1))
    return not left_out and all(each["holds"] for part in found.values() for each in part)


def _tell(check: Check, told: Sequence[Mapping[str, Any]], seconds: float) -> None:
    said = "holds" if all(each["holds"] for each in told) else "DOES NOT HOLD"
    sys.stderr.write(f"{check.part}: {check.case}: {said} ({seconds:.1f} s)\n")


def _add(check: Check, told: list[dict[str, Any]]) -> None:
    """What is found out until something breaks, and what breaks."""
    try:
        told.extend(asdict(each) for each in check.do())
    except Exception:  # noqa: BLE001 - the others are still worth their time
        told.append({"case": check.case, "error": traceback.format_exc(), "holds": False})
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
