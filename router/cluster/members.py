"""All workers of this router: who they are, the streams to them, and what placement sees."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from diptych.rpc.identity import Identity
from diptych.rpc.peer_channel import Dialer
from diptych.v1 import worker_pb2
from router.cluster.cache_link import CacheLink
from router.cluster.decode_link import DecodeLink
from router.cluster.member import DecodeMember, Gate, PrefillMember, gate_of
from router.cluster.model_choice import ModelChoice
from router.cluster.overview import Overview, overview
from router.cluster.prefill_backlog import PrefillBacklog
from router.cluster.trace_link import TraceLink
from router.cluster.watch import WorkerWatch
from router.cluster.worker_clock import ClockOffset
from router.config import RouterConfig
from router.discovery.source import Discovery, Targets
from router.placement.place import NOWHERE
from router.placement.types import Policy, Snapshot, WorkerId

logger = logging.getLogger(__name__)

Member = PrefillMember | DecodeMember
M = TypeVar("M", PrefillMember, DecodeMember)
_UNKNOWN_BLOCK_SIZE = 16


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
        self._config = config
        self._dialer = Dialer(config.timers, Identity.of(config.tls))
        self._policy = policy
        self._incarnation = incarnation
        self._model = ModelChoice(text_digest)
        self._on_change = on_change
        self._now_s = now_s
        self._has_prefill_pool = False
        self._prefill: dict[str, PrefillMember] = {}  # by address
        self._decode: dict[str, DecodeMember] = {}
        self._traces: dict[Member, TraceLink] = {}
        self._caches: dict[Member, CacheLink] = {}
        self._members_changed = asyncio.Event()
        self._tasks: dict[Member, list[asyncio.Task[None]]] = {}
        self._peers: tuple[WorkerId, ...] = ()  # prefill workers that serve
        self._sources: frozenset[WorkerId] = frozenset()  # the same, to look up
        self._block_size = _UNKNOWN_BLOCK_SIZE
        self._max_model_len: int | None = None
        self._found = asyncio.Event()
        self._snapshot: Snapshot | None = None

    async def run(self, discovery: Discovery) -> None:
        """Follow ``discovery``, watch and hold streams, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(discovery), name="discovery")
            while True:
                self._members_changed.clear()
                members: set[Member] = {*self._prefill.values(), *self._decode.values()}
                for gone in self._tasks.keys() - members:
                    for task in self._tasks.pop(gone):
                        task.cancel()
                for member in members - self._tasks.keys():
                    links = (self._traces[member], self._caches[member])
                    self._tasks[member] = _start(tasks, member, *links)
                await self._members_changed.wait()

    def set_members(self, targets: Targets) -> None:
        """Use exactly the workers at these addresses.

        One that is no longer named is left at once: its requests hear that it is lost.
        """
        prefill, decode = targets.prefill, targets.decode
        has_other_sources = prefill != self._prefill.keys()
        self._has_prefill_pool = targets.has_prefill_pool
        for address in self._prefill.keys() - prefill:
            self._leave(self._prefill.pop(address))
        for address in self._decode.keys() - decode:
            self._leave(self._decode.pop(address))
        for address in sorted(prefill - self._prefill.keys()):
            watch = self._watch(address, worker_pb2.WORKER_ROLE_PREFILL)
            most = self._config.max_pending_prefill_tokens
            self._join(self._prefill, PrefillMember(watch, max_pending_tokens=most))
        for address in sorted(decode - self._decode.keys()):
            self._join(self._decode, DecodeMember(self._link(address)))
        for member in self._members():
            member.found_at = targets.places.get(member.watch.address, NOWHERE)
        if has_other_sources:
            for sink in self._decode.values():
                sink.find_own_pairs(self._prefill)
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
        may_be_local = not snapshot.has_prefill_pool or self._config.allow_local_prefill
        return may_be_local and not prefill and any(v.local_prefill for v in snapshot.decode)

    @property
    def num_proven_pairs(self) -> int:
        """Pairs of ready workers that may be placed on."""
        snapshot = self.snapshot()
        prefill = {view.worker.incarnation for view in snapshot.prefill}
        return sum(len(view.proven & prefill) for view in snapshot.decode)

    @property
    def num_ready(self) -> tuple[int, int]:
        """Ready prefill and decode workers."""
        snapshot = self.snapshot()
        return len(snapshot.prefill), len(snapshot.decode)

    def overview(self) -> Overview:
        """What the workers said last, for people."""
        return overview(self._prefill.values(), self._decode.values())

    def prefill_watch(self, worker: WorkerId) -> WorkerWatch | None:
        """The watch of a prefill worker that is still there."""
        member = self._prefill.get(worker.address)
        return member.watch if member is not None and member.watch.worker == worker else None

    def decode_link(self, worker: WorkerId) -> DecodeLink | None:
        """The stream to a decode worker that is still there."""
        member = self._decode.get(worker.address)
        return member.link if member is not None and member.link.worker == worker else None

    def tell_trace(self, worker: WorkerId, hold: int, *, keep: bool) -> None:
        """A trace that the worker may hold spans of is over; nothing if the worker is gone."""
        for link in self._traces_of(worker):
            link.tell(hold, keep=keep)

    def clock_offset(self, worker: WorkerId) -> ClockOffset | None:
        """How the clock of the worker's spans stands; None while it is not known."""
        return next((link.clock_offset for link in self._traces_of(worker)), None)

    def clock_offsets(self) -> list[tuple[str, ClockOffset]]:
        """Of each worker whose clock is known, by its address."""
        links = {member.watch.address: link for member, link in self._traces.items()}
        offsets = ((address, link.clock_offset) for address, link in links.items())
        return [(address, offset) for address, offset in offsets if offset is not None]

    def has_worker(self, worker: WorkerId) -> bool:
        """Whether a Watch tells of this process: while it does, placement may remember of it."""
        members = (self._prefill.get(worker.address), self._decode.get(worker.address))
        return any(member is not None and member.gate.worker == worker for member in members)

    def block_size(self) -> int:
        """Tokens per block of the workers' caches."""
        return self._block_size

    def snapshot(self) -> Snapshot:
        """What placement may use now; the same object while nothing changed."""
        if self._snapshot is None:
            prefill = (member.view for member in self._prefill.values())
            decode = (member.view for member in self._decode.values())
            self._snapshot = Snapshot(
                tuple(view for view in prefill if view is not None),
                tuple(view for view in decode if view is not None),
                has_prefill_pool=self._has_prefill_pool,
            )
        return self._snapshot

    # What workers and streams say

    def _watched(self, watch: WorkerWatch) -> None:
        member = self._member(watch)
        if member is None:  # its last word, after it was left
            return
        before, now = member.gate, gate_of(watch)
        member.gate = now
        if before._replace(pairs_version=0) != now._replace(pairs_version=0):
            self._gate_changed(member, before)
        if isinstance(member, PrefillMember) and now.worker is not None:
            self.prefill_backlog.told(now.worker)
        is_news = member.told()
        if isinstance(member, DecodeMember) and self._has_new_pairs(member, before):
            is_news = True
        self._snapshot = None
        if is_news:
            self._on_change()

    def _linked(self, link: DecodeLink) -> None:
        self._snapshot = None
        member = self._decode.get(link.watch.address)
        if member is not None and member.loaded():
            self._on_change()

    def _backlog_changed(self, worker: WorkerId) -> None:
        self._snapshot = None
        member = self._prefill.get(worker.address)
        if member is not None and member.watch.worker == worker:
            own = self.prefill_backlog.num_pending_tokens(worker)
            if member.loaded(own, self.prefill_backlog.num_sent_tokens(worker)):
                self._on_change()

    def _has_new_pairs(self, member: DecodeMember, before: Gate) -> bool:
        version = member.gate.pairs_version
        if version and version == before.pairs_version and member.gate.worker == before.worker:
            return False
        member.read_pairs()
        member.find_own_pairs(self._prefill)
        return member.set_sources(self._sources)

    # What is rare: somebody comes, goes, gets ready, or has another model

    def _gate_changed(self, member: Member, before: Gate) -> None:
        worker = member.gate.worker
        if before.worker is not None and before.worker != worker:
            self._policy.forget(before.worker)
        self._caches[member].worker_changed()
        if isinstance(member, DecodeMember):
            member.link.watch_changed()
        if worker != before.worker:
            self._traces[member].worker_changed()
        self._gates_changed()

    def _gates_changed(self) -> None:
        """Who is there, or with what, changed: book and tell what follows from it.

        Always news: where the last prefill worker is lost, a prompt may be computed locally.
        """
        self._snapshot = None
        peers = [m.watch.worker for m in self._prefill.values() if m.watch.is_serving]
        self._peers = tuple(sorted(peer for peer in peers if peer is not None))
        self._sources = frozenset(self._peers)
        self._model.choose(m.gate for m in self._members() if m.watch.is_ready)
        for member in self._decode.values():
            member.link.set_peers(self._peers)
            member.set_sources(self._sources)
        for each in self._members():
            each.is_placeable = each.watch.is_ready and self._model.may_use(each.gate)
            each.refresh()  # not told: what it published last may be older than our load
        self._book_lengths()
        self._on_change()

    def _book_lengths(self) -> None:
        pools: tuple[Iterable[Member], ...] = (self._decode.values(), self._prefill.values())
        longest = []
        for pool in pools:
            lengths = [member.gate.max_model_len for member in pool if member.is_placeable]
            if lengths:
                longest.append(max(lengths))
        if longest:
            self._max_model_len = min(longest)
            self._found.set()
        for member in self._members():
            state = member.watch.state
            if member.is_placeable and state is not None and state.layout.block_size:
                self._block_size = state.layout.block_size
                break

    def _join(self, pool: dict[str, M], member: M) -> None:
        pool[member.watch.address] = member
        self._traces[member] = TraceLink(member.watch, self._now_s)
        self._caches[member] = CacheLink(
            member.watch,
            self._policy.cache,
            router_incarnation=self._incarnation,
            timers=self._config.timers,
        )

    def _leave(self, member: Member) -> None:
        logger.info("worker left", extra={"worker": member.watch.address})
        del self._traces[member], self._caches[member]
        if member.gate.worker is not None:
            self._policy.forget(member.gate.worker)

    async def _follow(self, discovery: Discovery) -> None:
        async for targets in discovery.targets():
            self.set_members(targets)

    def _traces_of(self, worker: WorkerId) -> list[TraceLink]:
        pools: tuple[dict[str, PrefillMember] | dict[str, DecodeMember], ...]
        pools = (self._prefill, self._decode)
        members = [pool.get(worker.address) for pool in pools]
        return [self._traces[m] for m in members if m is not None and m.gate.worker == worker]

    def _members(self) -> list[Member]:
        return [*self._decode.values(), *self._prefill.values()]

    def _member(self, watch: WorkerWatch) -> Member | None:
        member = self._prefill.get(watch.address)
        if member is not None and member.watch is watch:
            return member
        other = self._decode.get(watch.address)
        return other if other is not None and other.watch is watch else None

    def _watch(self, address: str, role: worker_pb2.WorkerRole) -> WorkerWatch:
        return WorkerWatch(
            address,
            role,
            router_incarnation=self._incarnation,
            dialer=self._dialer,
            on_change=self._watched,
        )

    def _link(self, address: str) -> DecodeLink:
        return DecodeLink(
            self._watch(address, worker_pb2.WORKER_ROLE_DECODE),
            router_incarnation=self._incarnation,
            timers=self._config.timers,
            on_change=self._linked,
        )


def _start(
    tasks: asyncio.TaskGroup, member: Member, traces: TraceLink, cache: CacheLink
) -> list[asyncio.Task[None]]:
    address = member.watch.address
    started = [
        tasks.create_task(member.watch.run(), name=f"watch {address}"),
        tasks.create_task(traces.run(), name=f"traces {address}"),
        tasks.create_task(cache.run(), name=f"cache {address}"),
    ]
    if isinstance(member, DecodeMember):
        started.append(tasks.create_task(member.link.run(), name=f"decode stream {address}"))
    return started
