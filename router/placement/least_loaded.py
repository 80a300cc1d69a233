"""Placement by least load with prefix affinity. Pure."""

import hashlib
from collections.abc import Sequence
from random import Random
from typing import NamedTuple, TypeVar

from router.placement.cache_index import CacheIndex
from router.placement.eligible import evenly_loaded, is_pair, of_both, usable
from router.placement.explanation import Explanation, ToldWorker, best_of
from router.placement.place import distance_ratio
from router.placement.placement import (
    DecodeOnly,
    Forecast,
    Paired,
    Placement,
    PrefillOnly,
    Unreachable,
    Why,
)
from router.placement.query import EndedRequest, Query
from router.placement.views import DecodeView, Pair, PrefillView, Snapshot, WorkerId

V = TypeVar("V", bound=PrefillView | DecodeView)

# A running sequence weighs as much as so many tokens to ship or compute.
_SEQUENCE_WEIGHT_TOKENS = 64
# Of larger pools not every worker is weighed: the best holder, the least loaded, and two drawn.
_NUM_WEIGHED_ALL = 16
_NUM_LEAST_LOADED = 4
_NUM_DRAWN = 2


class _Cost(NamedTuple):
    """A view with what this request would cost there, in tokens; the least is the best."""

    work: float
    rank: bytes  # among equals
    num_missing: int


_Score = tuple[float, _Cost, _Cost]


class _ScoredPair(NamedTuple):
    """A prefill and a decode worker, and what both together cost, in tokens."""

    score: _Score
    pair: Paired


class _Whole(NamedTuple):
    """A worker of both roles, and what it costs if it does both."""

    score: _Score
    view: DecodeView


