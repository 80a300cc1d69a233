"""All workers of this router: who they are, the streams to them, and what placement sees."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from diptych.rpc.identity import Identity
from diptych.rpc.peer_channel import Dialer
from diptych.v1 import worker_pb2
from router.cluster.cache_link import CacheLink
from router.cluster.decode_link import DecodeLink
from router.cluster.longest_sequence import LongestSequence
from router.cluster.member import DecodeMember, Gate, PrefillMember, gate_of
from router.cluster.model_choice import ModelChoice
from router.cluster.overview import Overview, overview
from router.cluster.prefill_backlog import PrefillBacklog
from router.cluster.trace_link import TraceLink
from router.cluster.watch import WorkerWatch
from router.cluster.worker_clock import ClockOffset
from router.config import RouterConfig
from router.discovery.source import Discovery, Targets
from router.placement.place import NOWHERE, Place
from router.placement.policy import Policy
from router.placement.prefill_load import NO_PROMPTS
from router.placement.runway import Runway
from router.placement.second_halves import SecondHalves
from router.placement.views import Snapshot, WorkerId

logger = logging.getLogger(__name__)

Member = PrefillMember | DecodeMember
_UNKNOWN_BLOCK_SIZE = 16
_MOST_BLOCK_SIZE = 4096  # tokens


class Cluster:
    """Owns a watch per worker and a stream per decode worker. Event loop only.

    Knows no request. ``on_change`` is called whenever a placement may have become
    possible: not for load alone. Of a message on Watch that changes nothing else, the
    view of that one worker is all that is made anew, when it is next looked at.
    """

    def __init__(
        self,
        config: RouterConfig,
        policy: Policy,
        *,
        incarnation: str,
        text_digest: str,
        on_change: Callable[[], None],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """``text_digest`` is of the router's own tokenizer and config, ``now_s`` what its spans
        call now.
        """
        self.prefill_backlog = PrefillBacklog(self._backlog_changed)
        self.second_halves = SecondHalves(self._forget_snapshot, on_change)
        self._config = config
        self._dialer = Dialer(config.timers, Identity.of(config.tls))
        self._policy = policy
        self._incarnation = incarnation
        self._model = ModelChoice(text_digest)
        self._on_change = on_change
        self._now_s = now_s
        self._has_prefill_pool = False
        self._wants_prefill_pool = False  # by the source's word
        self._watches: dict[str, WorkerWatch] = {}  # by address, and so are all of these
        self._wishes: dict[str, frozenset[int]] = {}  # roles, until a worker says which it has
        self._told: dict[str, frozenset[int]] = {}  # the roles that a worker said last, lost or not
        self._places: Mapping[str, Place] = {}  # as far as the source knows them
        self._prefill: dict[str, PrefillMember] = {}  # those that have the role, or could
        self._decode: dict[str, DecodeMember] = {}
        self._traces: dict[str, TraceLink] = {}
        self._caches: dict[str, CacheLink] = {}
        self._members_changed = asyncio.Event()
        self._tasks: dict[WorkerWatch | DecodeLink, list[asyncio.Task[None]]] = {}
        self._peers: tuple[WorkerId, ...] = ()  # workers that serve leases, or would
        self._sources: frozenset[WorkerId] = frozenset()  # the same, to look up
        self._block_size = _UNKNOWN_BLOCK_SIZE
        self._max_model_len: int | None = None
        self._longest = LongestSequence()
        self._found = asyncio.Event()
        self._snapshot: Snapshot | None = None

    async def run(self, discovery: Discovery) -> None:
        """Follow ``discovery``, watch and hold streams, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(discovery), name="discovery")
            while True:
                self._members_changed.clear()
                links = (member.link for member in self._decode.values())
                streams: set[WorkerWatch | DecodeLink] = {*self._watches.values(), *links}
                for gone in self._tasks.keys() - streams:
                    for task in self._tasks.pop(gone):
                        task.cancel()
                for stream in streams - self._tasks.keys():
                    self._tasks[stream] = self._start(tasks, stream)
                await self._members_changed.wait()

    def set_members(self, targets: Targets) -> None:
        """Use exactly the workers at these addresses.

        One that is no longer named is left at once: its requests hear that it is lost. Which of
        the two lists names it says only what it is taken for until it tells its roles.
        """
        self._wants_prefill_pool = targets.has_prefill_pool
        wishes = {address: _wish(targets, address) for address in targets.prefill | targets.decode}
        sources = set(self._prefill)
        for address in self._watches.keys() - wishes.keys():
            self._leave(address)
        before, self._wishes, self._places = self._wishes, wishes, targets.places
        for address in sorted(wishes.keys() - self._watches.keys()):
            self._join(address)
        for address, watch in self._watches.items():
            if watch.state is None and before.get(address) != wishes[address]:
                self._told.pop(address, None)  # another will be there
            watch.expect(_certified(wishes[address]))
            self._seat(watch, wishes[address])
        if sources != self._prefill.keys():
            self._find_own_pairs()
        self._members_changed.set()
        self._gates_changed()

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence that both pools can run, as last known; None: nothing is known."""
        return self._max_model_len

    async def wait_found(self) -> None:
        """Wait until ``max_model_len`` is known."""
        await self._found.wait()

    @property
    def is_ready(self) -> bool:
        """Whether there is at least one placement now."""
        snapshot = self.snapshot()
        prefill = {view.worker.incarnation for view in snapshot.prefill}
        if any(view.proven & prefill for view in snapshot.decode):
            return True
        local = {view.worker.incarnation for view in snapshot.decode if view.local_prefill}
        may_be_local = not snapshot.has_prefill_pool or self._config.allow_local_prefill
        return bool(local & prefill) or (may_be_local and not snapshot.has_prefill and bool(local))

    @property
    def may_have_prefill(self) -> bool:
        """Whether there shall be prefill workers, or some worker could be given that role.

        One that is lost could still be, for all that is known.
        """
        able = (m.gate.worker is None or _is_able(m) for m in self._prefill.values())
        return self._has_prefill_pool or any(able)

    @property
    def num_proven_pairs(self) -> int:
        """Pairs of ready workers that may be placed on."""
        snapshot = self.snapshot()
        prefill = {view.worker.incarnation for view in snapshot.prefill}
        return sum(len(view.proven & prefill) for view in snapshot.decode)

    @property
    def model_digest(self) -> str:
        """Of the weights that every worker has that is placed on; empty: none was seen."""
        return self._model.digest

    @property
    def num_ready(self) -> tuple[int, int]:
        """Ready prefill and decode workers."""
        snapshot = self.snapshot()
        return len(snapshot.prefill), len(snapshot.decode)

    def overview(self) -> Overview:
        """What the workers said last, for people."""
        prefill = (member for member in self._prefill.values() if self._is_in_pool(member))
        decode = (member for member in self._decode.values() if self._is_in_pool(member))
        return overview(prefill, decode)

    def prefill_watch(self, worker: WorkerId) -> WorkerWatch | None:
        """The watch of a prefill worker that is still there."""
        watch = self._watches.get(worker.address)
        return watch if watch is not None and watch.worker == worker else None

    def decode_link(self, worker: WorkerId) -> DecodeLink | None:
        """The stream to a decode worker that is still there."""
        member = self._decode.get(worker.address)
        return member.link if member is not None and member.link.worker == worker else None

    def tell_trace(self, worker: WorkerId, hold: int, *, keep: bool) -> None:
        """A trace that the worker may hold spans of is over, or sure to be kept.

        A worker of which nothing is seen hears it when it is seen again.
        """
        link = self._traces.get(worker.address)
        if link is not None:
            link.tell(worker, hold, keep=keep)

    async def finish_traces(self) -> None:
        """Tell workers at once what they were to hear of traces, for 2 s at the most."""
        async with asyncio.TaskGroup() as tasks:
            for address, link in self._traces.items():
                tasks.create_task(link.finish(), name=f"last words {address}")

    def clock_offset(self, worker: WorkerId) -> ClockOffset | None:
        """How the clock of the worker's spans stands; None while it is not known."""
        link = self._trace_of(worker)
        return None if link is None else link.clock_offset

    def clock_offsets(self) -> list[tuple[str, ClockOffset]]:
        """Of each worker whose clock is known, by its address."""
        offsets = ((address, link.clock_offset) for address, link in self._traces.items())
        return [(address, offset) for address, offset in offsets if offset is not None]

    def has_worker(self, worker: WorkerId) -> bool:
        """Whether a Watch tells of this process: while it does, placement may remember of it."""
        return any(member.gate.worker == worker for member in self._members_at(worker.address))

    def block_size(self) -> int:
        """Tokens per block of the workers' caches."""
        return self._block_size

    def snapshot(self) -> Snapshot:
        """What placement may use now; the same object while nothing changed."""
        if self._snapshot is None:
            prefill = (member.view for member in self._prefill.values())
            decode = (member.view for member in self._decode.values())
            found = Snapshot(
                tuple(view for view in prefill if view is not None),
                tuple(view for view in decode if view is not None),
                has_prefill_pool=self._has_prefill_pool,
            )
            self._snapshot = self.second_halves.over(found)
        return self._snapshot

    def _forget_snapshot(self) -> None:
        self._snapshot = None

    # What workers and streams say

    def _elsewhere(self, watch: WorkerWatch, incarnation: str) -> str | None:
        others = (each.worker for each in self._watches.values() if each is not watch)
        found = (each for each in others if each is not None and each.incarnation == incarnation)
        return next((worker.address for worker in found), None)

    def _watched(self, watch: WorkerWatch) -> None:
        if self._watches.get(watch.address) is not watch:  # its last word, after it was left
            return
        before, now = self._members_at(watch.address)[0].gate, gate_of(watch)
        if now.able_roles - before.able_roles and self._seat(watch, now.able_roles):
            self._find_own_pairs()
        members = self._members_at(watch.address)
        for member in members:
            member.gate = now
        if now.worker is not None:
            self._told[watch.address] = now.roles
        if before._replace(pairs_version=0) != now._replace(pairs_version=0):
            self._gate_changed(watch, before)
        own = NO_PROMPTS if now.worker is None else self.prefill_backlog.told(now.worker)
        is_news = False
        for member in members:
            if isinstance(member, PrefillMember):
                member.told(own)
            else:
                member.told()
                is_news |= self._has_new_pairs(member, before)
        self._refresh(watch.address, is_news=is_news)

    def _linked(self, link: DecodeLink) -> None:
        self._refresh(link.watch.address)

    def _backlog_changed(self, worker: WorkerId) -> None:
        member = self._prefill.get(worker.address)
        if member is not None and member.watch.worker == worker:
            member.loaded(self.prefill_backlog.own(worker))
            self._refresh(worker.address)

    def _refresh(self, address: str, *, is_news: bool = False) -> None:
        """See all that the worker is, one beside the other; tell if it takes more."""
        self._snapshot = None
        takes_more = [member.refresh() for member in self._members_at(address)]
        if is_news or any(takes_more):
            self._on_change()

    def _has_new_pairs(self, member: DecodeMember, before: Gate) -> bool:
        version = member.gate.pairs_version
        if version and version == before.pairs_version and member.gate.worker == before.worker:
            return False
        member.read_pairs()
        member.find_own_pairs(self._prefill)
        return member.set_sources(self._sources)

    # What is rare: somebody comes, goes, gets ready, or has another model

    def _gate_changed(self, watch: WorkerWatch, before: Gate) -> None:
        worker = watch.worker
        if before.worker is not None and before.worker != worker:
            self._policy.forget(before.worker)
        self._caches[watch.address].worker_changed()
        decode = self._decode.get(watch.address)
        if decode is not None:
            decode.link.watch_changed()
        if worker != before.worker:
            self._traces[watch.address].worker_changed()
        self._gates_changed()

    def _gates_changed(self) -> None:
        """Who is there, or with what, changed: book and tell what follows from it.

        Always news: where the last prefill worker is lost, a prompt may be computed locally.
        """
        self._snapshot = None
        # Those that could compute prompts, too: their pairs are proven before they do, and are
        # kept while leases of before hold.
        able = [m for m in self._prefill.values() if m.watch.may_have_leases and _is_able(m)]
        self._peers = tuple(sorted(m.gate.worker for m in able if m.gate.worker is not None))
        self._sources = frozenset(self._peers)
        # Those that are lost shall be there, too: what they were counts until it is known better.
        in_pool = (worker_pb2.WORKER_ROLE_PREFILL in roles for roles in self._told.values())
        self._has_prefill_pool = self._wants_prefill_pool or any(in_pool)
        self._model.choose(gate_of(watch) for watch in self._watches.values() if watch.is_ready)
        for member in self._decode.values():
            member.link.set_peers(self._peers)
            member.set_sources(self._sources)
        for each in self._members():
            is_there = each.watch.is_ready and each.role in each.gate.roles
            each.is_placeable = is_there and self._model.may_use(each.gate)
            each.refresh()  # not told: what it published last may be older than our load
        self._book_lengths()
        self._on_change()

    def _book_lengths(self) -> None:
        for member in self._members():
            address, role = member.watch.address, member.role
            if member.is_placeable:
                self._longest.serves(address, role, member.gate.max_model_len)
            elif member.watch.is_ready:
                self._longest.serves_no_more(address, role)
        longest = self._longest.num_tokens
        if longest is not None:
            self._max_model_len = longest
            self._found.set()
        self._choose_block_size()

    def _choose_block_size(self) -> None:
        """That of most workers that may be used; of two equal groups the one in use stays."""
        states = {m.watch: m.watch.state for m in self._members() if m.is_placeable}
        said = (state.layout.block_size for state in states.values() if state is not None)
        sizes = Counter(size for size in said if 1 <= size <= _MOST_BLOCK_SIZE)
        if sizes and sizes[self._block_size] < max(sizes.values()):
            self._block_size = max(sorted(sizes), key=sizes.__getitem__)

    def _join(self, address: str) -> None:
        watch = self._watches[address] = WorkerWatch(
            address,
            _certified(self._wishes[address]),
            router_incarnation=self._incarnation,
            dialer=self._dialer,
            on_change=self._watched,
            elsewhere=self._elsewhere,
        )
        self._traces[address] = TraceLink(watch, self._now_s)
        self._caches[address] = CacheLink(
            watch,
            self._policy.cache,
            router_incarnation=self._incarnation,
            timers=self._config.timers,
        )

    def _seat(self, watch: WorkerWatch, roles: frozenset[int]) -> bool:
        """See that the worker is a member for each of ``roles``; once it is, it stays one.

        True: there is one more whose KV could be pulled.
        """
        address, config = watch.address, self._config
        is_source = address in self._prefill
        if worker_pb2.WORKER_ROLE_PREFILL in roles and not is_source:
            runway = Runway(config.max_pending_prefill_tokens, config.prefill_runway_s)
            self._prefill[address] = PrefillMember(watch, runway)
        if worker_pb2.WORKER_ROLE_DECODE in roles and address not in self._decode:
            self._decode[address] = DecodeMember(self._link(watch))
            self._members_changed.set()
        prefill, decode = self._prefill.get(address), self._decode.get(address)
        if prefill is not None and decode is not None:
            prefill.beside, decode.beside = decode, prefill
        for member in self._members_at(address):
            member.found_at = self._places.get(address, NOWHERE)
        return is_source != (address in self._prefill)

    def _find_own_pairs(self) -> None:
        for sink in self._decode.values():
            sink.find_own_pairs(self._prefill)

    def _leave(self, address: str) -> None:
        logger.info("worker left", extra={"worker": address})
        worker = self._members_at(address)[0].gate.worker
        self._caches[address].close()
        if worker is not None:
            self._policy.forget(worker)
        del self._watches[address], self._traces[address], self._caches[address]
        self._told.pop(address, None)
        self._model.forget(address)
        for member in self._members_at(address):
            self._longest.serves_no_more(address, member.role)
        self._prefill.pop(address, None)
        self._decode.pop(address, None)

    async def _follow(self, discovery: Discovery) -> None:
        async for targets in discovery.targets():
            self.set_members(targets)

    def _trace_of(self, worker: WorkerId) -> TraceLink | None:
        return self._traces[worker.address] if self.has_worker(worker) else None

    def _members(self) -> list[Member]:
        return [*self._decode.values(), *self._prefill.values()]

    def _members_at(self, address: str) -> list[Member]:
        """The worker there, once for each role that it could have."""
        both = (self._prefill.get(address), self._decode.get(address))
        return [member for member in both if member is not None]

    def _is_in_pool(self, member: Member) -> bool:
        """By what it said last; by what its source says until it does."""
        address = member.watch.address
        return member.role in self._told.get(address, self._wishes[address])

    def _link(self, watch: WorkerWatch) -> DecodeLink:
        return DecodeLink(
            watch,
            router_incarnation=self._incarnation,
            timers=self._config.timers,
            on_change=self._linked,
        )

    def _start(
        self, tasks: asyncio.TaskGroup, stream: WorkerWatch | DecodeLink
    ) -> list[asyncio.Task[None]]:
        if isinstance(stream, DecodeLink):
            address = stream.watch.address
            return [tasks.create_task(stream.run(), name=f"decode stream {address}")]
        address = stream.address
        traces, cache = self._traces[address], self._caches[address]
        return [
            tasks.create_task(stream.run(), name=f"watch {address}"),
            tasks.create_task(traces.run(), name=f"traces {address}"),
            tasks.create_task(cache.run(), name=f"cache {address}"),
        ]


def _wish(targets: Targets, address: str) -> frozenset[int]:
    """What a worker is taken for until it says it: by the lists that name it."""
    lists = {
        worker_pb2.WORKER_ROLE_PREFILL: targets.prefill,
        worker_pb2.WORKER_ROLE_DECODE: targets.decode,
    }
    return frozenset(role for role, addresses in lists.items() if address in addresses)


def _certified(wish: frozenset[int]) -> worker_pb2.WorkerRole:
    """The role that its certificate has to name; that of a worker of several names them all."""
    is_decode = worker_pb2.WORKER_ROLE_DECODE in wish
    return worker_pb2.WORKER_ROLE_DECODE if is_decode else worker_pb2.WORKER_ROLE_PREFILL


def _is_able(member: Member) -> bool:
    return member.role in member.gate.able_roles
