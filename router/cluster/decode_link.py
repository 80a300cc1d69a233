"""The one stream to a decode worker that carries all of this router's sequences there."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import grpc

from diptych.rpc.status import from_rpc_error
from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from router.cluster.command_queue import CommandQueue
from router.cluster.liveness import Liveness
from router.cluster.watch import WorkerWatch
from router.cluster.watchdog import Watchdog
from router.placement.types import WorkerId

logger = logging.getLogger(__name__)

_MAX_UNSENT = 16384  # commands
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0
_NOT_THERE_POLL_S = 0.1


class SeatListener(Protocol):
    """Gets what the worker says of one sequence; called on the event loop, must not raise."""

    def on_tokens(self, tokens: decode_pb2.SequenceTokens) -> None: ...

    def on_decode_event(self, event: decode_pb2.DecodeEvent) -> None: ...

    def on_seat_lost(self, sequence_id: int, message: str) -> None: ...


class DecodeLink:
    """Keeps a Decode stream to one worker open; sorts its events to their listeners.

    Commands are queued, never awaited, and sent in order. When the stream breaks,
    every listener is told once and all sequences are forgotten. Used on the event
    loop only; ``run`` is its task.
    """

    def __init__(
        self,
        watch: WorkerWatch,
        *,
        router_incarnation: str,
        timers: Timers,
        on_change: Callable[[], None],
    ) -> None:
        self.watch = watch
        self.worker: WorkerId | None = None  # while the stream is up
        self._router_incarnation = router_incarnation
        self._timers = timers
        self._on_change = on_change
        self._listeners: dict[int, SeatListener] = {}
        self._outbox: CommandQueue[decode_pb2.DecodeCommand] | None = None  # of the stream
        self._peers: tuple[WorkerId, ...] = ()

    @property
    def num_sequences(self) -> int:
        """Of this router, on this worker."""
        return len(self._listeners)

    def reserve(self, command: decode_pb2.Reserve, listener: SeatListener) -> bool:
        """Send a Reserve; ``listener`` hears of the sequence until its Ended. False: no stream."""
        if self.worker is None:
            return False
        self._listeners[command.sequence_id] = listener
        self._send(decode_pb2.DecodeCommand(reserve=command))
        return True

    def bind(self, command: decode_pb2.Bind) -> None:
        """Send a Bind."""
        self._send(decode_pb2.DecodeCommand(bind=command))

    def start(self, command: decode_pb2.Start) -> None:
        """Send a Start."""
        self._send(decode_pb2.DecodeCommand(start=command))

    def release(self, sequence_id: int) -> None:
        """Send a Release; nothing more is heard of the sequence. Idempotent."""
        if self._listeners.pop(sequence_id, None) is not None:
            release = decode_pb2.Release(sequence_id=sequence_id)
            self._send(decode_pb2.DecodeCommand(release=release))

    def set_peers(self, peers: Iterable[WorkerId]) -> None:
        """Tell the worker which prefill workers there are, if that is news."""
        wanted = tuple(sorted(peers))
        if wanted != self._peers:
            self._peers = wanted
            if self.worker is not None:
                self._send_peers()

    async def run(self) -> None:
        """Hold a stream whenever the worker is there, until cancelled.

        Also while it is not ready: without local prefill it gets ready by proving a
        pair, and it learns from this stream which prefill workers there are.
        """
        backoff_s = _FIRST_BACKOFF_S
        while True:
            if not self.watch.is_alive:
                await asyncio.sleep(_NOT_THERE_POLL_S)
                continue
            if await self._hold_stream():
                backoff_s = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _hold_stream(self) -> bool:
        """Run one stream to its end; True if it was ever up."""
        outbox = CommandQueue(self._timers, _heartbeat, max_unsent=_MAX_UNSENT)
        hello = decode_pb2.Hello(router_incarnation=self._router_incarnation)
        outbox.put(decode_pb2.DecodeCommand(hello=hello))
        self._outbox = outbox
        call = decode_pb2_grpc.DecodeStub(self.watch.channel).Decode(outbox.commands())
        liveness = Liveness(self._timers, asyncio.get_running_loop().time())
        was_up, why = False, "it ended the stream"
        with Watchdog(liveness, call.cancel, outbox.problem) as watchdog:
            try:
                async for event in call:
                    self._handle(event, liveness)
                    was_up = was_up or self.worker is not None
            except grpc.RpcError as error:
                why = from_rpc_error(error).message
            except asyncio.CancelledError:
                if not watchdog.is_lost:
                    raise
                why = str(watchdog.reason)
            finally:
                call.cancel()
                self._break(why)
        return was_up

    def _handle(self, event: decode_pb2.DecodeEvent, liveness: Liveness) -> None:
        kind = event.WhichOneof("event")
        if kind == "heartbeat":
            liveness.advanced(event.heartbeat.progress)
            return
        liveness.heard()
        if kind == "step":
            for tokens in event.step.sequences:
                listener = self._listeners.get(tokens.sequence_id)
                if listener is not None:
                    listener.on_tokens(tokens)
        elif kind == "welcome":
            self.worker = WorkerId(self.watch.address, event.welcome.incarnation)
            self._send_peers()
            self._on_change()
        elif kind is not None:
            sequence_id = getattr(event, kind).sequence_id
            if kind == "ended":
                listener = self._listeners.pop(sequence_id, None)
            else:
                listener = self._listeners.get(sequence_id)
            if listener is not None:
                listener.on_decode_event(event)

    def _break(self, why: str) -> None:
        if self.worker is not None:
            logger.warning(
                "decode stream lost",
                extra={
                    "worker": self.watch.address,
                    "why": why,
                    "num_sequences": len(self._listeners),
                },
            )
        self.worker = None
        if self._outbox is not None:
            self._outbox.end()
            self._outbox = None
        listeners, self._listeners = self._listeners, {}
        for sequence_id, listener in listeners.items():
            listener.on_seat_lost(sequence_id, why)
        self._on_change()

    def _send(self, command: decode_pb2.DecodeCommand) -> None:
        if self._outbox is not None:
            self._outbox.put(command)

    def _send_peers(self) -> None:
        peers = [
            decode_pb2.Peer(address=peer.address, incarnation=peer.incarnation)
            for peer in self._peers
        ]
        self._send(decode_pb2.DecodeCommand(peers=decode_pb2.Peers(peers=peers)))


def _heartbeat() -> decode_pb2.DecodeCommand:
    return decode_pb2.DecodeCommand(heartbeat=common_pb2.Heartbeat())
