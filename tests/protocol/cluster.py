"""A cluster in one thread and virtual time: every next event is a choice of whoever drives it.

Prefill and decode workers and two routers, each a production state machine per request, lease,
pull and sequence. ``check`` is made after every event.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random

from diptych.block_hash import block_keys
from kvtransfer.config import DigestLevel
from kvtransfer.errors import SourceLostError, TransportError
from router.placement.views import WorkerId
from tests.protocol.checks import check_healed, check_now
from tests.protocol.decodes import DecodeWorker
from tests.protocol.fake_model import slots_of
from tests.protocol.invariants import Watch
from tests.protocol.prefills import FetchSide, PrefillWorker
from tests.protocol.pulls import FakePull, FakeRead
from tests.protocol.routers import Question, Request, Router
from tests.protocol.wire import Side, Stream
from tests.protocol.workers import BLOCK_SIZE, Setting, Worker

Event = Callable[[], object]
Process = Worker | Router

EVERYTHING = Watch()
NUM_ROUTERS = 2

_HEALED_S = 120.0
_WEIGHTS = {"land": 1, "watch": 1, "pump": 60}  # reads take long, pumps are due at once
_PAUSES_S = (0.0, 0.0, 0.001, 0.02)


class Cluster:
    """See the module. ``events`` lists what may happen next, without faults."""

    def __init__(
        self, num_workers: int = 2, digest_level: DigestLevel = "full", watch: Watch = EVERYTHING
    ) -> None:
        """``num_workers`` of each role."""
        self.now = 100.0
        self.setting = Setting(lambda: self.now, watch, digest_level)
        self.streams: dict[Stream, tuple[Process, Process | None]] = {}
        self.all_requests: list[Request] = []
        self._numbers = count(1)
        self.slots: dict[bytes, bytes] = {}  # by block key: what the block must hold
        self.prefills = [self._prefill(f"p{i}") for i in range(num_workers)]
        self.decodes = [self._decode(f"d{i}") for i in range(num_workers)]
        for decode in self.decodes:
            self.connect_pairs(decode)
        self.routers = [Router(self, f"r{i}") for i in range(NUM_ROUTERS)]
        for router in self.routers:
            router.watch()

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

    def ask(self, question: Question, router: int = 0) -> Request:
        request = self.routers[router].ask(question)
        self.all_requests.append(request)
        tokens = [*question.prompt, *request.right]
        slots = slots_of(tokens)
        for index, key in enumerate(block_keys(tokens, BLOCK_SIZE)):
            self.slots[key] = b"".join(slots[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
        return request

    def lease_of(self, pull: FakePull) -> Stream | None:
        """The stream that is the lease that is read; None if it has ended."""
        for prefill in self.prefills:
            for grant in prefill.leases.valid_grants:
                if grant.ticket == pull.request.ticket:
                    sides = (s for s in prefill.streams if s.holds(grant.lease))
                    return next((side.stream for side in sides), None)
        return None

    def mix_up_tickets(self) -> bool:
        """A pull that is about to begin gets the ticket of an equally long lease; False: none."""
        for decode in self.decodes:
            reader = decode.identity.incarnation
            for pull in decode.pulls:
                source = self.prefill_at(pull.request.source_address)
                if source is None or pull.has_begun:
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
        for router in self.routers:
            if router.pumps_due:
                found.append(("pump", router.pump))
        found.append(("watch", self.watch))
        return found

    def watch(self) -> None:
        """Restarted workers are found, and their pairs are proven."""
        for router in self.routers:
            router.watch()
        for decode in self.decodes:
            self.connect_pairs(decode)

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefills, *self.decodes]

    def reads(self) -> list[FakeRead]:
        return [read for decode in self.decodes for read in decode.reads]

    def run(self, random: Random, num_events: int, slow: str | tuple[str, ...] = ()) -> None:
        """Let some events happen, each a while after the one before; ``slow`` ones wait."""
        for _ in range(num_events):
            found = [(n, event) for n, event in self.events() if not n.startswith(slow or ())]
            weights = [_WEIGHTS.get(name, 6) for name, _ in found]
            self._happens(*random.choices(found, weights)[0])
            self.pass_time(random.choice(_PAUSES_S))

    def _happens(self, name: str, event: Event) -> None:
        event()
        if name not in ("step", "begin pull"):  # what waits would only be asked again
            self._wake()
        self.check()

    def _wake(self) -> None:
        for worker in self.workers:
            worker.waits = False
        for decode in self.decodes:
            for pull in decode.pulls:
                pull.waits = False

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._wake()
        for worker in self.workers:
            worker.tick()
        for router in self.routers:
            router.tick()
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

    def crash_router(self, index: int, num_kept: int) -> None:
        self._lose_streams(self.routers[index], num_kept)
        self.routers[index].alive = False
        self.routers[index] = Router(self, f"r{next(self._numbers)}")
        self.routers[index].watch()
        self.check()

    def end_read(self, read: FakeRead, *, lost: bool) -> None:
        read.end(SourceLostError("gone") if lost else TransportError("failed"))
        self.check()

    # The end

    def heal(self) -> None:
        """No more faults: everything that can end does, in bounded time."""
        began_s = self.now
        while self.now - began_s < _HEALED_S:
            self._settle()
            for decode in self.decodes:
                self.connect_pairs(decode)
            if all(request.is_over for request in self.requests) and not self.reads():
                break
            self.pass_time(0.25)
        self._settle()
        check_healed(self)

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
        for router in self.routers:
            router.watch()
        if any(way.can_deliver for stream in self.streams for way in (stream.up, stream.down)):
            self._settle()

    def check(self) -> None:
        """Every invariant."""
        for stream in [stream for stream in self.streams if stream.is_over]:
            del self.streams[stream]
        check_now(self)

    # Small change

    def _prefill(self, address: str) -> PrefillWorker:
        identity = WorkerId(address, f"{address}-{next(self._numbers)}")
        return PrefillWorker(identity, self.setting)

    def _decode(self, address: str) -> DecodeWorker:
        identity = WorkerId(address, f"{address}-{next(self._numbers)}")
        reader: list[DecodeWorker] = []
        worker = DecodeWorker(identity, self.setting, lambda pull: self._fetch(reader[0], pull))
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
