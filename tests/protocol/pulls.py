"""Simulated pulls and their reads: the production machines, without tasks."""

from functools import partial
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from diptych.engine.scheduling.sequence import SequenceKey
from diptych.errors import DiptychError
from diptych.rpc.liveness import Liveness
from diptych.v1 import decode_pb2, kv_source_pb2
from kvtransfer.digest import Coverage, block_digest
from kvtransfer.errors import TransportError
from kvtransfer.reader.failures import read_failure, stream_failure
from kvtransfer.reader.lease_pull import FetchSeries
from kvtransfer.reader.pull_clock import PullClock
from kvtransfer.reader.pull_machine import (
    DigestChecks,
    PullError,
    PullMachine,
    PullRequest,
    PullResult,
)
from kvtransfer.reader.quarantine import (
    PullReads,
    ReadRecord,
)
from router.placement.views import WorkerId
from tests.protocol.fake_model import SLOT_BYTES
from tests.protocol.invariants import Invariant
from tests.protocol.prefills import PrefillWorker
from tests.protocol.wire import Stream
from tests.protocol.workers import (
    BLOCK_SIZE,
    TIMERS,
)

if TYPE_CHECKING:
    from tests.protocol.decodes import DecodeSide, DecodeWorker


class FakeRead:
    """One posted read: may write its local blocks until it ends."""

    def __init__(
        self,
        pull: "FakePull",
        source: PrefillWorker,
        source_ids: tuple[int, ...],
        local_ids: tuple[int, ...],
        first_block: int,
        num_bytes: int,
        to_digest: tuple[Coverage, ...],
    ) -> None:
        self.pull = pull
        self.local_ids = local_ids
        self._num_bytes = num_bytes  # of each block
        self._to_digest = to_digest
        self.stuck = False
        self._source = source
        self._source_ids = source_ids
        self._first_block = first_block
        self.reads = pull.reads  # of the fetch that posted it
        self.record: ReadRecord = self.reads.begin(frozenset(local_ids))

    def write(self, damage: str = "") -> None:
        """Bytes arrive; whose, is the fault's choice."""
        for source_id, local_id in zip(self._source_ids, self.local_ids, strict=True):
            data = bytearray(self._source.memory.blocks[source_id][: self._num_bytes])
            local = self.pull.worker.memory.blocks[local_id]
            if damage == "flip":
                data[0] ^= 1
            elif damage == "truncate":
                data[SLOT_BYTES:] = local[SLOT_BYTES : self._num_bytes]
            elif damage == "tear":
                data = bytearray(b"\xaa" * len(data))
            local[: self._num_bytes] = data

    def land(self, damage: str = "") -> None:
        self.write(damage)
        digests = tuple(
            block_digest(bytes(self.pull.worker.memory.blocks[block_id]), coverage)
            for block_id, coverage in zip(self.local_ids, self._to_digest, strict=False)
        )
        self._over()
        self.pull.landed(self, self._first_block, digests)

    def end(self, error: TransportError) -> None:
        self._over()
        self.pull.read_failed(self, error)

    def _over(self) -> None:
        self.pull.worker.reads.remove(self)


