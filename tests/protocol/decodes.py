"""Simulated decode workers: sequences of routers, and the reads that outlive their pulls."""

from collections.abc import Callable

from google.protobuf.message import Message

from decode_worker import actions as decode_actions
from decode_worker.outbox import Outbox
from decode_worker.router_sequences import Fallback, RouterSequences
from decode_worker.worker_limits import WorkerLimits
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import DiptychError
from diptych.v1 import decode_pb2
from kvtransfer.errors import AgentLostError
from kvtransfer.reader.quarantine import (
    Quarantine,
    ReapLimits,
    stuck_reads,
)
from router.placement.views import WorkerId
from tests.protocol.fake_model import VOCAB
from tests.protocol.prefills import PrefillWorker
from tests.protocol.pulls import FakePull, FakeRead
from tests.protocol.wire import Stream
from tests.protocol.workers import (
    BLOCK_SIZE,
    MAX_LEN,
    NUM_BLOCKS,
    Setting,
    Worker,
)

REAP_LIMITS = ReapLimits(max_age_s=10.0, grace_s=1.0, max_blocks=0.2 * NUM_BLOCKS)


class DecodeWorker(Worker):
    """Sequences of routers, pulls, and the reads that outlive them."""

    def __init__(
        self, identity: WorkerId, setting: Setting, open_fetch: Callable[["FakePull"], Stream]
    ) -> None:
        super().__init__(identity, setting)
        self.open_fetch = open_fetch
        self.connected: dict[WorkerId, PrefillWorker] = {}  # proven pairs
        self.streams: list[DecodeSide] = []
        self.pulls: list[FakePull] = []
        self.reads: list[FakeRead] = []  # posted, of living pulls and dead ones
        self.quarantine = Quarantine(self.pool.quarantine, self.pool.end_quarantine)

    def on_step(self, updates: list[SequenceUpdate]) -> None:
        for side in list(self.streams):
            if side.sequences is not None:
                side.act(side.sequences.step(updates))

    def tick(self) -> None:
        for pull in list(self.pulls):
            pull.tick()
        if stuck_reads([self.quarantine], self.clock(), REAP_LIMITS):
            self.tear_down_agent()

    def tear_down_agent(self) -> None:
        """Every read is terminal afterwards; every pair proves itself again."""
        self.connected.clear()
        for read in list(self.reads):
            read.end(AgentLostError("the agent was torn down"))


class DecodeSide:
    """The server's side of one router's Decode stream, as decode_worker.stream has it."""

    def __init__(self, worker: DecodeWorker) -> None:
        self.worker = worker
        self.stream: Stream | None = None
        self.sequences: RouterSequences | None = None
        self.router = ""
        self.outbox = Outbox(1000)
        worker.streams.append(self)

    def on_message(self, message: Message) -> None:
        assert isinstance(message, decode_pb2.DecodeCommand)
        try:
            self._handle(message)
        except DiptychError as error:
            self.end(error)

    def on_end(self, error: DiptychError | None) -> None:
        self.end(None)

    def flush(self) -> bool:
        """Put the oldest unsent event on the wire."""
        event = self.outbox.take()
        if event is not None and self.stream is not None:
            self.stream.down.put(event)
        return event is not None

    def end(self, error: DiptychError | None) -> None:
        assert self.stream is not None
        self.stream.server_ends(error)
        if self.sequences is not None:
            self.sequences.release_all()
        self.worker.streams.remove(self)

    def act(self, decided: list[decode_actions.Action]) -> None:
        for action in decided:
            match action:
                case decode_actions.SendEvent(event):
                    self.outbox.put(event)
                case decode_actions.SendTokens(tokens):
                    self.outbox.put_tokens(tokens)
                case decode_actions.RunPull(sequence_id, bind_id, pull):
                    assert isinstance(pull, FakePull)
                    pull.enlist(self, sequence_id, bind_id)
                case decode_actions.StopPull():
                    pass

    # SequenceObserver

    def reserved(self, command: decode_pb2.Reserve, seq: Sequence) -> None: ...

    def bound(self, command: decode_pb2.Bind) -> None: ...

    def started(
        self, command: decode_pb2.Start, seq: Sequence, fallback: Fallback | None
    ) -> None: ...

    def ended(self, seq: Sequence, ended: decode_pb2.Ended) -> None: ...

    def _handle(self, command: decode_pb2.DecodeCommand) -> None:
        kind, worker = command.WhichOneof("command"), self.worker
        if kind == "hello":
            self.router = command.hello.router_incarnation
            for other in list(worker.streams):
                if other is not self and other.router == self.router:
                    other.end(None)
            self.sequences = RouterSequences(
                self.router,
                worker.scheduler,
                WorkerLimits(
                    vocab_size=VOCAB,
                    max_model_len=MAX_LEN,
                    block_size=BLOCK_SIZE,
                    local_prefill=True,
                ),
                open_pull=lambda request: FakePull(worker, request),
                unfinished_reads=worker.quarantine.block_ids,
                admit=lambda: None,
                observer=self,
            )
            welcome = decode_pb2.Welcome(incarnation=worker.identity.incarnation)
            self.outbox.put(decode_pb2.DecodeEvent(welcome=welcome))
            return
        assert self.sequences is not None, "the router waits for Welcome"
        match kind:
            case "reserve":
                self.act(self.sequences.reserve(command.reserve))
            case "bind":
                self.act(self.sequences.bind(command.bind))
            case "start":
                self.act(self.sequences.start(command.start))
            case "release":
                self.act(self.sequences.release(command.release.sequence_id))
