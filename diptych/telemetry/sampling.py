"""Which traces are sent: by chance, as their caller asks within bounds, or once they are over.

A router decides. What it samples at once its workers sample as well, by the flag of the W3C
context. What it does not sample it may hold: the trace is recorded everywhere, under an id that
stands in the ``tracestate``, and sent or dropped once the router has seen how the request ended.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import (
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes

HOLD_KEY: Final = "diptych"  # of the tracestate's entry
_HOLD = re.compile("[0-9a-f]{16}")
_MAX_OTHERS: Final = 31  # a tracestate has 32 entries at the most: one of them is the hold


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


def sampler_of(
    sampling: Sampling, clock: Callable[[], float], standard: Sampler | None = None
) -> Sampler:
    """By the trace's id, so that all processes decide alike.

    ``standard``, where it is given, says what is sampled at once. ``clock`` is monotonic, s.
    """
    by_chance = TraceIdRatioBased(sampling.ratio)
    if sampling.caller_per_s is None:
        return standard or ParentBased(by_chance)
    asked = _AskedSampler(sampling.caller_per_s, by_chance, clock)
    at_once = standard or ParentBased(by_chance, remote_parent_sampled=asked)
    return _EdgeSampler(at_once, holds=sampling.holds)


class _AskedSampler(Sampler):
    """Samples what its caller wants sampled, up to a rate; beyond it as if nobody had asked."""

    def __init__(self, per_s: float, otherwise: Sampler, clock: Callable[[], float]) -> None:
        self._per_s, self._otherwise, self._clock = per_s, otherwise, clock
        self._most = max(1.0, per_s) if per_s else 0.0  # at once, after a pause
        self._left, self._as_of_s = self._most, clock()

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """See the SDK's Sampler."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._as_of_s) * self._per_s)
        self._as_of_s = now
        if self._left < 1.0:
            return self._otherwise.should_sample(
                parent_context, trace_id, name, kind, attributes, links
            )
        self._left -= 1.0
        state = get_current_span(parent_context).get_span_context().trace_state
        return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, state)

    def get_description(self) -> str:
        """See the SDK's Sampler."""
        return f"Asked{{{self._per_s}/s,{self._otherwise.get_description()}}}"


class _EdgeSampler(Sampler):
    """Where clients call: they name no hold, and what is not sampled at once may be held."""

    def __init__(self, at_once: Sampler, *, holds: bool) -> None:
        self._at_once, self._holds = at_once, holds

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """See the SDK's Sampler."""
        parent = get_current_span(parent_context).get_span_context()
        if parent.is_valid and not parent.is_remote and hold_of(parent) is not None:
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, parent.trace_state)
        result = self._at_once.should_sample(
            parent_context, trace_id, name, kind, attributes, links
        )
        state = result.trace_state or TraceState()
        if HOLD_KEY in state:
            state = state.delete(HOLD_KEY)
        is_first = parent.is_remote or not parent.is_valid
        decision = result.decision
        if self._holds and is_first and decision is not Decision.RECORD_AND_SAMPLE:
            if len(state) > _MAX_OTHERS:  # the last is the oldest
                state = TraceState(list(state.items())[:_MAX_OTHERS])
            # Not to be guessed by clients, and no two routers' are the same.
            state = state.add(HOLD_KEY, f"{random.getrandbits(64):016x}")
            decision = Decision.RECORD_AND_SAMPLE
        return SamplingResult(decision, attributes, state)

    def get_description(self) -> str:
        """See the SDK's Sampler."""
        return f"Edge{{{self._at_once.get_description()},holds={self._holds}}}"
