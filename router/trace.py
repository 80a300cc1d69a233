"""The spans of one request at its router: the request, its stages, its attempts."""

import time
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind

from diptych.telemetry import attributes, tracing
from diptych.telemetry.stages import Stage
from diptych.telemetry.tracing import Attributes, AttributeValue, Tracing
from router.request.response_builder import Moments

UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One try on workers; written when it is over."""

    context: Context
    stage: Stage
    began_s: float
    marks: dict[str, AttributeValue]
    links: tuple[Link, ...]


class RequestTrace:
    """What workers' spans hang under, early; all spans of the router's own, when they are over.

    A stage or an attempt has its id before anything is written of it, as workers begin
    their spans meanwhile. Invariant: ``end`` writes each attempt and each stage that was
    expected, so that no worker's span is without its parent. Nothing is done for a token.
    Event loop only.
    """

    def __init__(
        self, trace: Tracing, name: str, parent: Context, *, received_s: float, marks: Attributes
    ) -> None:
        """``parent`` is the client's context, ``marks`` what is known of the request."""
        self._trace = trace
        self._span = trace.start(
            name, parent, start_s=received_s, kind=SpanKind.SERVER, attributes=marks
        )
        # Without an exporter the client's context is passed on as it is.
        self.context = tracing.context_of(self._span) if trace.enabled else parent
        self._planned: dict[Stage, Context] = {}
        self._expected: set[Stage] = set()
        self._attempt: _Attempt | None = None
        self._num_attempts = 0

    @property
    def attempt(self) -> Context:
        """Of the attempt that is being made."""
        return self.context if self._attempt is None else self._attempt.context

    def ask(self, role: str, address: str) -> None:
        """A worker is asked, with which the first attempt begins; ``role`` names the attribute."""
        if self._attempt is None:
            self._begin_attempt(Stage.PREFILL, {}, ())
        self.mark_attempt({role: address})

    def retry(self, stage: Stage, marks: Attributes, error: str) -> None:
        """The attempt failed for ``error``, and one that ``stage`` waits for replaces it.

        ``marks`` say how it does.
        """
        links = tracing.links_to(self.attempt, marks)
        same = {} if self._attempt is None else self._attempt.marks  # until others are asked
        self._span.add_event("retry", marks)
        self._write_attempt(error)
        self._begin_attempt(stage, same, links)

    def stage(self, stage: Stage) -> Context:
        """Of the span that ``stage`` will have if it is reached, or expected."""
        context = self._planned.get(stage)
        if context is None:
            context = self._planned[stage] = self._trace.plan(self.context)
        return context

    def expect(self, stage: Stage) -> None:
        """Write ``stage``, reached or not: there are spans under it."""
        self._expected.add(stage)

    def mark(self, marks: Attributes) -> None:
        """Say this of the request."""
        self._span.set_attributes(marks)

    def mark_attempt(self, marks: Attributes) -> None:
        """Say this of the attempt that is being made."""
        if self._attempt is not None:
            self._attempt.marks.update(marks)

    def end(self, moments: Moments | None, outcome: str, error: str | None) -> None:
        """Write everything; ``error`` is the reason if the request failed."""
        self._write_attempt(error)
        if moments is not None:
            is_whole = outcome == "ok"
            self._write_stages(moments, None if error is None else UNFINISHED, is_whole=is_whole)
        self._trace.end(self._span, attributes={attributes.OUTCOME: outcome}, error=error)

    def _begin_attempt(self, stage: Stage, marks: Attributes, links: tuple[Link, ...]) -> None:
        self._num_attempts += 1
        self.expect(stage)
        context, now = self._trace.plan(self.stage(stage)), time.monotonic()
        own = {**marks, attributes.ATTEMPT: self._num_attempts}
        self._attempt = _Attempt(context, stage, now, own, links)

    def _write_attempt(self, error: str | None) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._trace.record(
                Stage.ATTEMPT,
                self.stage(attempt.stage),
                attempt.began_s,
                time.monotonic(),
                planned=attempt.context,
                attributes=attempt.marks,
                error=error,
                links=attempt.links,
            )

    def _write_stages(self, moments: Moments, error: str | None, *, is_whole: bool) -> None:
        """``error`` is what is said of a stage that did not come to its end."""
        now = time.monotonic()
        stages = moments.stages
        for stage, start_s, stop_s in stages:
            if stop_s is not None:
                self._write_stage(stage, start_s, stop_s)
            elif not is_whole or stage in self._expected:  # else: nothing was to be handed off
                self._write_stage(stage, start_s, now, error)
        for stage in self._expected - {entered.stage for entered in stages}:
            self._write_stage(stage, now, now, error)

    def _write_stage(
        self, stage: Stage, start_s: float, stop_s: float, error: str | None = None
    ) -> None:
        planned = self._planned.get(stage)
        self._trace.record(stage, self.context, start_s, stop_s, planned=planned, error=error)
