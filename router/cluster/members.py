"""All workers of this router: their watches, the decode streams, and what placement sees."""

import asyncio
import logging
from collections.abc import Callable

from diptych.v1 import worker_pb2
from router.cluster.decode_link import DecodeLink
from router.cluster.watch import WorkerWatch
from router.config import RouterConfig
from router.placement.types import DecodeView, Policy, PrefillView, Snapshot, WorkerId

logger = logging.getLogger(__name__)


class PrefillPool:
    """How many prompt tokens this router has waiting on each prefill worker."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[WorkerId, int]] = {}  # by the lease's sequence id

    def opened(self, sequence_id: int, worker: WorkerId, num_tokens: int) -> None:
        """A lease was asked for."""
        self._pending[sequence_id] = (worker, num_tokens)

    def accepted(self, sequence_id: int, num_cached_tokens: int) -> None:
        """The worker has that much of its prompt in its cache: only the rest is work."""
        if sequence_id in self._pending:
            worker, num_tokens = self._pending[sequence_id]
            self._pending[sequence_id] = (worker, max(0, num_tokens - num_cached_tokens))

    def computed(self, sequence_id: int) -> None:
        """Its prompt is computed, or the lease is gone. Idempotent."""
        self._pending.pop(sequence_id, None)

    def num_pending_tokens(self, worker: WorkerId) -> int:
        """Of this router's prompts on ``worker``."""
        return sum(tokens for owner, tokens in self._pending.values() if owner == worker)


class Cluster:
    """Owns a watch per worker and a stream per decode worker. Event loop only.

    Knows no request. ``on_change`` is called whenever a placement may have become
    possible.
    """

    def __init__(
        self,
        config: RouterConfig,
        policy: Policy,
        *,
        incarnation: str,
        on_change: Callable[[], None],
    ) -> None:
        self.prefill_pool = PrefillPool()
        self._config = config
        self._policy = policy
        self._on_change = on_change
        self._prefill = [
            self._watch(address, worker_pb2.WORKER_ROLE_PREFILL, incarnation)
            for address in config.prefill
        ]
        self._links = [
            DecodeLink(
                self._watch(address, worker_pb2.WORKER_ROLE_DECODE, incarnation),
                router_incarnation=incarnation,
                timers=config.timers,
                on_change=on_change,
            )
            for address in config.decode
        ]
        self._known: dict[str, WorkerId] = {}  # by address
        self._max_model_len: int | None = None
        self._found = asyncio.Event()
        self._odd_models: set[str] = set()

    async def run(self) -> None:
        """Watch and hold streams until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for watch in self._watches():
                tasks.create_task(watch.run(), name=f"watch {watch.address}")
            for link in self._links:
                tasks.create_task(link.run(), name=f"decode stream {link.watch.address}")

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
        may_be_local = not self._config.prefill or (self._config.allow_local_prefill)
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

    def prefill_watch(self, worker: WorkerId) -> WorkerWatch | None:
        """The watch of a prefill worker that is still there."""
        return next((watch for watch in self._prefill if watch.worker == worker), None)

    def decode_link(self, worker: WorkerId) -> DecodeLink | None:
        """The stream to a decode worker that is still there."""
        return next((link for link in self._links if link.worker == worker), None)

    def block_size(self) -> int:
        """Tokens per block of the workers' caches."""
        for watch in self._watches():
            if watch.state is not None and watch.state.layout.block_size:
                return watch.state.layout.block_size
        return 16

    def snapshot(self) -> Snapshot:
        """What placement may use now."""
        digest = self._model_digest()
        prefill = []
        for watch in self._prefill:
            state, worker = watch.state, watch.worker
            if state is None or worker is None or not self._is_placeable(watch, digest):
                continue
            own = self.prefill_pool.num_pending_tokens(worker)
            prefill.append(
                PrefillView(
                    worker=worker,
                    num_pending_tokens=max(own, state.num_pending_prefill_tokens),
                    max_model_len=state.max_model_len,
                    has_runway=own < self._config.max_pending_prefill_tokens,
                )
            )
        sources = {watch.worker for watch in self._prefill}
        decode = []
        for link in self._links:
            state, worker = link.watch.state, link.watch.worker
            if state is None or worker is None or worker != link.worker:
                continue
            if not self._is_placeable(link.watch, digest):
                continue
            decode.append(
                DecodeView(
                    worker=worker,
                    num_sequences=max(link.num_sequences, state.num_running + state.num_waiting),
                    max_model_len=state.max_model_len,
                    local_prefill=state.local_prefill,
                    proven=frozenset(
                        pair.source_incarnation
                        for pair in state.pairs
                        if pair.state == worker_pb2.PAIR_STATE_PROVEN
                        # Another router's address of that worker proves nothing about ours.
                        and WorkerId(pair.source_address, pair.source_incarnation) in sources
                    ),
                )
            )
        return Snapshot(tuple(prefill), tuple(decode))

    def _watch(self, address: str, role: worker_pb2.WorkerRole, incarnation: str) -> WorkerWatch:
        return WorkerWatch(
            address,
            role,
            router_incarnation=incarnation,
            timers=self._config.timers,
            on_change=self._changed,
        )

    def _watches(self) -> list[WorkerWatch]:
        return [*(link.watch for link in self._links), *self._prefill]

    def _changed(self, watch: WorkerWatch) -> None:
        before, now = self._known.get(watch.address), watch.worker
        if before is not None and before != now:
            self._policy.forget(before)
        if now is None:
            self._known.pop(watch.address, None)
        else:
            self._known[watch.address] = now
        peers = [peer.worker for peer in self._prefill if peer.is_serving]
        for link in self._links:
            link.set_peers(peer for peer in peers if peer is not None)
            if link.watch is watch:
                link.watch_changed()
        self._book_lengths()
        self._on_change()

    def _book_lengths(self) -> None:
        decode = [link.watch.state for link in self._links if link.watch.is_ready]
        prefill = [watch.state for watch in self._prefill if watch.is_ready]
        longest = [
            max(state.max_model_len for state in states if state is not None)
            for states in (decode, prefill)
            if states
        ]
        if longest:
            self._max_model_len = min(longest)
            self._found.set()

    def _model_digest(self) -> str | None:
        """Of the first ready worker in configured order: what all others must match."""
        for watch in self._watches():
            if watch.state is not None and watch.is_ready:
                return watch.state.layout.model_digest
        return None

    def _is_placeable(self, watch: WorkerWatch, digest: str | None) -> bool:
        if watch.state is None or not watch.is_ready:
            return False
        if watch.state.layout.model_digest == digest:
            return True
        if watch.state.incarnation not in self._odd_models:
            self._odd_models.add(watch.state.incarnation)
            logger.error("another model than the first worker's", extra={"worker": watch.address})
        return False
