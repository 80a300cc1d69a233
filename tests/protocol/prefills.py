"""Simulated prefill workers: leases, and the fetches of their readers."""

from collections import deque

from google.protobuf.message import Message

from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import DiptychError, InvalidRequestError, LeaseExpiredError
from diptych.v1 import common_pb2, kv_source_pb2, prefill_pb2
from kvtransfer.digest import Coverage, block_digest
from kvtransfer.source.fetch_machine import FetchMachine
from kvtransfer.source.lease_record import Lease
from kvtransfer.source.lease_table import LeaseTable
from prefill_worker.lease_session import LeaseSession
from router.placement.views import WorkerId
from tests.protocol.fake_model import VOCAB
from tests.protocol.wire import Stream
from tests.protocol.workers import (
    BLOCK_SIZE,
    MAX_LEN,
    TIMERS,
    Setting,
    Worker,
)

SAMPLE_SEED = 7  # the model's blocks are smaller than a stratum: a sample is all of them


class PrefillWorker(Worker):
    """Leases and the Fetches of their readers."""

    def __init__(self, identity: WorkerId, setting: Setting) -> None:
        super().__init__(identity, setting)
        self.leases = LeaseTable(BLOCK_SIZE, self.pool.generation)
        self.leases.observe(self._on_announced)
        self.to_digest: deque[tuple[Lease, int]] = deque()
        self.streams: list[LeaseSide] = []
        self.fetches: list[FetchSide] = []

    def _on_announced(self, lease: Lease, index: int) -> None:
        if self.setting.digest_level == "off":
            self.leases.add_digests(lease, index, ())
        else:
            self.to_digest.append((lease, index))

    def digest(self) -> None:
        """The transfer thread's turn."""
        lease, index = self.to_digest.popleft()
        announced = lease.ranges[index]
        seed = SAMPLE_SEED if self.setting.digest_level == "sampled" else 0
        first_place = announced.first_token // BLOCK_SIZE
        needs, num_tokens = self.memory.needs, lease.num_tokens
        digests = tuple(
            block_digest(
                bytes(self.memory.blocks[block_id]),
                Coverage(seed, place, needs.num_bytes_of(place, num_tokens)),
            )
            for place, block_id in enumerate(announced.block_ids, first_place)
        )
        self.leases.add_digests(lease, index, digests, seed)

    def on_step(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            for side in list(self.streams):
                side.on_update(update)

    def tick(self) -> None:
        for side in list(self.streams):
            side.tick()
        for fetch in self.fetches:
            fetch.tick()


class LeaseSide:
    """The server's side of one Prefill stream, as prefill_worker.stream has it."""

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
        told = self.session.report(update)
        if told is not None:
            self._send(told)
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

    def holds(self, lease: Lease) -> bool:
        """Whether this stream is that lease."""
        sequence = None if self.session is None else self.session.sequence
        return sequence is not None and sequence.key == lease.lease_id

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
            worker.leases,
            incarnation=worker.identity.incarnation,
            transports=("fake",),
            on_change=self._note,
        )
        self.awake = False
        self._num_sent = 0
        self._beat_at_s = worker.clock()
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

    def tick(self) -> None:
        """A heartbeat is due, unless the reader has others to hear."""
        assert self.stream is not None
        now = self.worker.clock()
        if now - self._beat_at_s >= TIMERS.heartbeat_s and not self.stream.down.queue:
            self._beat_at_s = now
            self._send(kv_source_pb2.FetchEvent(heartbeat=common_pb2.Heartbeat()))

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
                    sample_seed=ready.sample_seed,
                )
                self._send(kv_source_pb2.FetchEvent(range=announced))
        except DiptychError as error:
            self._end(error)

    def _note(self) -> None:
        self.awake = True

    def _send(self, event: kv_source_pb2.FetchEvent) -> None:
        assert self.stream is not None
        self._num_sent += 1
        event.number = self._num_sent
        self.stream.down.put(event)

    def _end(self, error: DiptychError | None) -> None:
        assert self.stream is not None
        self.stream.server_ends(error)
        self.worker.fetches.remove(self)
        self.machine.close()
