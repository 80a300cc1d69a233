"""The sources this worker can pull from: connected, compared, proven, measured."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Set
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol

from diptych.rpc.peer_channel import Dialer
from diptych.v1 import kv_source_pb2, worker_pb2
from kvtransfer.config import PROBES_AT_ONCE
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.memory import ScratchBlocks
from kvtransfer.reader.fetch_driver import FetchDriver, FetchPlan
from kvtransfer.reader.lease_pull import LeasePull
from kvtransfer.reader.pair import PeerKey, SourcePair
from kvtransfer.reader.proof import ProbeKit
from kvtransfer.reader.proven_link import Link
from kvtransfer.reader.pull_machine import PullRequest
from kvtransfer.reader.quarantine import Quarantine, ReapLimits, stuck_reads

__all__ = ["PairTable", "PeerKey"]

logger = logging.getLogger(__name__)

_REAP_INTERVAL_S = 0.5
MAX_PAIRS = 1024  # each is a connection, and a peer of each transport's agent
_GRACE_S = 1.0  # that unfinished reads have, however many blocks they hold


@dataclass(slots=True)
class ReaderCounters:
    """What pairs went through since the worker started, for its metrics. Event loop only."""

    num_pairs_failed: Counter[str] = field(default_factory=Counter)  # by error reason
    num_refetches: int = 0  # under the same ticket, after a transport agent ended
    num_agent_teardowns: int = 0
    num_transport_fallbacks: int = 0


class LinkInterceptor(Protocol):
    """What may stand between pulls and their links; in service nothing does. Event loop only."""

    def link(self, link: Link, num_tokens: int) -> Link:
        """What the pull of a sequence of ``num_tokens`` uses in the place of ``link``."""
        ...

    def tear_down(self, transport: str) -> None:
        """The agent of this transport was replaced: every read over it has to end."""
        ...


class PairTable:
    """One entry per source process that any router named. Event loop only.

    ``on_change()`` after ``pairs()`` changed. ``on_quarantine(block_ids)`` when a
    pull ended with reads unfinished; ``on_quarantine_end(block_ids)`` when those
    reads (each block once, in any partition) can no longer write.
    """

    def __init__(
        self,
        endpoint: TransferEndpoint,
        *,
        scratch: ScratchBlocks,
        dialer: Dialer,
        on_change: Callable[[], None],
        on_quarantine: Callable[[frozenset[int]], None],
        on_quarantine_end: Callable[[frozenset[int]], None],
        interceptor: LinkInterceptor | None = None,
    ) -> None:
        self.counters = ReaderCounters()
        self._endpoint = endpoint
        self._timers = dialer.timers
        self._interceptor = interceptor
        self._on_change = on_change
        self._quarantine = Quarantine(on_quarantine, on_quarantine_end)
        scratch_quarantine = Quarantine(lambda _: None, lambda ids: scratch.free(sorted(ids)))
        self._kit = ProbeKit(
            endpoint,
            scratch,
            scratch_quarantine,
            dialer,
            asyncio.Semaphore(PROBES_AT_ONCE),
            Random(),
        )
        self._peers: dict[Hashable, frozenset[PeerKey]] = {}
        self._left: dict[Hashable, float] = {}  # owners that are gone, and until when they count
        self._pairs: dict[PeerKey, SourcePair] = {}
        self._tasks: dict[SourcePair, asyncio.Task[None]] = {}
        self._ending: set[str] = set()  # transports whose agent is torn down
        self._peers_changed = asyncio.Event()
        endpoint.on_change = self._transport_changed

    async def run(self) -> None:
        """Keep all pairs connected and proven until cancelled. Run it in a task group."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reap(tasks), name="kv-quarantine")
            try:
                while True:
                    self._peers_changed.clear()
                    # By pair, not key: a source that left and came back is another entry.
                    pairs = set(self._pairs.values())
                    for pair in self._tasks.keys() - pairs:
                        self._tasks.pop(pair).cancel()
                    for pair in pairs - self._tasks.keys():
                        name = f"kv-pair {pair.key.address}"
                        self._tasks[pair] = tasks.create_task(pair.keep(), name=name)
                    await self._peers_changed.wait()
            finally:
                self._tasks.clear()

    def set_peers(self, owner: Hashable, peers: Iterable[PeerKey]) -> None:
        """Replace the sources that ``owner`` (a router's stream) knows.

        This process itself, which may be a source too, is none of its own.
        """
        own = self._endpoint.incarnation
        self._peers[owner] = frozenset(PeerKey(*peer) for peer in peers if peer.incarnation != own)
        if not self._peers[owner]:
            del self._peers[owner]
        wanted = frozenset[PeerKey]().union(*self._peers.values())
        gone = self._pairs.keys() - wanted
        for key in gone:
            self._pairs.pop(key).leave()
        for key in self._new(wanted):
            self._pairs[key] = SourcePair(
                key, self._kit, self._on_change, self._fell_back, self._pair_failed
            )
        self._peers_changed.set()
        self._on_change()

    def leave(self, owner: Hashable) -> None:
        """``owner`` is gone; what it knew is kept for ``lost_peer_s``.

        A router that only lost its connection names the same sources again: their pairs are still
        proven then, and what pulls over them cost is still known.
        """
        self._left[owner] = time.monotonic() + self._timers.lost_peer_s

    def _forget_left(self, now: float) -> None:
        for owner in [owner for owner, until_s in self._left.items() if until_s <= now]:
            del self._left[owner]
            self.set_peers(owner, ())

    def _new(self, wanted: frozenset[PeerKey]) -> list[PeerKey]:
        """Sources to connect to, as many as there may be: a router can name any number."""
        new = sorted(wanted - self._pairs.keys())
        room = MAX_PAIRS - len(self._pairs)
        if len(new) > room:
            logger.error("too many sources named", extra={"num_left_out": len(new) - room})
        return new[:room]

    @property
    def quarantined_block_ids(self) -> Set[int]:
        """Blocks of the pool that reads without a pull may still write; a live view."""
        return self._quarantine.block_ids

    @property
    def num_quarantined_blocks_ever(self) -> int:
        """As above, since the start; a block counts each time anew."""
        return self._quarantine.num_blocks_ever

    @property
    def num_open_reads(self) -> int:
        """Reads that may still write local blocks, probes' included."""
        return self._quarantine.num_open_reads + self._kit.quarantine.num_open_reads

    @property
    def oldest_quarantined_s(self) -> float:
        """Age of the oldest read that no pull waits for, s; 0 without one."""
        now = time.monotonic()
        return max(self._quarantine.oldest_s(now), self._kit.quarantine.oldest_s(now))

    def pairs(self) -> list[worker_pb2.Pair]:
        """The state of every pair, for Watch."""
        return [pair.to_proto() for _, pair in sorted(self._pairs.items())]

    def open_pull(self, request: PullRequest) -> LeasePull:
        """Prepare a pull; ``await pull.run()`` performs it. Raises nothing."""
        return LeasePull(
            self._pairs.get(PeerKey(request.source_address, request.source_incarnation)),
            partial(self._open_fetch, request),
            source_address=request.source_address,
            wait_s=self._timers.read_progress_s,
            on_refetch=self._refetched,
        )

    def _open_fetch(self, request: PullRequest, link: Link) -> FetchDriver:
        if self._interceptor is not None:
            link = self._interceptor.link(link, request.num_tokens)
        plan = FetchPlan(
            open=kv_source_pb2.FetchOpen(
                reader_incarnation=self._endpoint.incarnation,
                source_incarnation=request.source_incarnation,
                ticket=request.ticket,
                first_token=request.first_missing_token,
                transport=link.transport,
            ),
            end_token=request.num_tokens,
            prompt_digest=request.prompt_digest,
            local_block_ids=request.local_block_ids,
        )
        return FetchDriver(plan, link, self._endpoint, self._quarantine, self._timers)

    async def _reap(self, tasks: asyncio.TaskGroup) -> None:
        """Tear an agent down when a read over it never ends; its pairs prove themselves again.

        Forget what routers knew that left a while ago.
        Raises UndeadAgentError: one cannot be, so the process has to end.
        """
        while True:
            await asyncio.sleep(_REAP_INTERVAL_S)
            self._endpoint.check_agents()
            self._forget_left(time.monotonic())
            for transport, block_ids in self._stuck(time.monotonic()).items():
                if transport in self._ending:  # its process may take long to go
                    continue
                logger.error(
                    "agent torn down to end reads",
                    extra={"transport": transport, "num_blocks": len(block_ids)},
                )
                self.counters.num_agent_teardowns += 1
                self._ending.add(transport)
                tasks.create_task(self._tear_down(transport), name=f"kv-teardown {transport}")

    async def _tear_down(self, transport: str) -> None:
        try:
            await self._endpoint.rebuild(transport)
        finally:
            self._ending.discard(transport)
        if self._interceptor is not None:
            self._interceptor.tear_down(transport)

    def _stuck(self, now: float) -> dict[str, set[int]]:
        """By transport: the blocks of reads for which its agent has to end."""
        config = self._endpoint.config
        most = config.quarantine_max_ratio * self._endpoint.memory.num_blocks
        limits = ReapLimits(config.quarantine_max_s, _GRACE_S, most)
        return stuck_reads((self._quarantine, self._kit.quarantine), now, limits)

    def _transport_changed(self) -> None:
        """An agent ended, or is there again: its pairs have to be proven again."""
        for pair in self._pairs.values():
            link = pair.link
            if link is not None and not link.peer.usable:
                pair.lost("the transport agent ended")

    def _pair_failed(self, reason: str) -> None:
        self.counters.num_pairs_failed[reason] += 1

    def _fell_back(self) -> None:
        self.counters.num_transport_fallbacks += 1

    def _refetched(self) -> None:
        self.counters.num_refetches += 1
