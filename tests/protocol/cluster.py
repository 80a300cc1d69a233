"""A cluster in one thread and virtual time: every next event is a choice of whoever drives it.

Two prefill and two decode workers and one router, each a production state machine per
request, lease, pull and sequence. ``check`` holds after every event.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random

from diptych.block_hash import block_keys
from diptych.engine.scheduling.block_pool import Owner
from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.errors import DiptychError, InvalidRequestError
from kvtransfer.errors import SourceLostError, TransportError
from router.placement.types import WorkerId
from tests.protocol.fake_model import slots_of
from tests.protocol.routers import Question, Request, Router
from tests.protocol.wire import Side, Stream
from tests.protocol.workers import (
    BLOCK_SIZE,
    DecodeWorker,
    FakePull,
    FakeRead,
    FetchSide,
    PrefillWorker,
    Worker,
)

Event = Callable[[], object]
Process = Worker | Router

_HEALED_S = 120.0
_WEIGHTS = {"land": 1, "watch": 1, "pump": 60}  # reads take long, pumps are due at once
_PAUSES_S = (0.0, 0.0, 0.001, 0.02)


class Cluster:
    """See the module. ``events`` lists what may happen next, without faults."""

    def __init__(self, num_prefills: int = 2, num_decodes: int = 2) -> None:
        self.now = 100.0
        self.streams: dict[Stream, tuple[Process, Process | None]] = {}
        self.all_requests: list[Request] = []
        self._numbers = count(1)
        self._slots: dict[bytes, list[bytes]] = {}  # by block key: what the block must hold
        self.prefills = [self._prefill(f"p{i}") for i in range(num_prefills)]
        self.decodes = [self._decode(f"d{i}") for i in range(num_decodes)]
        for decode in self.decodes:
            self.connect_pairs(decode)
        self.router = Router(self, "r0")
        self.router.watch()

    # Making things

    def new_ticket(self) -> bytes:
        return next(self._numbers).to_bytes(16, "big")

    def connect(
        self, name: str, client: Side, owner: Process, server: Side | None, at: Process | None
    ) -> Stream:
        stream = Stream(name, client, server)
        self.streams[stream] = (owner, at)
        return stream

    def prefill_at(self, address: str) -> PrefillWorker | None:
        return next((w for w in self.prefills if w.identity.address == address), None)

    def connect_pairs(self, decode: DecodeWorker) -> None:
        """Every living source is connected and proven."""
        decode.connected = {worker.identity: worker for worker in self.prefills}

    def ask(self, question: Question) -> Request:
        request = self.router.ask(question)
        self.all_requests.append(request)
        tokens = [*question.prompt, *request.right]
        slots = slots_of(tokens)
        for index, key in enumerate(block_keys(tokens, BLOCK_SIZE)):
            self._slots[key] = slots[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        return request

    def mix_up_tickets(self) -> bool:
        """A pull that is about to begin gets the ticket of an equally long lease; False: none."""
        for decode in self.decodes:
            reader = decode.identity.incarnation
            for pull in decode.pulls:
                source = self.prefill_at(pull.request.source_address)
                if source is None or not pull.can_begin:
                    continue
                for grant in source.leases.valid_grants:
                    is_other = grant.ticket != pull.request.ticket
                    as_long = grant.lease.num_tokens == pull.request.num_tokens
                    if is_other and as_long and grant.reader_incarnation == reader:
                        pull.request = replace(pull.request, ticket=grant.ticket)
                        return True
        return False

    # What may happen without a fault

    def events(self) -> list[tuple[str, Event]]:
        """All that can happen now, in a fixed order."""
        found: list[tuple[str, Event]] = []
        for stream in self.streams:
            ways = (stream.up, stream.down)
            found += [(f"deliver {way.name}", way.deliver) for way in ways if way.can_deliver]
        found += [("step", worker.step) for worker in self.workers if worker.can_step]
        for prefill in self.prefills:
            if prefill.to_digest:
                found.append(("digest", prefill.digest))
            found += [("wake fetch", fetch.wake) for fetch in prefill.fetches if fetch.awake]
        for decode in self.decodes:
            found += [("flush", side.flush) for side in decode.streams if len(side.outbox)]
            found += [("begin pull", pull.begin) for pull in decode.pulls if pull.can_begin]
            found += [("land", read.land) for read in decode.reads if not read.stuck]
        if self.router.room.is_pump_due:
            found.append(("pump", self.router.room.pump))
        found.append(("watch", self.watch))
        return found

    def watch(self) -> None:
        """Restarted workers are found, and their pairs are proven."""
        self.router.watch()
        for decode in self.decodes:
            self.connect_pairs(decode)

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefills, *self.decodes]

    def reads(self) -> list[FakeRead]:
        return [read for decode in self.decodes for read in decode.reads]

    def run(self, random: Random, num_events: int, slow: str = "") -> None:
        """Let some events happen, each a while after the one before; ``slow`` ones wait."""
        for _ in range(num_events):
            found = [(n, event) for n, event in self.events() if not (slow and n.startswith(slow))]
            weights = [_WEIGHTS.get(name, 6) for name, _ in found]
            self._happens(*random.choices(found, weights)[0])
            self.pass_time(random.choice(_PAUSES_S))

    def _happens(self, name: str, event: Event) -> None:
        event()
        if not name.startswith("step"):
            self._wake_engines()
        self.check()

    def _wake_engines(self) -> None:
        for worker in self.workers:
            worker.waits = False

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._wake_engines()
        for worker in self.workers:
            worker.tick()
        self.router.tick()
        self.check()

    # Faults

    def crash_worker(self, worker: Worker, num_kept: int) -> None:
        """SIGKILL and a restart at the same address."""
        worker.alive = False
        self._lose_streams(worker, num_kept)
        address = worker.identity.address
        if isinstance(worker, PrefillWorker):
            self.prefills[self.prefills.index(worker)] = self._prefill(address)
        elif isinstance(worker, DecodeWorker):
            self.decodes[self.decodes.index(worker)] = self._decode(address)
        self.check()

    def crash_router(self, num_kept: int) -> None:
        self._lose_streams(self.router, num_kept)
        self.router.alive = False
        self.router = Router(self, f"r{next(self._numbers)}")
        self.router.watch()
        self.check()

    def end_read(self, read: FakeRead, *, lost: bool) -> None:
        read.end(SourceLostError("gone") if lost else TransportError("failed"))
        self.check()

    # The end

    def heal(self) -> None:
        """No more faults: everything that can end does, in bounded time."""
        began_s = self.now
        for read in self.reads():
            read.stuck = False
        while self.now - began_s < _HEALED_S:
            self._settle()
            for decode in self.decodes:
                self.connect_pairs(decode)
            if all(request.is_over for request in self.requests):
                break
            self.pass_time(0.25)
        self._settle()
        for request in self.requests:
            assert request.is_over, f"a request did not end: {request.machine.state}"
        for stream, (client, server) in self.streams.items():
            is_decode = stream.up.name.startswith("decode")
            assert stream.is_over or is_decode, f"{stream.up.name} is open: {client} {server}"
        for worker in self.workers:
            counts = worker.pool.counts()
            assert counts.free + counts.cached == counts.total, f"a leak: {counts}"

    @property
    def requests(self) -> list[Request]:
        """Those of routers that live."""
        return [request for request in self.all_requests if request.router.alive]

    def _settle(self) -> None:
        for _ in range(5000):
            found = [(name, event) for name, event in self.events() if name != "watch"]
            if not found:
                break
            self._happens(*found[0])
        else:
            raise AssertionError("it never comes to rest")
        self.router.watch()
        if any(way.can_deliver for stream in self.streams for way in (stream.up, stream.down)):
            self._settle()

    # Invariants

    def check(self) -> None:
        """Everything that must hold after any event."""
        self._drop_finished()
        for worker in self.workers:
            self._check_holders(worker)
            self._check_cache(worker)
            self._check_writers(worker)
        for prefill in self.prefills:
            self._check_readable(prefill)
            self._check_lease_owners(prefill)
        for decode in self.decodes:
            self._check_seat_owners(decode)
        for request in self.all_requests:
            self._check_outcome(request)

    def _check_holders(self, worker: Worker) -> None:
        """Every holder of a block is a sequence that names it, and the other way round."""
        held: Counter[tuple[int, Owner]] = Counter()
        for seq, owner in worker.scheduler.holders():
            for block_id in seq.block_table:
                held[block_id, owner] += 1
        quarantined = worker.unfinished.block_ids if isinstance(worker, DecodeWorker) else set()
        for block_id in range(worker.pool.num_blocks):
            expected = {owner: held[block_id, owner] for owner in Owner if held[block_id, owner]}
            found = worker.pool.holders(block_id)
            assert found == expected, f"block {block_id} is held by {found}, not {expected}"
            assert worker.pool.is_quarantined(block_id) == (block_id in quarantined)
        counts = worker.pool.counts()
        assert sum(counts[1:]) == counts.total, f"the gauges do not sum up: {counts}"

    def _check_cache(self, worker: Worker) -> None:
        """A cached block holds what its key says, and nobody writes it."""
        for block_id in range(worker.pool.num_blocks):
            key = worker.pool.key_of(block_id)
            if key is None:
                continue
            assert key in self._slots, "KV of tokens that nobody has is cached"
            found = [worker.memory.slot(block_id, offset) for offset in range(BLOCK_SIZE)]
            assert found == self._slots[key], f"block {block_id} is cached and wrong"

    def _check_writers(self, worker: Worker) -> None:
        """At most one writer per block, and only to one that is held and not shared."""
        writers: Counter[int] = Counter()
        if worker.plan is not None:
            writers.update(set(worker.memory.written_by(worker.plan)))
        if isinstance(worker, DecodeWorker):
            by_pull: dict[FakePull, set[int]] = {}
            for read in worker.reads:
                by_pull.setdefault(read.pull, set()).update(read.local_ids)
            for block_ids in by_pull.values():
                writers.update(block_ids)
        for block_id, num_writers in writers.items():
            assert num_writers == 1, f"block {block_id} of {worker.identity} has two writers"
            holders = worker.pool.holders(block_id)
            is_held = bool(holders) or worker.pool.is_quarantined(block_id)
            assert is_held, f"block {block_id} is free and being written"
            assert sum(holders.values()) <= 1, f"block {block_id} is shared and being written"
            assert worker.pool.key_of(block_id) is None, f"block {block_id} is cached and written"

    def _check_readable(self, worker: PrefillWorker) -> None:
        """What a reader may read is held, complete and as it was announced."""
        written = set() if worker.plan is None else set(worker.memory.written_by(worker.plan))
        for lease in worker.leases.open_leases:
            for announced in lease.ranges:
                for block_id, generation in zip(
                    announced.block_ids, announced.generations, strict=True
                ):
                    assert worker.pool.holders(block_id), f"block {block_id} is readable and free"
                    assert worker.pool.generation(block_id) == generation, "it was reused"
                    assert block_id not in written, f"block {block_id} is announced and written"
        for lease in worker.leases.open_leases:
            readers = [grant for grant in worker.leases.valid_grants if grant.lease is lease]
            assert len(readers) <= 1, "two readers of one lease"

    def _check_lease_owners(self, worker: PrefillWorker) -> None:
        """Each sequence belongs to a stream that is open."""
        owned = {side.session.sequence for side in worker.streams if side.session is not None} - {
            None
        }
        assert _living(worker) == owned, "a sequence without a stream"
        assert len(worker.leases.open_leases) == len(owned)

    def _check_seat_owners(self, worker: DecodeWorker) -> None:
        num_entries = sum(len(s.session) for s in worker.streams if s.session is not None)
        assert len(_living(worker)) == num_entries, "a sequence without a stream"

    def _check_outcome(self, request: Request) -> None:
        assert not isinstance(request.outcome, InvalidRequestError), "a good request is refused"
        if request.outcome is None or isinstance(request.outcome, DiptychError):
            return
        stop_at = request.question.stop_at
        if stop_at is None or len(request.emitted) < stop_at:
            assert request.emitted == request.right, "it finished early"
            assert request.outcome == request.right_reason

    # Small change

    def _prefill(self, address: str) -> PrefillWorker:
        identity = WorkerId(address, f"{address}-{next(self._numbers)}")
        return PrefillWorker(identity, lambda: self.now)

    def _decode(self, address: str) -> DecodeWorker:
        identity = WorkerId(address, f"{address}-{next(self._numbers)}")
        reader: list[DecodeWorker] = []
        worker = DecodeWorker(identity, lambda: self.now, lambda pull: self._fetch(reader[0], pull))
        reader.append(worker)
        return worker

    def _fetch(self, reader: DecodeWorker, pull: FakePull) -> Stream:
        source = self.prefill_at(pull.request.source_address)
        side = None if source is None else FetchSide(source)
        stream = self.connect("fetch", pull, reader, side, source)
        if side is not None:
            side.stream = stream
        return stream

    def _lose_streams(self, process: Process, num_kept: int) -> None:
        for stream, (client, server) in self.streams.items():
            if client is process:
                stream.client_dies(num_kept)
            elif server is process:
                stream.server_dies(num_kept)

    def _drop_finished(self) -> None:
        for stream in [stream for stream in self.streams if stream.is_over]:
            del self.streams[stream]


def _living(worker: Worker) -> set[Sequence]:
    """Sequences that somebody holds; others only wait for the step in flight."""
    return {seq for seq, _ in worker.scheduler.holders() if seq.state is not SequenceState.FINISHED}
