"""One lease's stream to a prefill worker. The stream is the lease."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import grpc

from diptych.errors import DiptychError, NoWorkerError
from diptych.rpc.client_stream import ClientStream, CommandQueue
from diptych.rpc.status import from_failure
from diptych.timers import Timers
from diptych.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from router.cluster import wrong_forms
from router.placement.views import WorkerId

logger = logging.getLogger(__name__)

_CLOSE_PATIENCE_S = 1.0
_MAX_UNSENT = 64


class LeaseListener(Protocol):
    """Gets what the worker says of one lease; called on the event loop, must not raise."""

    def on_prefill_event(self, sequence_id: int, event: prefill_pb2.PrefillEvent) -> None: ...

    def on_lease_ended(self, sequence_id: int, error: DiptychError) -> None: ...


class PrefillLink:
    """Opens, feeds and ends the stream; sends a heartbeat each second while it is open.

    ``run`` is one task. ``grant`` and ``close`` are called by the session, and after
    ``close`` the listener hears nothing more.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        start: prefill_pb2.PrefillStart,
        listener: LeaseListener,
        *,
        worker: WorkerId,
        timers: Timers,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        # Made at once: gRPC crashes where one is made on a channel that was closed meanwhile.
        self._stub: prefill_pb2_grpc.PrefillAsyncStub = prefill_pb2_grpc.PrefillStub(channel)
        self._sequence_id = start.sequence_id
        self._listener = listener
        self._worker = worker
        self._timers = timers
        self._metadata = tuple(metadata)
        self._outbox = CommandQueue(timers, _heartbeat, max_unsent=_MAX_UNSENT)
        self._outbox.put(prefill_pb2.PrefillCommand(start=start))
        self._closed = False
        self._closed_at_s = 0.0

    def grant(self, grant: prefill_pb2.Grant) -> None:
        """Send a Grant."""
        self._outbox.put(prefill_pb2.PrefillCommand(grant=grant))

    def close(self) -> None:
        """Release the lease: half-close the stream, and cancel it if that takes long."""
        if not self._closed:
            self._closed = True
            self._closed_at_s = asyncio.get_running_loop().time()
            self._outbox.end()

    async def run(self) -> None:
        """Hold the stream until either side ends it."""
        if self._closed:
            return
        error = await self._hold()
        if not self._closed:
            self._closed = True
            self._listener.on_lease_ended(self._sequence_id, error)

    async def _hold(self) -> DiptychError:
        """Run the stream to its end; why it ended."""
        try:
            call = self._stub.Prefill(self._outbox.commands(), metadata=self._metadata)
            stream = ClientStream(call, self._timers, progress=_progress, stuck=self._stuck)
            return await stream.run(self._on_event)
        except grpc.aio.UsageError:  # the channel is closed
            return NoWorkerError("the router left it")
        finally:
            self._outbox.end()

    def _on_event(self, event: prefill_pb2.PrefillEvent) -> DiptychError | None:
        """Tell the listener; the error that ends the stream, if this does."""
        if event.HasField("ended"):
            return from_failure(event.ended)
        if event.HasField("accepted"):
            incarnation = event.accepted.incarnation
            if incarnation != self._worker.incarnation:
                return NoWorkerError(f"{incarnation} is there now")
        if event.HasField("first_token"):
            wrong = wrong_forms.of_first_token(event.first_token)
            if wrong is not None:
                return NoWorkerError(wrong)
        if not self._closed and not event.HasField("heartbeat"):
            self._listener.on_prefill_event(self._sequence_id, event)
        return None

    def _stuck(self) -> str | None:
        if not self._closed:
            return self._outbox.problem()
        age_s = asyncio.get_running_loop().time() - self._closed_at_s
        return "did not end" if age_s >= _CLOSE_PATIENCE_S else None


def _progress(event: prefill_pb2.PrefillEvent) -> common_pb2.EngineProgress | None:
    return event.heartbeat.progress if event.heartbeat.HasField("progress") else None


def _heartbeat() -> prefill_pb2.PrefillCommand:
    return prefill_pb2.PrefillCommand(heartbeat=common_pb2.Heartbeat())
