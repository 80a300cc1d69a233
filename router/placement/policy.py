"""Placement by least load with prefix affinity. Pure."""

from router.placement.prefix_memory import PrefixMemory
from router.placement.types import (
    DecodeOnly,
    DecodeView,
    Pair,
    Paired,
    Placement,
    PrefillOnly,
    PrefillView,
    Query,
    Snapshot,
    Why,
    WorkerId,
)

# A running sequence weighs as much as so many tokens to ship or compute.
_SEQUENCE_WEIGHT_TOKENS = 64


class LeastLoaded:
    """Fewest tokens of work, counting what the worker's prefix cache saves.

    Work of a prefill worker: what waits there and the uncached part of this
    prompt, in tokens. Of a decode worker: its sequences, weighted, and the part
    of this prompt that it lacks. Only proven pairs are used.
    """

    def __init__(
        self,
        memory: PrefixMemory,
        *,
        local_below_tokens: int,
        allow_local: bool,
        allow_recompute: bool,
        has_prefill_pool: bool,
    ) -> None:
        self._memory = memory
        self._local_below_tokens = local_below_tokens
        self._allow_local = allow_local
        self._allow_recompute = allow_recompute
        self._has_prefill_pool = has_prefill_pool

    def remember(self, worker: WorkerId, block_keys: tuple[bytes, ...]) -> None:
        """See :class:`router.placement.types.Policy`."""
        self._memory.remember(worker.incarnation, block_keys)

    def correct(
        self, worker: WorkerId, block_keys: tuple[bytes, ...], num_cached_blocks: int
    ) -> None:
        """See :class:`router.placement.types.Policy`."""
        self._memory.correct(worker.incarnation, block_keys, num_cached_blocks)

    def forget(self, worker: WorkerId) -> None:
        """See :class:`router.placement.types.Policy`."""
        self._memory.forget(worker.incarnation)

    def place(self, query: Query, snapshot: Snapshot) -> Placement | None:
        """See :class:`router.placement.types.Policy`."""
        prefills = [view for view in snapshot.prefill if _may_prefill(query, view)]
        decodes = [view for view in snapshot.decode if _may_decode(query, view)]
        if query.on_prefill is not None:
            return self._pair(query, prefills, decodes)
        local = self._local(query, snapshot, decodes)
        if local is not None:
            return local
        if query.prefill_alone and query.on_decode is None:
            alone = min(prefills, key=lambda p: self._prefill_work(query, p), default=None)
            placement: Placement | None = None if alone is None else PrefillOnly(alone.worker)
        else:
            placement = self._pair(query, prefills, decodes)
        return placement or self._recompute(query, snapshot, decodes)

    def _pair(
        self, query: Query, prefills: list[PrefillView], decodes: list[DecodeView]
    ) -> Paired | None:
        best: tuple[tuple[float, float], Paired] | None = None
        decode_work = {d.worker: self._decode_work(query, d) for d in decodes}
        for prefill in prefills:
            work = self._prefill_work(query, prefill)
            for decode in decodes:
                if not _is_pair(query, prefill, decode):
                    continue
                score = (work + decode_work[decode.worker], decode_work[decode.worker])
                if best is None or score < best[0]:
                    best = score, Paired(prefill.worker, decode.worker)
        return None if best is None else best[1]

    def _local(
        self, query: Query, snapshot: Snapshot, decodes: list[DecodeView]
    ) -> DecodeOnly | None:
        """Decode alone, because it is cheaper or because there is no prefill worker."""
        best = self._least_work(query, [view for view in decodes if view.local_prefill])
        if best is None:
            return None
        why = None
        if not self._has_prefill_pool:
            why = Why.CHOICE
        elif query.failed or query.failed_pairs:
            return None
        elif not snapshot.prefill:
            why = Why.NO_PREFILL if self._allow_local else None
        elif self._num_missing(query, best.worker) < self._local_below_tokens:
            why = Why.CHOICE
        return None if why is None else self._decode_only(query, best, why)

    def _recompute(
        self, query: Query, snapshot: Snapshot, decodes: list[DecodeView]
    ) -> DecodeOnly | None:
        """Decode alone, because every prefill worker that is alive failed this request."""
        if not self._allow_recompute or not (query.failed or query.failed_pairs):
            return None
        alive = [view.worker.incarnation for view in snapshot.prefill]
        able = [
            view
            for view in decodes
            if view.local_prefill
            and all(
                p in query.failed or Pair(p, view.worker.incarnation) in query.failed_pairs
                for p in alive
            )
        ]
        best = self._least_work(query, able)
        return None if best is None else self._decode_only(query, best, Why.RECOMPUTE)

    def _decode_only(self, query: Query, view: DecodeView, why: Why) -> DecodeOnly:
        num_assumed_tokens = query.num_tokens - self._num_missing(query, view.worker)
        return DecodeOnly(view.worker, why, num_assumed_tokens)

    def _least_work(self, query: Query, views: list[DecodeView]) -> DecodeView | None:
        return min(views, key=lambda view: self._decode_work(query, view), default=None)

    def _prefill_work(self, query: Query, view: PrefillView) -> float:
        return view.num_pending_tokens + self._num_missing(query, view.worker)

    def _decode_work(self, query: Query, view: DecodeView) -> float:
        return view.num_sequences * _SEQUENCE_WEIGHT_TOKENS + self._num_missing(query, view.worker)

    def _num_missing(self, query: Query, worker: WorkerId) -> int:
        if query.num_cached_on_decode is not None and worker == query.on_decode:
            return query.num_tokens - query.num_cached_on_decode
        hit = self._memory.num_hit_blocks(worker.incarnation, query.block_keys)
        return query.num_tokens - hit * query.block_size


def _may_prefill(query: Query, view: PrefillView) -> bool:
    if query.on_prefill is not None:
        return view.worker == query.on_prefill
    incarnation = view.worker.incarnation
    return (
        view.has_runway
        and view.max_model_len >= query.num_max_tokens
        and incarnation not in query.failed
        and incarnation not in query.refused
    )


def _may_decode(query: Query, view: DecodeView) -> bool:
    if query.on_decode is not None:
        return view.worker == query.on_decode
    incarnation = view.worker.incarnation
    return (
        view.max_model_len >= query.num_max_tokens
        and incarnation not in query.failed
        and incarnation not in query.refused
    )


def _is_pair(query: Query, prefill: PrefillView, decode: DecodeView) -> bool:
    pair = Pair(prefill.worker.incarnation, decode.worker.incarnation)
    return pair.prefill in decode.proven and pair not in query.failed_pairs
