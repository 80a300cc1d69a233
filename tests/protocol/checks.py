"""The invariants, as they are looked at in a whole cluster."""

from collections import Counter
from typing import TYPE_CHECKING

from diptych.engine.scheduling.block_pool import Owner
from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.errors import DiptychError, InvalidRequestError
from tests.protocol.decodes import DecodeWorker
from tests.protocol.invariants import Invariant
from tests.protocol.prefills import PrefillWorker
from tests.protocol.pulls import FakePull
from tests.protocol.routers import Request
from tests.protocol.workers import Worker

if TYPE_CHECKING:
    from tests.protocol.cluster import Cluster


def check_now(cluster: "Cluster") -> None:
    """What must hold after any event, of what is watched."""
    watches = cluster.setting.watch.watches
    if watches(Invariant.HOLDERS):
        for worker in cluster.workers:
            _check_holders(worker)
        for prefill in cluster.prefills:
            _check_lease_owners(prefill)
        for decode in cluster.decodes:
            _check_reservation_owners(decode)
    if watches(Invariant.CACHED):
        for worker in cluster.workers:
            _check_cached(worker, cluster.slots)
    if watches(Invariant.WRITERS):
        for worker in cluster.workers:
            _check_writers(worker)
    if watches(Invariant.READABLE):
        for prefill in cluster.prefills:
            _check_readable(prefill)
    if watches(Invariant.OUTCOME):
        for request in cluster.all_requests:
            _check_outcome(cluster, request)


def check_healed(cluster: "Cluster") -> None:
    """What must hold when faults have stopped, and long enough ago."""
    watch = cluster.setting.watch
    for request in cluster.requests:
        if not request.is_over:
            watch.broken(Invariant.ENDS, f"a request is {request.machine.state}")
    for stream, (client, server) in cluster.streams.items():
        if not stream.is_over and not stream.up.name.startswith("decode"):
            watch.broken(Invariant.ENDS, f"{stream.up.name} is open: {client} {server}")
    for worker in cluster.workers:
        counts = worker.pool.counts()
        if counts.free + counts.cached != counts.total:
            watch.broken(Invariant.RECLAIMED, f"{worker.identity}: {counts}")


def _check_holders(worker: Worker) -> None:
    """Every holder of a block is a sequence that names it, and the other way round."""
    pool, watch = worker.pool, worker.setting.watch
    held: dict[int, dict[Owner, int]] = {}
    for seq, owner in worker.scheduler.holders():
        for block_id in seq.block_table:
            owners = held.get(block_id)
            if owners is None:
                held[block_id] = {owner: 1}
            else:
                owners[owner] = owners.get(owner, 0) + 1
    for block_id, owners in held.items():
        if pool.holders(block_id) != owners:
            what = f"block {block_id} is held by {pool.holders(block_id)}, not {owners}"
            watch.broken(Invariant.HOLDERS, what)
    counts = pool.counts()
    if sum(counts[1:]) != counts.total:
        watch.broken(Invariant.HOLDERS, f"the gauges do not sum up: {counts}")
    quarantined = pool.quarantined
    num_only_so = sum(block_id not in held for block_id in quarantined)
    if counts.total - counts.free - counts.cached != len(held) + num_only_so:
        watch.broken(Invariant.HOLDERS, f"sequences hold {len(held)} blocks of {counts}")
    if counts.quarantined != len(quarantined):
        watch.broken(Invariant.HOLDERS, f"blocks {quarantined} are quarantined of {counts}")


def _check_cached(worker: Worker, slots: dict[bytes, bytes]) -> None:
    """A cached block holds what its key says, in the groups of layers that it is said to hold."""
    pool, blocks = worker.pool, worker.memory.blocks
    for block_id, key in pool.cached.items():
        in_each_group = slots.get(key)
        num_groups = pool.num_groups_of(block_id)  # the first ones
        if in_each_group is None or not blocks[block_id].startswith(in_each_group * num_groups):
            what = f"block {block_id} holds something else"
            worker.setting.watch.broken(Invariant.CACHED, what)


def _check_writers(worker: Worker) -> None:
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
        problem = _problem_of_written(worker, block_id, num_writers)
        if problem:
            what = f"block {block_id} of {worker.identity} is being written and {problem}"
            worker.setting.watch.broken(Invariant.WRITERS, what)


def _problem_of_written(worker: Worker, block_id: int, num_writers: int) -> str:
    holders = worker.pool.holders(block_id)
    if num_writers > 1:
        return "has two writers"
    if not holders and not worker.pool.is_quarantined(block_id):
        return "free"
    if sum(holders.values()) > 1:
        return "shared"
    return "cached" if worker.pool.key_of(block_id) is not None else ""


def _check_readable(worker: PrefillWorker) -> None:
    """What a reader may read is held, complete and as it was announced; and it is the only one."""
    watch = worker.setting.watch
    written = set() if worker.plan is None else set(worker.memory.written_by(worker.plan))
    for lease in worker.leases.open_leases:
        for announced in lease.ranges:
            for block_id, generation in zip(
                announced.block_ids, announced.generations, strict=True
            ):
                if not worker.pool.holders(block_id):
                    watch.broken(Invariant.READABLE, f"block {block_id} is free")
                if worker.pool.generation(block_id) != generation:
                    watch.broken(Invariant.READABLE, f"block {block_id} was reused")
                if block_id in written:
                    watch.broken(Invariant.READABLE, f"block {block_id} is being written")
        readers = [grant for grant in worker.leases.valid_grants if grant.lease is lease]
        if len(readers) > 1:
            watch.broken(Invariant.READABLE, f"{len(readers)} readers of one lease")


def _check_lease_owners(worker: PrefillWorker) -> None:
    """Each sequence belongs to a stream that is open, and has the one lease."""
    owned = {side.session.sequence for side in worker.streams if side.session is not None}
    owned.discard(None)
    if _living(worker) != owned or len(worker.leases.open_leases) != len(owned):
        worker.setting.watch.broken(Invariant.HOLDERS, "a sequence or a lease without a stream")


def _check_reservation_owners(worker: DecodeWorker) -> None:
    num_entries = sum(len(s.sequences) for s in worker.streams if s.sequences is not None)
    if len(_living(worker)) != num_entries:
        worker.setting.watch.broken(Invariant.HOLDERS, "a sequence without a stream")


def _check_outcome(cluster: "Cluster", request: Request) -> None:
    watch = cluster.setting.watch
    if isinstance(request.outcome, InvalidRequestError):
        watch.broken(Invariant.OUTCOME, f"a good request is refused: {request.outcome}")
    if request.outcome is None or isinstance(request.outcome, DiptychError):
        return
    stop_at = request.question.stop_at
    if stop_at is None or len(request.emitted) < stop_at:
        if request.emitted != request.right:
            watch.broken(Invariant.OUTCOME, "it finished early")
        if request.outcome != request.right_reason:
            watch.broken(Invariant.OUTCOME, f"it finished because of {request.outcome}")


def _living(worker: Worker) -> set[Sequence]:
    """Sequences that somebody holds; others only wait for the step in flight."""
    return {seq for seq, _ in worker.scheduler.holders() if seq.state is not SequenceState.FINISHED}
