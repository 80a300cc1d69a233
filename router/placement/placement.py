"""What placement answers. Plain data."""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from router.placement.views import WorkerId


class Why(enum.Enum):
    """Why a decode worker computes the KV itself."""

    CHOICE = "choice"  # shipping would cost more than it saves, or there is no prefill pool
    NO_PREFILL = "no_prefill"  # none is alive, or of use to a decode worker
    RECOMPUTE = "recompute"  # those alive failed this request


class Outlook(NamedTuple):
    """One way to place a request, and what was predicted of it."""

    prefill: WorkerId | None  # None: the decode worker computes the prompt
    decode: WorkerId
    ttft_s: float  # from its placement on, queues included
    tpot_s: float
    num_missed: float  # objectives, by expectation: its own, and others' because of it
    seconds: float  # until its answer is whole, and the seconds by which others come later
    num_barring: float = 0.0  # of the missed, those that hold it where it may be refused
    num_own_missed: float = 0.0  # of the missed, its own
    gap_s: float = 0.0  # of a pair: between its first token and its second, the hand-off included

    def text(self) -> str:
        """One line; the workers are first."""
        workers = [self.decode.address]
        if self.prefill is not None:
            workers.insert(0, self.prefill.address)
        return (
            f"{' '.join(workers)} ttft_s={self.ttft_s:.3f} tpot_s={self.tpot_s:.4f} "
            f"missed={self.num_missed:.2f} seconds={self.seconds:.2f}"
        )


class Counted(NamedTuple):
    """How a request counts among those of late."""

    num_output_tokens: int  # that its answer was expected to have
    weight: float  # when it came
    faded: float  # logarithm of how much all had faded until then


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a placement was chosen by."""

    chosen: Outlook
    candidates: tuple[Outlook, ...]  # the best, in order; the chosen one is the first
    overhead_s: float = 0.0  # of the first tokens, what was added to steps
    handoff_overhead_s: float = 0.0  # of the gaps of pairs, what was added to pull and steps
    is_probe: bool = False  # objectives looked lost, as those of many before it
    counted: Counted | None = field(default=None, compare=False)  # None: it does not


@dataclass(frozen=True, slots=True)
class Paired:
    """Prefill on one worker, decode on the other, which pulls the KV.

    ``in_order``: one is asked after the other, as each could be the other's for somebody else.
    """

    prefill: WorkerId
    decode: WorkerId
    forecast: Forecast | None = field(default=None, compare=False)  # None: none was made
    in_order: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class PrefillOnly:
    """Prefill samples the only token there is to be."""

    prefill: WorkerId


@dataclass(frozen=True, slots=True)
class DecodeOnly:
    """The decode worker computes what it lacks of the KV itself."""

    decode: WorkerId
    why: Why
    num_assumed_tokens: int = 0  # that placement believed to be in the worker's prefix cache
    forecast: Forecast | None = field(default=None, compare=False)  # None: none was made


Placement = Paired | PrefillOnly | DecodeOnly


class Unreachable(NamedTuple):
    """No placement keeps a request's objectives, by what is foretold."""

    what: str  # for people: what would be missed
    retry_after_s: float | None  # when it could be otherwise, jittered; None: never
