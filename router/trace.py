"""The spans of one request at its router: the request, its stages, its attempts."""

import math
import time
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind

from diptych.telemetry import attributes, tracing
from diptych.telemetry.stages import Stage
from diptych.telemetry.tracing import Attributes, AttributeValue, Tracing
from router.cluster.worker_clock import ClockOffset
from router.placement.views import WorkerId
from router.request.response_builder import Moments

UNFINISHED = "unfinished"


class Workers(Protocol):
    """What a trace needs of the workers that it leads over."""

    def tell_trace(self, worker: WorkerId, hold: int, *, keep: bool) -> None:
        """Whether spans that the worker holds under ``hold`` are to be sent."""
        ...

    def clock_offset(self, worker: WorkerId) -> ClockOffset | None:
        """How the clock of the worker's spans stands; None: it is not known."""
        ...


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One try on workers; written when it is over."""

    context: Context
    stage: Stage
    began_s: float
    marks: dict[str, AttributeValue]
    workers: dict[str, WorkerId]  # by the attribute that names them
    links: tuple[Link, ...]


class RequestTrace:
    """What workers' spans hang under, early; all spans of the router's own, when they are over.

    A stage or an attempt has its id before anything is written of it, as workers begin
    their spans meanwhile. Invariant: ``end`` writes each attempt and each stage that was
    expected, so that no worker's span is without its parent. Of a trace that is held, all who
    were asked hear at its end whether it is sent. Nothing is done for a token. Event loop only.
    """

    def __init__(
        self,
        trace: Tracing,
        name: str,
        parent: Context,
        workers: Workers,
        *,
        received_s: float,
        marks: Attributes,
    ) -> None:
        """``parent`` is the client's context, ``marks`` what is known of the request."""
        self._trace = trace
        self._workers = workers
        self._span = trace.start(
            name, parent, start_s=received_s, kind=SpanKind.SERVER, attributes=marks
        )
        # Without an exporter the client's context is passed on as it is.
        self.context = tracing.context_of(self._span) if trace.enabled else parent
        self._planned: dict[Stage, Context] = {}
        self._expected: set[Stage] = set()
        self._attempt: _Attempt | None = None
        self._num_attempts = 0
        self._first_s = math.inf  # when the first of them began
        self._asked: set[WorkerId] = set()
        self._choice: Attributes = {}  # why the workers that are asked next were chosen

    @property
    def attempt(self) -> Context:
        """Of the attempt that is being made."""
        return self.context if self._attempt is None else self._attempt.context

    @property
    def is_recorded(self) -> bool:
        """Whether what is said of the request may be sent."""
        return self._span.is_recording()

    def choose(self, marks: Attributes) -> None:
        """Workers were chosen: for the attempt that asks them."""
        self._choice = marks

    def ask(self, role: str, worker: WorkerId) -> None:
        """A worker is asked, with which the first attempt begins; ``role`` names the attribute."""
        attempt = self._attempt or self._begin_attempt(Stage.PREFILL, {}, {}, ())
        attempt.workers[role] = worker
        attempt.marks.update(self._choice)
        self._asked.add(worker)

    def leave_out(self, role: str) -> None:
        """The attempt does without a worker of that role."""
        if self._attempt is not None:
            self._attempt.workers.pop(role, None)

    def retry(self, stage: Stage, marks: Attributes, error: str) -> None:
        """The attempt failed for ``error``, and one that ``stage`` waits for replaces it.

        ``marks`` say how it does. Workers hear at once that they shall send what they hold: one
        that goes would not hear it at the end.
        """
        links = tracing.links_to(self.attempt, marks)
        failed = self._attempt
        self._tell_workers(keep=True)
        self._span.add_event("retry", marks, round(1e9 * self._trace.now_s()))
        self._write_attempt(error)
        if failed is None:
            self._begin_attempt(stage, {}, {}, links)
        else:  # the same until others are asked
            self._begin_attempt(stage, failed.marks, failed.workers, links)

    def stage(self, stage: Stage) -> Context:
        """Of the span that ``stage`` will have if it is reached, or expected."""
        context = self._planned.get(stage)
        if context is None:
            context = self._planned[stage] = self._trace.plan(self.context, stage)
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

    def end(
        self, moments: Moments | None, outcome: str, error: str | None, *, keep: bool = False
    ) -> None:
        """Write everything; ``error`` is the reason if the request failed.

        ``keep`` sends what is held, everywhere.
        """
        hold = self._hold
        if hold is not None:
            self._trace.decide(hold, keep=keep)
            self._tell_workers(keep=keep)
        self._write_attempt(error)
        unfinished = None if error is None else UNFINISHED
        if moments is not None:
            self._write_stages(moments, unfinished, is_whole=outcome == "ok")
        else:  # of prompts alone, which nobody times one by one
            now = time.monotonic()
            for stage in self._expected:
                self._write_stage(stage, min(self._first_s, now), now, unfinished)
        self._trace.end(self._span, attributes={attributes.OUTCOME: outcome}, error=error)

    @property
    def _hold(self) -> int | None:
        return tracing.hold_of(self.context) if self._trace.enabled else None

    def _tell_workers(self, *, keep: bool) -> None:
        hold = self._hold
        if hold is not None:
            for worker in self._asked:
                self._workers.tell_trace(worker, hold, keep=keep)

    def _begin_attempt(
        self,
        stage: Stage,
        marks: Attributes,
        workers: dict[str, WorkerId],
        links: tuple[Link, ...],
    ) -> _Attempt:
        self._num_attempts += 1
        self._first_s = min(self._first_s, time.monotonic())
        self.expect(stage)
        context = self._trace.plan(self.stage(stage), Stage.ATTEMPT)
        now = time.monotonic()
        own = {**marks, attributes.ATTEMPT: self._num_attempts}
        self._attempt = _Attempt(context, stage, now, own, dict(workers), links)
        return self._attempt

    def _write_attempt(self, error: str | None) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._trace.record(
                Stage.ATTEMPT,
                self.stage(attempt.stage),
                attempt.began_s,
                time.monotonic(),
                planned=attempt.context,
                attributes=self._marks_of(attempt),
                error=error,
                links=attempt.links,
            )

    def _marks_of(self, attempt: _Attempt) -> dict[str, AttributeValue]:
        marks = dict(attempt.marks)
        for role, worker in attempt.workers.items():
            marks[role] = worker.address
            clock = self._workers.clock_offset(worker)
            if clock is not None:
                marks[f"{role}.{attributes.CLOCK_OFFSET_S}"] = clock.offset_s
                marks[f"{role}.{attributes.CLOCK_UNCERTAINTY_S}"] = clock.uncertainty_s
        return marks

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
