"""What became of requests, and how many of them met what was promised. Pure."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Outcome(NamedTuple):
    """What became of one offered request; None where it never came that far."""

    ttft_s: float | None
    tpot_s: float | None  # (last - first token time) / (n - 1)
    num_tokens: int = 0

    @classmethod
    def of(cls, due_s: float, times: Sequence[float], num_wanted: int) -> "Outcome":
        """From when it was due and when its tokens arrived; unfinished requests are misses."""
        if len(times) < num_wanted:
            return cls(None, None)
        return cls.between(due_s, times[0], times[-1], len(times))

    @classmethod
    def between(cls, due_s: float, first_s: float, last_s: float, num_tokens: int) -> "Outcome":
        """Of one that finished, from the moments of its first and its last token."""
        tpot_s = (last_s - first_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
        return cls(first_s - due_s, tpot_s, num_tokens)


class Objective(NamedTuple):
    """Both must hold."""

    ttft_s: float
    tpot_s: float

    def met_by(self, outcome: Outcome) -> bool:
        """Whether it finished, and in time."""
        if outcome.ttft_s is None or outcome.tpot_s is None:
            return False
        return outcome.ttft_s <= self.ttft_s and outcome.tpot_s <= self.tpot_s

    def in_time(self, outcome: Outcome) -> bool:
        """Whether the last token came by when it is due where both just hold."""
        if outcome.ttft_s is None or outcome.tpot_s is None:
            return False
        num_gaps = max(0, outcome.num_tokens - 1)
        took_s = outcome.ttft_s + num_gaps * outcome.tpot_s
        return took_s <= self.ttft_s + num_gaps * self.tpot_s


def goodput(outcomes: Sequence[Outcome], objective: Objective, duration_s: float) -> float:
    """Requests per second that met ``objective``; misses and failures count as offered only."""
    return sum(map(objective.met_by, outcomes)) / duration_s


def medians(outcomes: Iterable[Outcome]) -> Objective:
    """The median TTFT and TPOT of those that finished, as a yardstick for objectives."""
    done = [o for o in outcomes if o.ttft_s is not None and o.tpot_s is not None]
    return Objective(
        statistics.median(o.ttft_s for o in done if o.ttft_s is not None),
        statistics.median(o.tpot_s for o in done if o.tpot_s is not None),
    )
