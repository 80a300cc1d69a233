"""Prefill: one stream per lease. gRPC shell of :mod:`prefill_worker.lease_session`."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

from google.protobuf.message import Message

from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import (
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
from diptych.telemetry.families import LeaseMetrics
from diptych.telemetry.stages import Stage
from diptych.timers import Timers
from diptych.v1 import prefill_pb2, prefill_pb2_grpc
from diptych.worker.engine_parts import EngineParts
from diptych.worker.status import WorkerStatus
from kvtransfer.source.lease_table import LeaseTable
from prefill_worker.lease_session import LeaseSession

logger = logging.getLogger(__name__)

_MAX_UNSENT_EVENTS = 64


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """All leases of this worker. Event loop only.

    Refuses until ``attach``; from then on it owns one LeaseStream per open RPC.
    """

    def __init__(self, status: WorkerStatus, timers: Timers, spans: tracing.Tracing) -> None:
        self.status = status
        self.timers = timers
        self.spans = spans
        self.parts: EngineParts | None = None
        self.leases: LeaseTable | None = None
        self.metrics: LeaseMetrics | None = None
        self._streams: dict[SequenceKey, LeaseStream] = {}
        self._num_streams = 0

    def attach(self, parts: EngineParts, leases: LeaseTable, metrics: LeaseMetrics) -> None:
        """The engine is there: leases may be opened."""
        self.parts, self.leases, self.metrics = parts, leases, metrics
        parts.engine.subscribe(self._on_step)

    @property
    def num_leases(self) -> int:
        """Leases that hold blocks."""
        return len(self._streams)

    @property
    def num_streams(self) -> int:
        """Calls whose handler has not returned."""
        return self._num_streams

    async def Prefill(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """Serve one lease; its blocks are freed however the stream ends."""
        self._num_streams += 1
        stream = LeaseStream(self, request_iterator, context)
        try:
            await stream.run()
        except DiptychError as error:
            await stream.tell(error)
            raise
        finally:
            self._num_streams -= 1
            self.status.load_changed()
        return
        yield  # a generator without items: the stream is written with context.write

    def _on_step(self, updates: Sequence[SequenceUpdate]) -> None:
        """Tell each lease what a step did to its sequence."""
        for update in updates:
            stream = self._streams.get(update.sequence.key)
            if stream is not None:
                stream.on_update(update)

    def end_all(self, error: DiptychError) -> None:
        """End every lease, soon."""
        for stream in self._streams.values():
            stream.end(error)

    def add(self, key: SequenceKey, stream: "LeaseStream") -> None:
        """A lease is about to be opened. Raises InvalidRequestError: the id is in use."""
        if key in self._streams:
            raise InvalidRequestError(f"{key.sequence_id} is in use", field="start.sequence_id")
        self._streams[key] = stream

    def remove(self, key: SequenceKey) -> None:
        """The lease is closed."""
        self._streams.pop(key, None)


class LeaseStream:
    """One call of Prefill."""

    def __init__(
        self,
        servicer: PrefillServicer,
        commands: AsyncIterator[prefill_pb2.PrefillCommand],
        context: Context,
    ) -> None:
        self._servicer = servicer
        self._context = context
        self._unsent: deque[Message] = deque()
        self._session: LeaseSession | None = None
        self._key: SequenceKey | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._stream = ServerStream(
            commands, context, timers=servicer.timers, take=self._take, beat=self._beat
        )

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
        session, parts = self._session, self._servicer.parts
        if session is None or parts is None:
            return
        if update.error is not None:
            self._stream.end(update.error)
            return
        step = parts.engine.last_step
        try:
            event = session.step(update, time.monotonic() if step is None else step.started_s)
            if event is not None:
                self._send(event)
        except DiptychError as error:  # this lease breaks, not the engine that told us
            self._stream.end(error)
        if session.unbound and self._expiry is None:
            wait_s = self._servicer.timers.unbound_lease_s
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
        servicer = self._servicer
        if self._session is not None:
            raise InvalidRequestError("came twice", field="start")
        servicer.status.admit()
        parts, leases = servicer.parts, servicer.leases
        assert parts is not None
        assert leases is not None
        session = LeaseSession(
            parts.engine,
            leases,
            vocab_size=parts.vocab_size,
            max_model_len=parts.max_model_len,
            clock=time.monotonic,
        )
        key = SequenceKey(command.router_incarnation, command.sequence_id)
        servicer.add(key, self)
        self._key, self._session = key, session
        self._parent = tracing.extract_metadata(self._metadata())
        with logs.request_ids(command.request_id, tracing.trace_id(self._parent)):
            event = session.start(command)
            logger.debug("lease opened", extra={"num_tokens": len(command.spec.token_ids)})
        event.accepted.incarnation = servicer.status.incarnation
        self._send(event)
        servicer.status.load_changed()

    def _metadata(self) -> list[tuple[str, str | bytes]]:
        return [(str(key), value) for key, value in self._context.invocation_metadata() or ()]

    def _take(self) -> Message | None:
        return self._unsent.popleft() if self._unsent else None

    def _beat(self) -> None:
        parts = self._servicer.parts
        heartbeat = prefill_pb2.PrefillEvent()
        heartbeat.heartbeat.SetInParent()
        if parts is not None:
            heartbeat.heartbeat.progress.CopyFrom(parts.progress())
        if not self._unsent:
            self._send(heartbeat)

    def _send(self, event: prefill_pb2.PrefillEvent) -> None:
        if len(self._unsent) >= _MAX_UNSENT_EVENTS:
            raise SlowClientError(f"{len(self._unsent)} events are unsent")
        self._unsent.append(event)
        self._stream.wake()

    def _expire(self) -> None:
        if self._session is not None and self._session.unbound:
            wait_s = self._servicer.timers.unbound_lease_s
            self.end(LeaseExpiredError(f"finished, and granted to nobody within {wait_s} s"))

    def _close(self, why: str) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        servicer, session = self._servicer, self._session
        if session is None or self._key is None:
            return
        session.close()
        servicer.remove(self._key)
        self._tell(why, session)

    def _tell(self, why: str, session: LeaseSession) -> None:
        """Metrics and spans of a lease that is over."""
        servicer, times = self._servicer, session.times
        if times.accepted_at is None or servicer.metrics is None:
            return
        now = time.monotonic()
        servicer.metrics.ended[why].inc()
        servicer.metrics.held_seconds.observe(now - times.accepted_at)
        started = times.first_step_at or now
        error = None if times.sampled_at is not None else why
        servicer.spans.record(
            Stage.PREFILL_WAIT, self._parent, times.accepted_at, started, error=error
        )
        if times.first_step_at is not None:
            servicer.spans.record(
                Stage.PREFILL_COMPUTE, self._parent, started, times.sampled_at or now, error=error
            )