class LeastLoaded:
    """Fewest tokens of work, counting what the worker's prefix cache saves.

    Work of a prefill worker: what waits there and the uncached part of this prompt, more
    where it computes slower than others. Of a decode worker: its sequences, weighted, the
    prompts it computes, and the part of this prompt that it lacks, less where that is
    fetched faster than computed, and a little less where the two are near each other (in one
    NVLink domain, or at least in one zone); nothing where a worker has both roles and computes
    the prompt itself. Only proven pairs are used, and no decode worker
    with as many sequences as it runs at a time. A prefix draws sequences to a decode worker
    only while it has hardly more of them than the others.

    Routers that know the same do not choose alike: among equals each has an order of its own
    (rendezvous hashing), and of large pools each weighs the likely best and two at random
    (Mitzenmacher: the power of two choices).
    """

    def __init__(
        self,
        cache: CacheIndex,
        *,
        local_below_tokens: int,
        allow_local: bool,
        allow_recompute: bool,
        router_incarnation: str = "",
    ) -> None:
        self.cache = cache
        self._local_below_tokens = local_below_tokens
        self.allow_local = allow_local
        self._allow_recompute = allow_recompute
        self._router_incarnation = router_incarnation
        self._random = Random(router_incarnation)  # its draws are repeatable, and its own
        self._ranks: dict[str, bytes] = {}  # by worker's incarnation

    def forget(self, worker: WorkerId) -> None:
        """See :class:`router.placement.policy.Policy`."""
        self.cache.forget(worker.incarnation)
        self._ranks.pop(worker.incarnation, None)

    def place(self, query: Query, snapshot: Snapshot) -> Placement | None:
        """See :class:`router.placement.policy.Policy`."""
        prefills, decodes = usable(query, snapshot)
        if query.on_prefill is not None:
            return self._pair(query, prefills, decodes)
        near = self._beside(query, decodes)
        if near is not None:
            return near
        local = None if query.needs_prefill else self._local(query, snapshot, decodes)
        if local is not None:
            return local
        if query.prefill_alone and query.on_decode is None:
            weighed = self._weigh_prefills(query, prefills)
            alone = min(prefills, key=lambda view: weighed[view.worker], default=None)
            placement: Placement | None = None if alone is None else PrefillOnly(alone.worker)
        else:
            placement = self._pair(query, prefills, decodes)
        return placement or self._recompute(query, snapshot, decodes)

    def may_be_local(self, query: Query, snapshot: Snapshot) -> bool:
        """See :class:`router.placement.policy.Policy`."""
        if query.num_tokens < self._local_below_tokens:
            return True
        holders = self.holders(query)
        return any(
            self.num_missing(query, view.worker) < self._local_below_tokens
            for view in snapshot.decode
            if view.local_prefill and view.worker.incarnation in holders
        )

    def may_come(self, query: Query, snapshot: Snapshot) -> bool:
        """See :class:`router.placement.policy.Policy`."""
        anew = query._replace(as_if_room=True, refused=frozenset())
        return self.place(anew, snapshot) is not None

    @property
    def has_declined(self) -> bool:
        """See :class:`router.placement.policy.Policy`. It weighs no objectives."""
        return False

    def together(self, query: Query, snapshot: Snapshot) -> DecodeOnly | None:
        """The decode worker that computes a fresh prompt itself with the least work in all."""
        if query.needs_prefill or query.prefill_alone or not query.is_fresh:
            return None
        if query.beside is not None:  # it has the prompt, so ``place`` says where
            return None
        _, decodes = usable(query, snapshot)
        best = self._least_work(query, [view for view in decodes if view.local_prefill])
        return None if best is None else self._decode_only(query, best, Why.CHOICE)

    def foresee(self, query: Query, snapshot: Snapshot, wait_s: float) -> Unreachable | None:
        """See :class:`router.placement.policy.Policy`. It foretells nothing."""
        return None

    def came_true(self, forecast: Forecast, ttft_s: float) -> None:
        """See :class:`router.placement.policy.Policy`. It foretells nothing."""

    def went_on(self, forecast: Forecast, gap_s: float) -> None:
        """See :class:`router.placement.policy.Policy`. It foretells nothing."""

    def answered(self, forecast: Forecast, num_tokens: int) -> None:
        """See :class:`router.placement.policy.Policy`. It foretells nothing."""

    def ended_as(self, seen: EndedRequest) -> None:
        """See :class:`router.placement.policy.Policy`. Nothing is weighed by it."""

    def explain(self, query: Query, snapshot: Snapshot, placement: Placement) -> Explanation:
        """See :class:`router.placement.policy.Policy`."""
        prefills, decodes = usable(query, snapshot)
        prefill = None if isinstance(placement, DecodeOnly) else placement.prefill
        decode = None if isinstance(placement, PrefillOnly) else placement.decode
        prefills = [] if prefill is None else prefills
        decodes = [] if decode is None else evenly_loaded(query, decodes)
        on_prefill = self._weigh_prefills(query, prefills)
        on_decode = self._weigh_decodes(query, decodes)
        return Explanation(
            best_of(_prefill_candidate(v, on_prefill[v.worker], prefill) for v in prefills),
            best_of(_decode_candidate(v, on_decode[v.worker], decode, prefill) for v in decodes),
            len(prefills),
            len(decodes),
        )

    def num_missing(self, query: Query, worker: WorkerId) -> int:
        """Tokens of the request that ``worker`` has no KV of, by what it told."""
        if query.num_cached_on_decode is not None and worker == query.on_decode:
            return query.num_tokens - query.num_cached_on_decode
        hit = self.cache.num_hit_blocks(worker.incarnation, query.block_keys)
        return query.num_tokens - hit * query.block_size

    def holders(self, query: Query) -> set[str]:
        """Of all workers, by incarnation, those that may lack less than the whole request."""
        holders = self.cache.holders(query.block_keys)
        if query.on_decode is not None:
            holders.add(query.on_decode.incarnation)
        return holders

    def rank(self, worker: WorkerId) -> bytes:
        """Its place in this router's own order among equals."""
        rank = self._ranks.get(worker.incarnation)
        if rank is None:
            name = f"{self._router_incarnation} {worker.incarnation}".encode()
            rank = self._ranks[worker.incarnation] = hashlib.blake2b(name, digest_size=8).digest()
        return rank

    def _pair(
        self, query: Query, prefills: list[PrefillView], decodes: list[DecodeView]
    ) -> Paired | DecodeOnly | None:
        """The pair with the least work of both; among equals the decode worker's counts first.

        A worker of both roles may be both: then nothing is shipped, and what waits there counts
        once.
        """
        both = of_both(query, prefills, decodes)
        whole = {view.worker for view in both}
        can = [
            d for d in decodes if d.worker in whole or any(is_pair(query, p, d) for p in prefills)
        ]
        even = evenly_loaded(query, can)
        on_prefill = self._weigh_prefills(query, prefills)
        on_decode = self._weigh_decodes(query, even)
        few_p, few_d = self._few(prefills, on_prefill), self._few(even, on_decode)
        alone = self._least_whole([view for view in even if view.worker in whole], on_decode)
        best = self._best_pair(query, few_p, few_d, on_prefill, on_decode)
        if best is None and alone is None:
            best = self._best_pair(query, prefills, even, on_prefill, on_decode)
        if alone is not None and (best is None or alone.score <= best.score):
            return self._decode_only(query, alone.view, Why.CHOICE)
        return None if best is None else best.pair

    def _least_whole(
        self, views: Sequence[DecodeView], on_decode: dict[WorkerId, _Cost]
    ) -> _Whole | None:
        """Of workers of both roles the one with the least work, this prompt's included."""
        scored = []
        for view in views:
            cost = on_decode[view.worker]
            scored.append(_Whole((cost.work + cost.num_missing, cost, cost), view))
        return min(scored, key=lambda each: each.score, default=None)

    def _best_pair(
        self,
        query: Query,
        prefills: Sequence[PrefillView],
        decodes: Sequence[DecodeView],
        on_prefill: dict[WorkerId, _Cost],
        on_decode: dict[WorkerId, _Cost],
    ) -> _ScoredPair | None:
        best: _ScoredPair | None = None
        fastest = max((view.tokens_per_s for view in prefills), default=0.0)
        for prefill in prefills:
            first = on_prefill[prefill.worker]
            tokens_per_s = prefill.tokens_per_s or fastest  # as good as the others, until it tells
            for decode in decodes:
                if not is_pair(query, prefill, decode):
                    continue
                second = on_decode[decode.worker]
                shipping = _shipping_work(prefill, decode, second.num_missing, tokens_per_s)
                score = (first.work + second.work + shipping, second, first)
                if best is None or score < best.score:
                    best = _ScoredPair(score, Paired(prefill.worker, decode.worker))
        return best

    def _beside(self, query: Query, decodes: list[DecodeView]) -> DecodeOnly | None:
        """With another choice of the same prompt: its blocks are shared where they are."""
        if query.beside is None or query.on_decode is not None or query.failed:
            return None
        near = (view for view in decodes if view.worker == query.beside and view.local_prefill)
        view = next(near, None)
        if view is None or self.num_missing(query, view.worker) > query.block_size:
            return None
        return self._decode_only(query, view, Why.CHOICE)

    def _local(
        self, query: Query, snapshot: Snapshot, decodes: list[DecodeView]
    ) -> DecodeOnly | None:
        """Decode alone, because it is cheaper or because there is no prefill worker."""
        # A single token takes no pair.
        has_prefill = bool(snapshot.prefill) if query.prefill_alone else snapshot.has_prefill
        if snapshot.has_prefill_pool and has_prefill and not self.may_be_local(query, snapshot):
            return None
        best = self._least_work(query, [view for view in decodes if view.local_prefill])
        if best is None:
            return None
        why = None
        if not snapshot.has_prefill_pool:
            why = Why.CHOICE
        elif query.failed or query.failed_pairs:
            return None
        elif not has_prefill and self.allow_local:
            why = Why.NO_PREFILL
        elif snapshot.prefill and self.num_missing(query, best.worker) < self._local_below_tokens:
            why = Why.CHOICE
        return None if why is None else self._decode_only(query, best, why)

    def _recompute(
        self, query: Query, snapshot: Snapshot, decodes: list[DecodeView]
    ) -> DecodeOnly | None:
        """Decode alone, because every prefill worker that is alive failed this request, or cannot
        be pulled from.
        """
        if query.needs_prefill or not self._allow_recompute:
            return None
        if not (query.failed or query.failed_pairs):
            return None
        alive = [view.worker.incarnation for view in snapshot.prefill]
        able = [
            view
            for view in decodes
            if view.local_prefill
            and all(
                p in query.failed
                or p in view.unreadable
                or Pair(p, view.worker.incarnation) in query.failed_pairs
                for p in alive
                if p != view.worker.incarnation  # which pulls nothing from itself
            )
        ]
        best = self._least_work(query, able)
        return None if best is None else self._decode_only(query, best, Why.RECOMPUTE)

    def _decode_only(self, query: Query, view: DecodeView, why: Why) -> DecodeOnly:
        num_assumed_tokens = query.num_tokens - self.num_missing(query, view.worker)
        return DecodeOnly(view.worker, why, num_assumed_tokens)

    def _least_work(self, query: Query, views: list[DecodeView]) -> DecodeView | None:
        """The decode worker that would compute the whole prompt with the least work in all."""
        even = evenly_loaded(query, views)
        weighed = self._weigh_decodes(query, even)

        def cost(view: DecodeView) -> tuple[float, _Cost]:
            mine = weighed[view.worker]
            return mine.work + mine.num_missing, mine

        return min(even, key=cost, default=None)

    def _weigh_prefills(self, query: Query, views: Sequence[PrefillView]) -> dict[WorkerId, _Cost]:
        fastest = max((view.tokens_per_s for view in views), default=0.0)
        weighed, holders, ranks = {}, self.holders(query), self._ranks
        for view in views:
            slowness = fastest / view.tokens_per_s if view.tokens_per_s else 1.0
            missing = query.num_tokens
            if view.worker.incarnation in holders:
                missing = self.num_missing(query, view.worker)
            work = (view.num_pending_tokens + missing) * slowness
            rank = ranks.get(view.worker.incarnation) or self.rank(view.worker)
            weighed[view.worker] = _Cost(work, rank, missing)
        return weighed

    def _weigh_decodes(self, query: Query, views: Sequence[DecodeView]) -> dict[WorkerId, _Cost]:
        """``work`` is what is there already; what is missing is shipped or computed."""
        fastest_s = min((view.step_s for view in views if view.step_s), default=0.0)
        weighed, holders, ranks = {}, self.holders(query), self._ranks
        for view in views:
            slowness = view.step_s / fastest_s if view.step_s else 1.0
            there = view.num_sequences * _SEQUENCE_WEIGHT_TOKENS + view.num_pending_tokens
            missing = query.num_tokens
            if view.worker.incarnation in holders:
                missing = self.num_missing(query, view.worker)
            rank = ranks.get(view.worker.incarnation) or self.rank(view.worker)
            weighed[view.worker] = _Cost(there * slowness, rank, missing)
        return weighed

    def _few(self, views: Sequence[V], weighed: dict[WorkerId, _Cost]) -> Sequence[V]:
        """Those worth pairing: all of a small pool; the likely best of a large one, and two."""
        if len(views) <= _NUM_WEIGHED_ALL:
            return views
        by_load = sorted(views, key=lambda view: weighed[view.worker])
        holder = min(by_load, key=lambda view: weighed[view.worker].num_missing)
        drawn = self._random.sample(by_load[_NUM_LEAST_LOADED:], _NUM_DRAWN)
        return [holder, *by_load[:_NUM_LEAST_LOADED], *drawn]


