"""The stream of one router: gRPC and pull tasks around its RouterSequences."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from decode_worker import actions
from decode_worker.actions import Action, PreparedPull, RunPull, SendEvent, SendTokens, StopPull
from decode_worker.observer import StreamObserver
from decode_worker.outbox import Outbox
from decode_worker.router_sequences import RouterSequences
from decode_worker.stream_resources import StreamDeps, StreamResources
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import DiptychError, InvalidRequestError
from diptych.rpc.server import Context
from diptych.rpc.server_stream import ServerStream
from diptych.v1 import decode_pb2, worker_pb2
from diptych.worker.status import still_loading
from kvtransfer.reader.pairs import PeerKey
from kvtransfer.reader.pull_machine import PullError

logger = logging.getLogger(__name__)


class DecodeStream:
    """One call of Decode: reads commands, runs pulls, sends what is decided.

    Made by the servicer, run by the call's task; ``attach``, ``end`` and the engine's
    news of steps come from the same event loop.
    """

    def __init__(
        self,
        deps: StreamDeps,
        commands: AsyncIterator[decode_pb2.DecodeCommand],
        context: Context,
        on_hello: "Callable[[DecodeStream, str], StreamResources | None]",
    ) -> None:
        """``on_hello`` is told which router it is; None: no engine yet. It may refuse."""
        self._deps = deps
        self._on_hello = on_hello
        self._outbox = Outbox(deps.max_unsent_events)
        self._stream = ServerStream(
            commands, context, timers=deps.timers, take=self._outbox.take, beat=self._beat
        )
        self._pulls: dict[tuple[int, int], asyncio.Task[None]] = {}  # by sequence, bind
        self._peers: list[PeerKey] = []
        self._resources: StreamResources | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._sequences: RouterSequences | None = None
        self._observer: StreamObserver | None = None
        self.router_incarnation = ""  # until Hello
        self.peer = str(context.peer())  # where it comes from, as gRPC writes it

    @property
    def num_sequences(self) -> int:
        """Sequences between Reserve and Ended."""
        return 0 if self._sequences is None else len(self._sequences)

    @property
    def has_unsent(self) -> bool:
        """Whether the router has yet to be told something."""
        return len(self._outbox) > 0 or self._stream.writing

    async def run(self) -> None:
        """Serve the stream; raises the DiptychError that ended it. Frees everything."""
        try:
            await self._stream.run(self._on_command)
        finally:
            self._close()

    def end(self, error: DiptychError) -> None:
        """End the stream with ``error``, soon."""
        self._stream.end(error)

    def attach(self, resources: StreamResources) -> None:
        """The engine is there, and Hello may be."""
        if not self.router_incarnation:
            return
        self._resources = resources
        self._observer = StreamObserver(
            self._deps.spans, resources.engine_metrics, resources.transfer_metrics
        )
        self._sequences = RouterSequences(
            self.router_incarnation,
            resources.parts.engine,
            resources.limits,
            open_pull=resources.pairs.open_pull,
            unfinished_reads=resources.pairs.quarantined_block_ids,
            admit=partial(self._deps.status.admit_as, worker_pb2.WORKER_ROLE_DECODE),
            observer=self._observer,
        )
        self._unsubscribe = resources.parts.engine.subscribe(self._on_step)
        resources.pairs.set_peers(self, self._peers)

    def _on_step(self, updates: Sequence[SequenceUpdate]) -> None:
        """Book a step; ``updates`` may name other streams' sequences too."""
        if self._sequences is not None:
            self._act(self._sequences.step(updates))

    def _on_command(self, command: decode_pb2.DecodeCommand) -> None:
        kind = command.WhichOneof("command")
        if kind == "heartbeat":
            return
        if kind == "hello":
            self._hello(command.hello)
        elif not self.router_incarnation:
            raise InvalidRequestError("must come first", field="hello")
        elif kind == "peers":
            self._set_peers(command.peers)
        elif self._sequences is not None:
            self._act(self._decide(self._sequences, command))
            if kind in ("reserve", "start"):
                self._deps.status.work_came(self.router_incarnation)
            else:
                self._deps.status.load_changed()
        elif kind == "reserve":
            refused = actions.send_ended(command.reserve.sequence_id, error=still_loading())
            self._act([refused])

    def _decide(
        self, sequences: RouterSequences, command: decode_pb2.DecodeCommand
    ) -> list[Action]:
        match command.WhichOneof("command"):
            case "reserve":
                return sequences.reserve(command.reserve)
            case "bind":
                return sequences.bind(command.bind)
            case "start":
                return sequences.start(command.start)
            case "release":
                return sequences.release(command.release.sequence_id)
        return []  # newer than this worker

    def _hello(self, hello: decode_pb2.Hello) -> None:
        if self.router_incarnation or not hello.router_incarnation:
            raise InvalidRequestError("must come once and name the router", field="hello")
        resources = self._on_hello(self, hello.router_incarnation)
        self.router_incarnation = hello.router_incarnation
        welcome = decode_pb2.Welcome(incarnation=self._deps.status.incarnation)
        self._outbox.put(decode_pb2.DecodeEvent(welcome=welcome))
        self._stream.wake()
        if resources is not None:
            self.attach(resources)

    def _set_peers(self, peers: decode_pb2.Peers) -> None:
        self._peers = [PeerKey(peer.address, peer.incarnation) for peer in peers.peers]
        if self._resources is not None:
            self._resources.pairs.set_peers(self, self._peers)

    def _act(self, decided: Sequence[Action]) -> None:
        for action in decided:
            match action:
                case SendEvent(event):
                    self._put(event)
                case SendTokens(tokens):
                    self._outbox.put_tokens(tokens)
                    if self._observer is not None:
                        self._observer.stepped(tokens)
                case RunPull(sequence_id, bind_id, pull):
                    assert self._stream.tasks is not None
                    self._pulls[sequence_id, bind_id] = self._stream.tasks.create_task(
                        self._pull(sequence_id, bind_id, pull), name="pull"
                    )
                case StopPull(sequence_id, bind_id):
                    self._pulls.pop((sequence_id, bind_id)).cancel()
        if decided:
            self._stream.wake()

    def _put(self, event: decode_pb2.DecodeEvent) -> None:
        try:
            self._outbox.put(event)
        except DiptychError as error:  # the stream breaks; its end frees everything
            self._stream.end(error)

    async def _pull(self, sequence_id: int, bind_id: int, pull: PreparedPull) -> None:
        assert self._sequences is not None
        assert self._observer is not None
        pulling = self._observer.pulling(sequence_id)
        try:
            result = await pull.run()
        except asyncio.CancelledError:
            self._observer.pull_failed(pulling, None)
            raise
        except PullError as error:
            failed = error
        except Exception as error:  # a bug in one pull must not end the others
            logger.exception("pull failed")
            failed = PullError(decode_pb2.PULL_FAILURE_TRANSPORT, f"internal: {error!r}")
        else:
            self._observer.pulled(pulling, result.stats)
            self._act(self._sequences.pull_proven(sequence_id, bind_id, result.stats))
            return
        finally:
            self._pulls.pop((sequence_id, bind_id), None)
            self._deps.status.load_changed()
        self._observer.pull_failed(pulling, failed)
        self._act(self._sequences.pull_failed(sequence_id, bind_id, failed.failure, failed.message))

    def _beat(self) -> None:
        if self._resources is not None:
            self._outbox.put_heartbeat(self._resources.parts.progress())
        else:
            self._outbox.put_heartbeat(None)

    def _close(self) -> None:
        """The stream is over: free every sequence; its peers are forgotten soon."""
        self._unsubscribe()
        if self._sequences is not None:
            self._sequences.release_all()
        if self._resources is not None:
            self._resources.pairs.leave(self)
