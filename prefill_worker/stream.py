"""The stream of one lease: gRPC shell of :mod:`prefill_worker.lease_session`."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from google.protobuf.message import Message

from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import (
    BlocksComingError,
    DiptychError,
    InvalidRequestError,
    LeaseExpiredError,
    RouterLostError,
    SlowClientError,
    WorkerDrainingError,
)
from diptych.rpc.server import Context
from diptych.rpc.server_stream import ServerStream
from diptych.rpc.status import to_failure
from diptych.telemetry import logs, tracing
from diptych.telemetry.stages import Stage
from diptych.v1 import prefill_pb2, worker_pb2
from prefill_worker.lease_session import LeaseSession
from prefill_worker.stream_resources import StreamDeps, StreamResources

logger = logging.getLogger(__name__)

_MAX_UNSENT_EVENTS = 64


class LeaseStream:
    """One call of Prefill: reads commands, sends what its lease says.

    Made by the servicer, run by the call's task; ``attach``, ``end`` and ``on_update`` come
    from the same event loop.
    """

    def __init__(
        self,
        deps: StreamDeps,
        commands: AsyncIterator[prefill_pb2.PrefillCommand],
        context: Context,
        on_start: "Callable[[SequenceKey, LeaseStream], None]",
    ) -> None:
        """``on_start`` is told which lease it is about to open. It may refuse."""
        self._deps = deps
        self._context = context
        self._on_start = on_start
        self._unsent: deque[Message] = deque()
        self._resources: StreamResources | None = None
        self._session: LeaseSession | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._stop_asking: Callable[[], None] = lambda: None  # for blocks, after each step
        self._stream = ServerStream(
            commands, context, timers=deps.timers, take=self._take, beat=self._beat
        )
        self.key: SequenceKey | None = None  # once ``on_start`` has taken it

    def attach(self, resources: StreamResources) -> None:
        """The engine is there."""
        self._resources = resources

    async def run(self) -> None:
        """Serve the stream; raises the DiptychError that ended it. Frees everything."""
        why = "failed"
        try:
            await self._stream.run(self._on_command)
            why = "released"
        except asyncio.CancelledError:
            why = "cancelled"
            raise
        except LeaseExpiredError:
            why = "expired"
            raise
        except RouterLostError:
            why = "lost_router"
            raise
        except WorkerDrainingError:
            why = "drained"
            raise
        finally:
            self._close(why)

    async def tell(self, error: DiptychError) -> None:
        """Send the router ``error``, which ``run`` has raised: nothing is held any more."""
        await self._stream.tell(prefill_pb2.PrefillEvent(ended=to_failure(error)))

    def end(self, error: DiptychError) -> None:
        """End the stream with ``error``, soon."""
        self._stream.end(error)

    def on_update(self, update: SequenceUpdate) -> None:
        """Book a step of this lease's sequence."""
        session, resources = self._session, self._resources
        if session is None or resources is None:
            return
        if update.error is not None:
            self._stream.end(update.error)
            return
        step = resources.parts.engine.last_step
        try:
            told = session.report(update)
            if told is not None:
                self._send(told)
            event = session.step(update, time.monotonic() if step is None else step.started_s)
            if event is not None:
                self._send(event)
        except DiptychError as error:  # this lease breaks, not the engine that told us
            self._stream.end(error)
        if session.unbound and self._expiry is None:
            wait_s = self._deps.timers.unbound_lease_s
            self._expiry = asyncio.get_running_loop().call_later(wait_s, self._expire)

    def _on_command(self, command: prefill_pb2.PrefillCommand) -> None:
        match command.WhichOneof("command"):
            case "start":
                self._start(command.start)
            case "grant":
                if self._session is None:
                    raise InvalidRequestError("came before start", field="grant")
                granted = self._session.grant(command.grant)
                if granted is not None:
                    self._send(granted)
            case "heartbeat" | None:
                pass

    def _start(self, command: prefill_pb2.PrefillStart) -> None:
        status = self._deps.status
        if self._session is not None:
            raise InvalidRequestError("came twice", field="start")
        status.admit_as(worker_pb2.WORKER_ROLE_PREFILL)
        assert self._resources is not None
        parts = self._resources.parts
        session = LeaseSession(
            parts.engine,
            self._resources.leases,
            vocab_size=parts.vocab_size,
            max_model_len=parts.max_model_len,
            clock=time.monotonic,
        )
        key = SequenceKey(command.router_incarnation, command.sequence_id)
        self._on_start(key, self)
        self.key, self._session = key, session
        self._parent = tracing.extract_metadata(self._metadata())
        self._open(session, self._resources, command)

    def _open(
        self, session: LeaseSession, resources: StreamResources, command: prefill_pb2.PrefillStart
    ) -> None:
        """Hold its blocks; those that others leave for it once they are there."""
        status = self._deps.status
        with logs.request_ids(command.request_id, tracing.trace_id(self._parent)):
            try:
                event = session.start(command)
            except BlocksComingError:
                self._stop_asking = resources.parts.engine.subscribe(
                    lambda updates: self._ask_again(session, resources, command)
                )
                return
            logger.debug("lease opened", extra={"num_tokens": len(command.spec.token_ids)})
        event.accepted.incarnation = status.incarnation
        self._send(event)
        status.work_came(command.router_incarnation)

    def _ask_again(
        self, session: LeaseSession, resources: StreamResources, command: prefill_pb2.PrefillStart
    ) -> None:
        """A step has ended."""
        self._stop_asking()
        try:
            self._deps.status.admit_as(worker_pb2.WORKER_ROLE_PREFILL)
            self._open(session, resources, command)
        except DiptychError as error:
            self._stream.end(error)

    def _metadata(self) -> list[tuple[str, str | bytes]]:
        return [(str(key), value) for key, value in self._context.invocation_metadata() or ()]

    def _take(self) -> Message | None:
        return self._unsent.popleft() if self._unsent else None

    def _beat(self) -> None:
        heartbeat = prefill_pb2.PrefillEvent()
        heartbeat.heartbeat.SetInParent()
        if self._resources is not None:
            heartbeat.heartbeat.progress.CopyFrom(self._resources.parts.progress())
        if not self._unsent:
            self._send(heartbeat)

    def _send(self, event: prefill_pb2.PrefillEvent) -> None:
        if len(self._unsent) >= _MAX_UNSENT_EVENTS:
            raise SlowClientError(f"{len(self._unsent)} events are unsent")
        self._unsent.append(event)
        self._stream.wake()

    def _expire(self) -> None:
        if self._session is not None and self._session.unbound:
            wait_s = self._deps.timers.unbound_lease_s
            self.end(LeaseExpiredError(f"finished, and granted to nobody within {wait_s} s"))

    def _close(self, why: str) -> None:
        self._stop_asking()
        if self._expiry is not None:
            self._expiry.cancel()
        if self._session is not None:
            self._session.close()
            self._tell(why, self._session)

    def _tell(self, why: str, session: LeaseSession) -> None:
        """Metrics and spans of a lease that is over."""
        resources, spans, times = self._resources, self._deps.spans, session.times
        if times.accepted_at is None or resources is None:
            return
        now = time.monotonic()
        resources.metrics.ended[why].inc()
        resources.metrics.held_seconds.observe(now - times.accepted_at)
        started = times.first_step_at or now
        error = None if times.sampled_at is not None else why
        spans.record(Stage.PREFILL_WAIT, self._parent, times.accepted_at, started, error=error)
        if times.first_step_at is not None:
            spans.record(
                Stage.PREFILL_COMPUTE, self._parent, started, times.sampled_at or now, error=error
            )