def _shipping_work(
    prefill: PrefillView, decode: DecodeView, num_tokens: int, tokens_per_s: float
) -> float:
    """What shipping so many tokens costs, in computed ones: no more than these."""
    ratio = distance_ratio(prefill.place, decode.place)
    bytes_per_s = decode.bytes_per_s.get(prefill.worker.incarnation, 0.0)
    num_bytes = decode.shipped.of(num_tokens)
    if not (bytes_per_s and tokens_per_s and num_bytes):
        return ratio * num_tokens
    return ratio * min(num_tokens, num_bytes / bytes_per_s * tokens_per_s)


def _prefill_candidate(view: PrefillView, cost: _Cost, chosen: WorkerId | None) -> ToldWorker:
    num_to_compute = view.num_pending_tokens + cost.num_missing
    return ToldWorker(
        view.worker.address,
        view.worker == chosen,
        cost.work,
        cost.num_missing,
        None,
        num_to_compute / view.tokens_per_s if view.tokens_per_s else None,
    )


def _decode_candidate(
    view: DecodeView, cost: _Cost, chosen: WorkerId | None, source: WorkerId | None
) -> ToldWorker:
    bytes_per_s = 0.0 if source is None else view.bytes_per_s.get(source.incarnation, 0.0)
    num_bytes = view.shipped.of(cost.num_missing)
    return ToldWorker(
        view.worker.address,
        view.worker == chosen,
        cost.work,
        cost.num_missing,
        view.num_sequences,
        num_bytes / bytes_per_s if bytes_per_s else None,
    )