class FakePull:
    """A pull without tasks, as kvtransfer.reader.lease_pull and .fetch_driver have it."""

    def __init__(self, worker: "DecodeWorker", request: PullRequest) -> None:
        self.worker = worker
        self.request = request
        self.reads = PullReads(worker.quarantine, "fake")
        self.machine: PullMachine | None = None
        self.waits = False  # for a read of an earlier pull to end
        self._series = FetchSeries()
        self._source: PrefillWorker | None = None
        self._stream: Stream | None = None
        self._side: DecodeSide | None = None
        self._ids = (0, 0)
        self._num_posted = 0
        self._clock = PullClock(TIMERS, worker.clock())
        self._liveness = Liveness(TIMERS, worker.clock())

    @property
    def has_begun(self) -> bool:
        """Its source was asked."""
        return self._stream is not None

    @property
    def is_all_posted(self) -> bool:
        """Whether a read was posted for each of its blocks."""
        return self.machine is not None and self._num_posted == self.machine.num_blocks

    @property
    def can_begin(self) -> bool:
        """Whether it is worth asking the machine."""
        return not self.has_begun and not self.waits

    async def run(self) -> PullResult:
        raise AssertionError("the simulation moves it, not a task")

    def enlist(self, side: "DecodeSide", sequence_id: int, bind_id: int) -> None:
        """The worker steps it from here on."""
        self._side, self._ids = side, (sequence_id, bind_id)
        self.worker.pulls.append(self)

    def abandon(self) -> frozenset[int]:
        """As FetchDriver.abandon; the task that runs it hears no more."""
        if self.machine is not None:
            self.machine.failed()
        if self._stream is not None:
            self._stream.client_closes()
        if self in self.worker.pulls:
            self.worker.pulls.remove(self)
        return self.reads.abandon(self.worker.clock())

    def begin(self) -> None:
        """Ask the source, unless an earlier read may still write our blocks."""
        request = self.request
        self._source = self.worker.connected.get(
            WorkerId(request.source_address, request.source_incarnation)
        )
        if self._source is None:
            self._fail(PullError(decode_pb2.PULL_FAILURE_NOT_CONNECTED, "no connection"))
            return
        if self.machine is None:
            self._series.begin()
            self._clock = PullClock(TIMERS, self.worker.clock())
            self.machine = self._new_machine()
        self.waits = not self.machine.begin(self.worker.quarantine.block_ids)
        if self.waits:
            return
        self._clock.moved(self.worker.clock())
        self._liveness = Liveness(TIMERS, self.worker.clock())
        self._stream = self.worker.open_fetch(self)
        opening = kv_source_pb2.FetchOpen(
            reader_incarnation=self.worker.identity.incarnation,
            source_incarnation=request.source_incarnation,
            ticket=request.ticket,
            first_token=request.first_missing_token,
            transport="fake",
        )
        self._stream.up.put(kv_source_pb2.FetchCommand(open=opening))

    def hears_an_event_again(self) -> None:
        """Its stream repeats one, if it is still heard."""
        if self in self.worker.pulls and self.has_begun:
            self.on_message(kv_source_pb2.FetchEvent(number=1))

    def land_all(self) -> None:
        """What was posted lands, and the source hears what it is asked then."""
        for read in [read for read in self.worker.reads if read.pull is self]:
            read.land()
        while self._stream is not None and self._stream.up.can_deliver:
            self._stream.up.deliver()

    def on_message(self, message: Message) -> None:
        assert isinstance(message, kv_source_pb2.FetchEvent)
        self._liveness.heard()
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
        now = self.worker.clock()
        self._clock.landed(now, now, now)
        try:
            confirm = self.machine.landed(first_block, len(read.local_ids), digests)
        except PullError as error:
            self._fail(error)
            return
        if confirm is not None and self._stream is not None:
            self._stream.up.put(kv_source_pb2.FetchCommand(confirm=confirm))

    def read_failed(self, read: FakeRead, error: TransportError) -> None:
        if read.reads.ended(read.record):
            self._fail(read_failure(error))

    def tick(self) -> None:
        if self.machine is None:
            return
        now = self.worker.clock()
        if self.has_begun and self._liveness.problem(now) is not None:
            self._fail(PullError(decode_pb2.PULL_FAILURE_SOURCE_LOST, "the source is lost"))
            return
        problem = self._clock.problem(now, self.machine, self._liveness.silent_s)
        if problem is not None:
            self._fail(problem)

    def _new_machine(self) -> PullMachine:
        request, level = self.request, self.worker.setting.digest_level
        return PullMachine(
            first_token=request.first_missing_token,
            end_token=request.num_tokens,
            prompt_digest=request.prompt_digest,
            local_block_ids=request.local_block_ids,
            block_size=BLOCK_SIZE,
            num_bytes_of=partial(
                self.worker.memory.needs.num_bytes_of, num_tokens=request.num_tokens
            ),
            checks=DigestChecks.of(level, inline=False, is_probe=False),
        )

    def _fetch_again(self) -> None:
        """An agent ended: the next fetch has a stream, a machine and reads of its own."""
        self.abandon()
        self.machine = self._stream = None
        self._num_posted = 0
        self.reads = PullReads(self.worker.quarantine, "fake")
        self.worker.pulls.append(self)

    def _on_event(self, event: kv_source_pb2.FetchEvent) -> None:
        assert self.machine is not None
        now = self.worker.clock()
        self.machine.numbered(event.number)
        match event.WhichOneof("event"):
            case "opened":
                self.machine.opened(event.opened)
                self._clock.moved(now)
            case "range":
                self._clock.announced(now, idle=not self.machine.num_unlanded_blocks)
                self._post(event.range)
            case "confirmed":
                self.machine.confirmed()
                self._proven()

    def _post(self, announced: kv_source_pb2.Range) -> None:
        assert self.machine is not None
        assert self._source is not None
        for planned in self.machine.announced(announced):
            for index, (source_id, local_id) in enumerate(
                zip(planned.source_block_ids, planned.local_block_ids, strict=True)
            ):
                read = FakeRead(
                    self,
                    self._source,
                    (source_id,),
                    (local_id,),
                    planned.first_block + index,
                    planned.num_bytes,
                    planned.to_digest[index : index + 1],
                )
                self.worker.reads.append(read)
            self._num_posted += len(planned.local_block_ids)

    def _proven(self) -> None:
        assert self._side is not None
        assert self._side.sequences is not None
        self._check_kv(self._side)
        self.abandon()
        stats = decode_pb2.Proven().stats
        self._side.act(self._side.sequences.pull_proven(*self._ids, stats))

    def _check_kv(self, side: "DecodeSide") -> None:
        """What is proven now is right."""
        key, request = SequenceKey(side.router, self._ids[0]), self.request
        (seq,) = {seq for seq, _ in self.worker.scheduler.holders() if seq.key == key}
        tokens = seq.token_ids[: request.num_tokens]
        if not self.worker.memory.holds(seq.block_table, tokens, request.first_missing_token):
            self.worker.setting.watch.broken(Invariant.PROVEN, f"the KV of {key} is wrong")

    def _fail(self, error: PullError) -> None:
        assert self._side is not None
        assert self._side.sequences is not None
        if self._series.loses_pair(error):
            self.worker.connected.pop(
                WorkerId(self.request.source_address, self.request.source_incarnation), None
            )
        if self._series.goes_on_after(error):
            self._fetch_again()
            return
        self.abandon()
        self._side.act(self._side.sequences.pull_failed(*self._ids, error.failure, str(error)))
