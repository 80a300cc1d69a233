"""The samplers of a process that traces, from OpenTelemetry's SDK: what ``sampling`` says."""

import random
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import (
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes

from diptych.telemetry.sampling import HOLD_KEY, Sampling, hold_of

_NUM_IDS: Final = 2**64  # samplers look at that part of an id at the most
_MAX_OTHERS: Final = 31  # a tracestate has 32 entries at the most: one of them is the hold


def sampler_of(
    sampling: Sampling,
    clock: Callable[[], float],
    standard: Sampler | None = None,
    draw: Callable[[], float] = random.random,
) -> Sampler:
    """By the trace's id where it is ours, so that all processes decide alike.

    ``standard``, where it is given, says what is sampled at once, within the rate that callers
    have; what a router holds is recorded all the same. ``clock`` is monotonic, s; ``draw`` is of
    0 to 1.
    """
    at_once = standard or ParentBased(TraceIdRatioBased(sampling.ratio))
    if sampling.caller_per_s is None:
        return at_once if standard is None else _HeldSampler(standard)
    asked = _AskedSampler(at_once, sampling.caller_per_s, clock, draw)
    return _EdgeSampler(asked, holds=sampling.holds)


class _AskedSampler(Sampler):
    """Samples what callers have a part in, up to a rate; beyond it as if nobody had asked.

    They have it by their flag, and by the trace's id, which they chose: so beyond the rate another
    sampler is asked of an id that nobody chose.
    """

    def __init__(
        self,
        others: Sampler,
        per_s: float,
        clock: Callable[[], float],
        draw: Callable[[], float],
    ) -> None:
        self._others = others
        self._per_s, self._clock, self._draw = per_s, clock, draw
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
        said = self._others.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )
        parent = get_current_span(parent_context).get_span_context()
        if not parent.is_remote or said.decision is not Decision.RECORD_AND_SAMPLE:
            return said
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._as_of_s) * self._per_s)
        self._as_of_s = now
        if self._left >= 1.0:
            self._left -= 1.0
            return said
        own_id = int(self._draw() * _NUM_IDS)
        alone = self._others.should_sample(Context(), own_id, name, kind, attributes, links)
        return SamplingResult(alone.decision, attributes, parent.trace_state)

    def get_description(self) -> str:
        """See the SDK's Sampler."""
        return f"Asked{{{self._per_s}/s,{self._others.get_description()}}}"


class _HeldSampler(Sampler):
    """Records what a router holds, for its word is the last; of the rest another sampler decides.

    Without it the trace of a slow request would lack what workers did, which were set to
    ``traceidratio``, say.
    """

    def __init__(self, others: Sampler) -> None:
        self._others = others

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
        if hold_of(parent) is not None:
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, parent.trace_state)
        return self._others.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )

    def get_description(self) -> str:
        """See the SDK's Sampler."""
        return f"Held{{{self._others.get_description()}}}"


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
