"""Which traces are sent: by chance, as their caller asks within bounds, or once they are over.

A router decides. What it samples at once its workers sample as well, by the flag of the W3C
context. What it does not sample it may hold: the trace is recorded everywhere, under an id that
stands in the ``tracestate``, and sent or dropped once the router has seen how the request ended.
"""

import re
from typing import Final, NamedTuple

from opentelemetry.trace import SpanContext

HOLD_KEY: Final = "diptych"  # of the tracestate's entry
_HOLD = re.compile("[0-9a-f]{16}")


class Sampling(NamedTuple):
    """What one process samples."""

    ratio: float = 1.0  # of the traces that begin here
    # Where callers are clients: so many of their wishes for a trace are granted. None: callers
    # are routers, and what they say is done.
    caller_per_s: float | None = None
    holds: bool = False  # what is not sampled is held until it is over


WHOLE: Final = Sampling()


def hold_of(context: SpanContext | None) -> int | None:
    """The id under which the trace is held; None: it is not."""
    value = None if context is None else context.trace_state.get(HOLD_KEY)
    return int(value, 16) if value is not None and _HOLD.fullmatch(value) else None
