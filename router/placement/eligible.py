"""Which workers may be chosen for a request at all, whatever they cost it. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from router.placement.placement import Paired, Placement
from router.placement.query import Query
from router.placement.views import DecodeView, Pair, PrefillView, Snapshot, WorkerId

V = TypeVar("V", bound=PrefillView | DecodeView)

# A cached prefix does not draw a sequence to a decode worker that has so many more than another.
_MAX_IMBALANCE_RATIO = 1.1
_MAX_IMBALANCE_SEQUENCES = 1


def usable(query: Query, snapshot: Snapshot) -> tuple[list[PrefillView], list[DecodeView]]:
    """Those that may compute the prompt, and those that may run the sequence."""
    return (
        _able(query, snapshot.prefill, query.on_prefill),
        _able(query, snapshot.decode, query.on_decode),
    )


def _able(query: Query, views: Sequence[V], held: WorkerId | None) -> list[V]:
    """Of these; the one that is ``held`` already, where one is."""
    if held is not None:
        return _fitting(query, [view for view in views if view.worker == held])
    num_tokens, barred = query.num_max_tokens, query.failed | query.refused
    takes_all, payer = query.as_if_room, query.payer
    able = [
        v for v in views if (takes_all or v.takes_from(payer)) and v.max_model_len >= num_tokens
    ]
    if barred:
        able = [v for v in able if v.worker.incarnation not in barred]
    return _fitting(query, able)


def is_pair(query: Query, prefill: PrefillView, decode: DecodeView) -> bool:
    """Whether KV can move from the one to the other."""
    incarnation = prefill.worker.incarnation
    return incarnation in decode.proven and not (
        query.failed_pairs and Pair(incarnation, decode.worker.incarnation) in query.failed_pairs
    )


def of_both(
    query: Query, prefills: list[PrefillView], decodes: list[DecodeView]
) -> list[DecodeView]:
    """Of those that may decode, such as may compute the prompt too: nothing has to move there.

    None where a lease is held already, or a worker has to tell of the prompt: leases are pulled
    from, and their worker pulls nothing from itself.
    """
    if query.on_prefill is not None or query.needs_prefill:
        return []
    computing = {view.worker for view in prefills}
    return [view for view in decodes if view.local_prefill and view.worker in computing]


def ordered(placement: Placement | None, snapshot: Snapshot) -> Placement | None:
    """The same; a pair of which each could be the other for another request is asked in order.

    Else one request could hold a lease here and another one there, and each want to reserve
    where the other is.
    """
    if not isinstance(placement, Paired):
        return placement
    may_decode = any(view.worker == placement.prefill for view in snapshot.decode)
    may_prefill = any(view.worker == placement.decode for view in snapshot.prefill)
    return replace(placement, in_order=True) if may_decode and may_prefill else placement


def _fitting(query: Query, views: list[V]) -> list[V]:
    """Those with enough blocks; all if none has, as one may have more than it last said."""
    needed = query.num_tokens // query.block_size + 1
    fit = [v for v in views if (num := v.num_obtainable_blocks) is None or num >= needed]
    return fit or views


def evenly_loaded(query: Query, views: list[DecodeView]) -> list[DecodeView]:
    """Those with hardly more sequences than the others; all if one of them is held already."""
    if query.on_decode is not None:
        return views
    least = min((view.num_sequences for view in views), default=0)
    most = least * _MAX_IMBALANCE_RATIO + _MAX_IMBALANCE_SEQUENCES
    return [view for view in views if view.num_sequences <= most]
