"""The one stream to a decode worker that carries all of this router's sequences there."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from diptych.request_class import RequestClass
from diptych.rpc.client_stream import ClientStream, CommandQueue, keep_open
from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from router.cluster import wrong_forms
from router.cluster.watch import WorkerWatch
from router.placement.answer_length import AnswerLength
from router.placement.decode_load import DecodeLoad
from router.placement.promises import Promise
from router.placement.views import WorkerId

logger = logging.getLogger(__name__)

_MAX_UNSENT = 16384  # commands


class ReservationListener(Protocol):
    """Gets what the worker says of one sequence; called on the event loop, must not raise."""

    def on_tokens(self, tokens: decode_pb2.SequenceTokens) -> None: ...

    def on_decode_event(self, event: decode_pb2.DecodeEvent) -> None: ...

    def on_reservation_lost(self, sequence_id: int, message: str) -> None: ...


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
        on_change: Callable[["DecodeLink"], None],
    ) -> None:
        """``on_change`` after the stream came up or broke, and after a sequence came or went."""
        self.watch = watch
        self.worker: WorkerId | None = None  # while the stream is up
        self._router_incarnation = router_incarnation
        self._timers = timers
        self._on_change = on_change
        self.load = DecodeLoad(router_incarnation)
        self._listeners: dict[int, ReservationListener] = {}
        self._outbox: CommandQueue[decode_pb2.DecodeCommand] | None = None  # of the stream
        self._peers: tuple[WorkerId, ...] = ()
        self._is_there = asyncio.Event()
        self.watch_changed()

    def reserve(
        self,
        command: decode_pb2.Reserve,
        listener: ReservationListener,
        answer: AnswerLength | None = None,
    ) -> bool:
        """Send a Reserve; ``listener`` hears of the sequence until its Ended. False: no stream.

        ``answer``: how long what is to come may become; None: it is not known.
        """
        if self.worker is None:
            return False
        self._listeners[command.sequence_id] = listener
        is_batch = command.spec.yields or command.spec.tier == RequestClass.BATCH.tier
        self.load.asked(
            command.sequence_id,
            None if is_batch else command.spec.payer,
            _promise(command.spec, answer),
            0 if command.to_pull else len(command.spec.token_ids),
        )
        self._send(decode_pb2.DecodeCommand(reserve=command))
        self._on_change(self)
        return True

    def bind(self, command: decode_pb2.Bind) -> None:
        """Send a Bind: what another worker computed is pulled."""
        if self.load.bound(command.sequence_id):
            self._on_change(self)
        self._send(decode_pb2.DecodeCommand(bind=command))

    def start(self, command: decode_pb2.Start) -> None:
        """Send a Start."""
        self.load.started(command.sequence_id, self.watch.now_s)
        self._send(decode_pb2.DecodeCommand(start=command))

    def release(self, sequence_id: int) -> None:
        """Send a Release; nothing more is heard of the sequence. Idempotent."""
        if self._listeners.pop(sequence_id, None) is not None:
            self.load.over(sequence_id)
            release = decode_pb2.Release(sequence_id=sequence_id)
            self._send(decode_pb2.DecodeCommand(release=release))
            self._on_change(self)

    def set_peers(self, peers: tuple[WorkerId, ...]) -> None:
        """Tell the worker which prefill workers there are (sorted), if that is news."""
        if peers != self._peers:
            self._peers = peers
            if self.worker is not None:
                self._send_peers()

    def watch_changed(self) -> None:
        """The watch of the worker says something new of it."""
        if self.watch.is_alive and self.watch.can_decode:
            self._is_there.set()
        else:
            self._is_there.clear()

    async def run(self) -> None:
        """Hold a stream whenever the worker is there, until cancelled.

        Also while it is not ready, or takes no sequences: it proves pairs meanwhile, and it
        learns from this stream which prefill workers there are.
        """
        await keep_open(self._hold_stream)

    async def _hold_stream(self) -> bool:
        """Wait for the worker and run one stream to its end; True if it was ever up."""
        await self._is_there.wait()
        outbox = CommandQueue(self._timers, _heartbeat, max_unsent=_MAX_UNSENT)
        hello = decode_pb2.Hello(router_incarnation=self._router_incarnation)
        outbox.put(decode_pb2.DecodeCommand(hello=hello))
        self._outbox = outbox
        call = decode_pb2_grpc.DecodeStub(self.watch.channel).Decode(outbox.commands())
        stream = ClientStream(call, self._timers, progress=_progress, stuck=outbox.problem)
        try:
            ended = await stream.run(self._handle)
        except asyncio.CancelledError:  # the router goes, or the worker was taken off its list
            self._break("the router left it")
            raise
        was_up = self.worker is not None
        if was_up:
            logger.warning(
                "decode stream lost",
                extra={
                    "worker": self.watch.address,
                    "why": ended.message,
                    "num_sequences": self.load.num_own,
                },
            )
        self._break(ended.message)
        return was_up

    def _handle(self, event: decode_pb2.DecodeEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "heartbeat":
            return
        if kind == "step":
            for tokens in event.step.sequences:
                listener = self._listeners.get(tokens.sequence_id)
                if listener is not None:
                    if self.load.drew(tokens.sequence_id):
                        self._on_change(self)
                    wrong = wrong_forms.of_tokens(tokens)
                    if wrong is None:
                        listener.on_tokens(tokens)
                    else:
                        self._give_up(tokens.sequence_id, listener, wrong)
        elif kind == "welcome":
            self.worker = WorkerId(self.watch.address, event.welcome.incarnation)
            self._send_peers()
            self._on_change(self)
        elif kind is not None:
            sequence_id = getattr(event, kind).sequence_id
            if kind == "ended":
                listener = self._listeners.pop(sequence_id, None)
                self.load.over(sequence_id)
                self._on_change(self)
            else:
                listener = self._listeners.get(sequence_id)
                self.load.answered(sequence_id)
            if kind == "reserved" and self.load.reserved(
                sequence_id, event.reserved.num_cached_tokens
            ):
                self._on_change(self)
            wrong = wrong_forms.of_stats(event.proven.stats) if kind == "proven" else None
            if listener is not None and wrong is not None:
                self._give_up(sequence_id, listener, wrong)
            elif listener is not None:
                listener.on_decode_event(event)

    def _give_up(self, sequence_id: int, listener: ReservationListener, why: str) -> None:
        """The worker lives and does wrong with that sequence."""
        self.release(sequence_id)
        listener.on_reservation_lost(sequence_id, why)

    def _break(self, why: str) -> None:
        self.worker = None
        if self._outbox is not None:
            self._outbox.end()
            self._outbox = None
        listeners, self._listeners = self._listeners, {}
        self.load.clear()
        self._on_change(self)
        for sequence_id, listener in listeners.items():
            listener.on_reservation_lost(sequence_id, why)

    def _send(self, command: decode_pb2.DecodeCommand) -> None:
        if self._outbox is not None:
            self._outbox.put(command)

    def _send_peers(self) -> None:
        peers = [
            decode_pb2.Peer(address=peer.address, incarnation=peer.incarnation)
            for peer in self._peers
        ]
        self._send(decode_pb2.DecodeCommand(peers=decode_pb2.Peers(peers=peers)))


def _progress(event: decode_pb2.DecodeEvent) -> common_pb2.EngineProgress | None:
    return event.heartbeat.progress if event.HasField("heartbeat") else None


def _promise(spec: common_pb2.SequenceSpec, answer: AnswerLength | None) -> Promise:
    num_emitted = len(spec.token_ids) - spec.num_prompt_tokens
    return Promise(spec.tpot_s or None, max(0, spec.num_expected_tokens - num_emitted), answer)


def _heartbeat() -> decode_pb2.DecodeCommand:
    return decode_pb2.DecodeCommand(heartbeat=common_pb2.Heartbeat())
