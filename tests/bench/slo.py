"""Goodput: requests per second, of all that were offered, that met every objective. Pure."""

import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


class Outcome(NamedTuple):
    """What became of one offered request; None where it never came that far."""

    ttft_s: float | None
    tpot_s: float | None  # (last - first token time) / (n - 1)

    @classmethod
    def of(cls, due_s: float, times: Sequence[float], num_wanted: int) -> "Outcome":
        """From when it was due and when its tokens arrived; unfinished requests are misses."""
        if len(times) < num_wanted:
            return cls(None, None)
        tpot_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        return cls(times[0] - due_s, tpot_s)


class Objective(NamedTuple):
    """Both must hold."""

    ttft_s: float
    tpot_s: float

    def met_by(self, outcome: Outcome) -> bool:
        if outcome.ttft_s is None or outcome.tpot_s is None:
            return False
        return outcome.ttft_s <= self.ttft_s and outcome.tpot_s <= self.tpot_s


def goodput(outcomes: Sequence[Outcome], objective: Objective, duration_s: float) -> float:
    """Requests per second that met ``objective``; misses and failures count as offered only."""
    return sum(map(objective.met_by, outcomes)) / duration_s


def best(by_setting: Mapping[str, float]) -> tuple[str, float]:
    """The setting with the largest goodput, the first of equals, and that goodput."""
    name = max(by_setting, key=lambda key: by_setting[key])
    return name, by_setting[name]


def read_azure(path: Path, divisor: float, max_prompt: int, max_output: int) -> list[Lengths]:
    """Lengths of the Azure LLM inference trace of 2023, each divided and clipped.

    The file's columns are TIMESTAMP, ContextTokens, GeneratedTokens. At least one
    prompt token and two output tokens remain, so that every request has a TPOT.
    """
    with path.open(newline="") as file:
        return [
            Lengths(
                prompt=min(max_prompt, max(1, round(int(row["ContextTokens"]) / divisor))),
                output=min(max_output, max(2, round(int(row["GeneratedTokens"]) / divisor))),
            )
            for row in csv.DictReader(file)
        ]


def medians(outcomes: Iterable[Outcome]) -> Objective:
    """The median TTFT and TPOT of those that finished, as a yardstick for objectives."""
    done = [o for o in outcomes if o.ttft_s is not None and o.tpot_s is not None]
    return Objective(
        statistics.median(o.ttft_s for o in done if o.ttft_s is not None),
        statistics.median(o.tpot_s for o in done if o.tpot_s is not None),
    )
