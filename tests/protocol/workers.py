"""Simulated workers: the production state machines over a fake memory, without threads or tasks."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from google.protobuf.message import Message

from decode_worker import actions as decode_actions
from decode_worker.outbox import Outbox
from decode_worker.session import Fallback, Session
from decode_worker.stream_resources import UnfinishedReads
from decode_worker.worker_limits import SessionRules
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import SequenceUpdate, StepPlan
from diptych.errors import DiptychError, InvalidRequestError, LeaseExpiredError
from diptych.timers import Timers
from diptych.v1 import decode_pb2, kv_source_pb2, prefill_pb2
from diptych.worker.engine_parts import EngineParts
from kvtransfer.digest import block_digest
from kvtransfer.errors import AgentLostError, TransportError
from kvtransfer.reader.failures import read_failure, stream_failure
from kvtransfer.reader.lease_pull import MAX_FETCHES
from kvtransfer.reader.pull_machine import PullError, PullMachine, PullRequest, PullState
from kvtransfer.reader.quarantine import PullReads, Quarantine, ReadRecord
from kvtransfer.source.fetch_machine import FetchMachine
from kvtransfer.source.lease_record import Lease
from kvtransfer.source.lease_table import LeaseTable
from prefill_worker.lease_session import LeaseSession
from router.placement.types import WorkerId
from tests.protocol.fake_model import SLOT_BYTES, VOCAB, Memory
from tests.protocol.wire import Stream

BLOCK_SIZE = 2
MAX_LEN = 16
NUM_BLOCKS = 10
TIMERS = Timers()
Clock = Callable[[], float]


class Worker:
    """What both roles share: an engine whose steps begin and end at any time."""

    def __init__(self, identity: WorkerId, clock: Clock) -> None:
        self.identity = identity
        self.clock = clock
        self.alive = True
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        config = SchedulerConfig(max_num_seqs=3, max_batched_tokens=4, max_model_len=MAX_LEN)
        self.scheduler = Scheduler(config, self.pool)
        self.memory = Memory(NUM_BLOCKS, BLOCK_SIZE)
        self.plan: StepPlan | None = None
        self.waits = False  # for blocks: no step can be made before something else happens

    @property
    def can_step(self) -> bool:
        return self.plan is not None or (self.scheduler.has_work and not self.waits)

    def step(self) -> None:
        """Begin a step, or end the one in flight."""
        if self.plan is None:
            self.plan = self.scheduler.schedule()
            self.waits = self.plan is None
            if self.plan is not None:
                self.memory.begin(self.plan)
            return
        plan, self.plan = self.plan, None
        self.on_step(self.scheduler.update(plan, self.memory.execute(plan)))

    def on_step(self, updates: list[SequenceUpdate]) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        """Time has passed."""
        raise NotImplementedError


class PrefillWorker(Worker):
    """Leases and the Fetches of their readers."""

    def __init__(self, identity: WorkerId, clock: Clock) -> None:
        super().__init__(identity, clock)
        self.leases = LeaseTable(BLOCK_SIZE, self.pool.generation)
        self.leases.observe(self)
        self.to_digest: deque[tuple[Lease, int]] = deque()
        self.streams: list[LeaseSide] = []
        self.fetches: list[FetchSide] = []

    def on_announced(self, lease: Lease, index: int) -> None:
        self.to_digest.append((lease, index))

    def on_changed(self, lease: Lease) -> None:
        for fetch in self.fetches:
            if fetch.machine.lease is lease:
                fetch.awake = True

    def digest(self) -> None:
        """The transfer thread's turn."""
        lease, index = self.to_digest.popleft()
        digests = tuple(
            block_digest(bytes(self.memory.blocks[block_id]))
            for block_id in lease.ranges[index].block_ids
        )
        self.leases.add_digests(lease, index, digests)

    def on_step(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            for side in list(self.streams):
                side.on_update(update)

    def tick(self) -> None:
        for side in list(self.streams):
            side.tick()


class LeaseSide:
    """The server's side of one Prefill stream, as prefill_worker.servicer has it."""

    def __init__(self, worker: PrefillWorker) -> None:
        self.worker = worker
        self.stream: Stream | None = None
        self.session: LeaseSession | None = None
        self._unbound_since: float | None = None
        worker.streams.append(self)

    def on_message(self, message: Message) -> None:
        assert isinstance(message, prefill_pb2.PrefillCommand)
        try:
            event = self._handle(message)
            if event is not None:
                self._send(event)
        except DiptychError as error:
            self.end(error)

    def on_end(self, error: DiptychError | None) -> None:
        self.end(None)

    def on_update(self, update: SequenceUpdate) -> None:
        if self.session is None:
            return
        event = self.session.step(update, self.worker.clock())
        if event is not None:
            self._send(event)
        if self.session.unbound and self._unbound_since is None:
            self._unbound_since = self.worker.clock()

    def tick(self) -> None:
        since, session = self._unbound_since, self.session
        late = since is not None and self.worker.clock() >= since + TIMERS.unbound_lease_s
        if late and session is not None and session.unbound:
            self.end(LeaseExpiredError("granted to nobody"))

    def end(self, error: DiptychError | None) -> None:
        assert self.stream is not None
        self.stream.server_ends(error)
        if self.session is not None:
            self.session.close()
        self.worker.streams.remove(self)

    def _handle(self, command: prefill_pb2.PrefillCommand) -> prefill_pb2.PrefillEvent | None:
        if command.HasField("start"):
            if self.session is not None:
                raise InvalidRequestError("came twice", field="start")
            self.session = LeaseSession(
                self.worker.scheduler,
                self.worker.leases,
                vocab_size=VOCAB,
                max_model_len=MAX_LEN,
                clock=self.worker.clock,
            )
            event = self.session.start(command.start)
            event.accepted.incarnation = self.worker.identity.incarnation
            return event
        if self.session is None:
            raise InvalidRequestError("came before start", field="grant")
        return self.session.grant(command.grant)

    def _send(self, event: prefill_pb2.PrefillEvent) -> None:
        assert self.stream is not None
        self.stream.down.put(event)


class FetchSide:
    """The server's side of one Fetch, as kvtransfer.source.fetch_session has it."""

    def __init__(self, worker: PrefillWorker) -> None:
        self.worker = worker
        self.stream: Stream | None = None
        self.machine = FetchMachine(
            worker.leases, incarnation=worker.identity.incarnation, transports=("fake",)
        )
        self.awake = False
        self._num_sent = 0
        worker.fetches.append(self)

    def on_message(self, message: Message) -> None:
        assert isinstance(message, kv_source_pb2.FetchCommand)
        try:
            if message.HasField("open"):
                self._send(kv_source_pb2.FetchEvent(opened=self.machine.open(message.open)))
                self.awake = True
            else:
                self.machine.confirm(message.confirm)
                self._send(kv_source_pb2.FetchEvent(confirmed=kv_source_pb2.Confirmed()))
        except DiptychError as error:
            self._end(error)

    def on_end(self, error: DiptychError | None) -> None:
        self._end(None)

    def wake(self) -> None:
        """The tasks that announce and guard get their turn."""
        self.awake = False
        try:
            self.machine.check()
            for ready in self.machine.take_ready():
                announced = kv_source_pb2.Range(
                    first_token=ready.first_token,
                    num_tokens=ready.num_tokens,
                    block_ids=ready.block_ids,
                    generations=ready.generations,
                    digests=ready.digests or (),
                    last=ready.last,
                )
                self._send(kv_source_pb2.FetchEvent(range=announced))
        except DiptychError as error:
            self._end(error)

    def _send(self, event: kv_source_pb2.FetchEvent) -> None:
        assert self.stream is not None
        self._num_sent += 1
        event.number = self._num_sent
        self.stream.down.put(event)

    def _end(self, error: DiptychError | None) -> None:
        assert self.stream is not None
        self.stream.server_ends(error)
        self.worker.fetches.remove(self)


class DecodeWorker(Worker):
    """Sessions of routers, pulls, and the reads that outlive them."""

    def __init__(
        self, identity: WorkerId, clock: Clock, open_fetch: Callable[["FakePull"], Stream]
    ) -> None:
        super().__init__(identity, clock)
        self.open_fetch = open_fetch
        self.connected: dict[WorkerId, PrefillWorker] = {}  # proven pairs
        self.streams: list[DecodeSide] = []
        self.pulls: list[FakePull] = []
        self.reads: list[FakeRead] = []  # posted, of living pulls and dead ones
        parts = SimpleNamespace(pool=self.pool, engine=SimpleNamespace(wake=lambda: None))
        self.unfinished = UnfinishedReads(cast(EngineParts, parts))
        self.quarantine = Quarantine(self.unfinished.begin, self.unfinished.end)

    def on_step(self, updates: list[SequenceUpdate]) -> None:
        for side in list(self.streams):
            if side.session is not None:
                side.act(side.session.step(updates))

    def tick(self) -> None:
        for pull in list(self.pulls):
            pull.tick()

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
        self.session: Session | None = None
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
        if self.session is not None:
            self.session.release_all()
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
                    pull.run(self, sequence_id, bind_id)
                case decode_actions.StopPull():
                    pass

    # SessionObserver

    def reserved(self, command: decode_pb2.Reserve, seq: Sequence) -> None: ...

    def started(self, seq: Sequence, fallback: Fallback | None) -> None: ...

    def ended(self, seq: Sequence, ended: decode_pb2.Ended) -> None: ...

    def _handle(self, command: decode_pb2.DecodeCommand) -> None:
        kind, worker = command.WhichOneof("command"), self.worker
        if kind == "hello":
            self.router = command.hello.router_incarnation
            for other in list(worker.streams):
                if other is not self and other.router == self.router:
                    other.end(None)
            self.session = Session(
                self.router,
                worker.scheduler,
                SessionRules(
                    vocab_size=VOCAB,
                    max_model_len=MAX_LEN,
                    block_size=BLOCK_SIZE,
                    local_prefill=True,
                ),
                open_pull=lambda request: FakePull(worker, request),
                unfinished_reads=worker.unfinished.block_ids,
                admit=lambda: None,
                observer=self,
            )
            welcome = decode_pb2.Welcome(incarnation=worker.identity.incarnation)
            self.outbox.put(decode_pb2.DecodeEvent(welcome=welcome))
            return
        assert self.session is not None, "the router waits for Welcome"
        match kind:
            case "reserve":
                self.act(self.session.reserve(command.reserve))
            case "bind":
                self.act(self.session.bind(command.bind))
            case "start":
                self.act(self.session.start(command.start))
            case "release":
                self.act(self.session.release(command.release.sequence_id))


class FakeRead:
    """One posted read: may write its local blocks until it ends."""

    def __init__(
        self,
        pull: "FakePull",
        source: PrefillWorker,
        source_ids: tuple[int, ...],
        local_ids: tuple[int, ...],
        first_block: int,
    ) -> None:
        self.pull = pull
        self.local_ids = local_ids
        self.stuck = False
        self._source = source
        self._source_ids = source_ids
        self._first_block = first_block
        self.reads = pull.reads  # of the fetch that posted it
        self.record: ReadRecord = self.reads.begin(frozenset(local_ids))

    def write(self, damage: str = "") -> None:
        """Bytes arrive; whose, is the fault's choice."""
        for source_id, local_id in zip(self._source_ids, self.local_ids, strict=True):
            data = bytearray(self._source.memory.blocks[source_id])
            if damage == "flip":
                data[0] ^= 1
            elif damage == "truncate":
                data[SLOT_BYTES:] = self.pull.worker.memory.blocks[local_id][SLOT_BYTES:]
            elif damage == "tear":
                data = bytearray(b"\xaa" * len(data))
            self.pull.worker.memory.blocks[local_id][:] = data

    def land(self, damage: str = "") -> None:
        self.write(damage)
        digests = tuple(
            block_digest(bytes(self.pull.worker.memory.blocks[block_id]))
            for block_id in self.local_ids
        )
        self._over()
        self.pull.landed(self, self._first_block, digests)

    def end(self, error: TransportError) -> None:
        self._over()
        self.pull.read_failed(self, error)

    def _over(self) -> None:
        self.pull.worker.reads.remove(self)


class FakePull:
    """A pull without tasks, as kvtransfer.reader.lease_pull and .reader have it."""

    def __init__(self, worker: DecodeWorker, request: PullRequest) -> None:
        self.worker = worker
        self.request = request
        self.reads = PullReads(worker.quarantine, "nixl")
        self.machine: PullMachine | None = None
        self._source = self._find_source()
        self._num_refetches = 0
        self._stream: Stream | None = None
        self._side: DecodeSide | None = None
        self._ids = (0, 0)
        self._moved_s = worker.clock()

    @property
    def can_begin(self) -> bool:
        return self.machine is None and (
            self._source is None
            or self.worker.quarantine.block_ids.isdisjoint(self.request.local_block_ids)
        )

    def run(self, side: DecodeSide, sequence_id: int, bind_id: int) -> None:
        self._side, self._ids = side, (sequence_id, bind_id)
        self.worker.pulls.append(self)

    def abandon(self) -> frozenset[int]:
        """As Pull.abandon; the task that runs it hears no more."""
        if self.machine is not None:
            self.machine.failed()
        if self._stream is not None:
            self._stream.client_closes()
        if self in self.worker.pulls:
            self.worker.pulls.remove(self)
        return self.reads.abandon(self.worker.clock())

    def _find_source(self) -> PrefillWorker | None:
        request = self.request
        return self.worker.connected.get(
            WorkerId(request.source_address, request.source_incarnation)
        )

    def _fetch_again(self) -> None:
        """An agent ended: the next fetch has a stream, a machine and reads of its own."""
        self._num_refetches += 1
        self.abandon()
        self.machine = self._stream = None
        self.reads = PullReads(self.worker.quarantine, "nixl")
        self._moved_s = self.worker.clock()
        self.worker.pulls.append(self)

    def begin(self) -> None:
        request = self.request
        self._source = self._find_source()
        if self._source is None:
            error = PullError(decode_pb2.PULL_FAILURE_NOT_CONNECTED, "no connection")
            self._fail(error)
            return
        self.machine = PullMachine(
            first_token=request.first_missing_token,
            end_token=request.num_tokens,
            prompt_digest=request.prompt_digest,
            local_block_ids=request.local_block_ids,
            block_size=BLOCK_SIZE,
            block_bytes=BLOCK_SIZE * SLOT_BYTES,
            check_digests=True,
            confirm_digest=True,
        )
        self._moved_s = self.worker.clock()
        self._stream = self.worker.open_fetch(self)
        opening = kv_source_pb2.FetchOpen(
            reader_incarnation=self.worker.identity.incarnation,
            source_incarnation=request.source_incarnation,
            ticket=request.ticket,
            first_token=request.first_missing_token,
            transport="fake",
        )
        self._stream.up.put(kv_source_pb2.FetchCommand(open=opening))

    def on_message(self, message: Message) -> None:
        assert isinstance(message, kv_source_pb2.FetchEvent)
        try:
            self._on_event(message)
        except PullError as error:
            self._fail(error)

    def on_end(self, error: DiptychError | None) -> None:
        if error is None:
            self._fail(PullError(decode_pb2.PULL_FAILURE_SOURCE_LOST, "ended"))
        else:
            self._fail(stream_failure(error))

    def landed(self, read: FakeRead, first_block: int, digests: tuple[bytes, ...]) -> None:
        if not read.reads.ended(read.record):
            return
        assert self.machine is not None
        self._moved_s = self.worker.clock()
        try:
            confirm = self.machine.landed(first_block, len(digests), digests)
        except PullError as error:
            self._fail(error)
            return
        if confirm is not None and self._stream is not None:
            self._stream.up.put(kv_source_pb2.FetchCommand(confirm=confirm))

    def read_failed(self, read: FakeRead, error: TransportError) -> None:
        if read.reads.ended(read.record):
            self._fail(read_failure(error))

    def tick(self) -> None:
        idle_s = self.worker.clock() - self._moved_s
        machine = self.machine
        waits = (
            machine is not None
            and machine.state is PullState.READING
            and not machine.num_unlanded_blocks
        )
        if machine is not None and machine.state is PullState.CONFIRMING:
            if idle_s > TIMERS.confirm_s:
                self._fail(PullError(decode_pb2.PULL_FAILURE_UNPROVEN, "not confirmed"))
        elif idle_s > TIMERS.read_progress_s and not waits:
            self._fail(PullError(decode_pb2.PULL_FAILURE_TRANSPORT, "no progress"))

    def _on_event(self, event: kv_source_pb2.FetchEvent) -> None:
        assert self.machine is not None
        self.machine.numbered(event.number)
        match event.WhichOneof("event"):
            case "opened":
                self.machine.opened(event.opened)
            case "range":
                self._post(event.range)
            case "confirmed":
                self.machine.confirmed()
                self._proven()
        self._moved_s = self.worker.clock()

    def _post(self, announced: kv_source_pb2.Range) -> None:
        assert self.machine is not None
        assert self._source is not None
        planned = self.machine.announced(announced)
        for index, (source_id, local_id) in enumerate(
            zip(planned.source_block_ids, planned.local_block_ids, strict=True),
            planned.first_block,
        ):
            read = FakeRead(self, self._source, (source_id,), (local_id,), index)
            self.worker.reads.append(read)

    def _proven(self) -> None:
        assert self._side is not None
        assert self._side.session is not None
        self.abandon()
        stats = decode_pb2.Proven().stats
        self._side.act(self._side.session.pull_proven(*self._ids, stats))

    def _fail(self, error: PullError) -> None:
        assert self._side is not None
        assert self._side.session is not None
        if error.agent_lost and self._num_refetches < MAX_FETCHES - 1:
            self._fetch_again()
            return
        self.abandon()
        if error.failure == decode_pb2.PULL_FAILURE_SOURCE_LOST:
            self.worker.connected.pop(
                WorkerId(self.request.source_address, self.request.source_incarnation), None
            )
        self._side.act(self._side.session.pull_failed(*self._ids, error.failure, str(error)))
