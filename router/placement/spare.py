"""What a batch sees of workers: the room that nobody else is likely to want at once. Pure.

Whoever comes next should find workers as they would be without it: no prompts before its own,
and a place to decode. So a prompt of a batch goes where hardly anything waits to be computed, one
by one, and where half of the workers are left beside it; and a part of the sequences and blocks of
each decode worker is left free. A batch that has waited for long takes what there is, but nobody
leaves for it; what it takes in its turn, before others that wait, it keeps.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from router.placement.query import Query
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId

BATCH_SPARE_ONLY_S: Final = 10.0  # after which a batch request takes its turn like any other
_MOST_WAITING_S: Final = 0.02  # that computing what waits there takes
_SHORT_S: Final = 0.1  # that computing a prompt takes which decode workers may compute any time
_KEPT_FREE: Final = 4  # one in so many, of sequences and of blocks


def seen_by(query: Query, snapshot: Snapshot) -> Snapshot:
    """The workers as who asks may use them: sequences of a batch leave for those of no batch."""
    if query.takes_spare_only:
        return _spare(query, snapshot)
    if not query.is_batch or not any(view.num_giving_way for view in snapshot.decode):
        return snapshot
    return replace(snapshot, decode=tuple(map(_keeping_all, snapshot.decode)))


def will_yield(query: Query, *, others_wait: bool) -> bool:
    """Whether it leaves again for others, if it is placed now: but for what its share is."""
    return query.is_batch and (query.takes_spare_only or not others_wait)


def _spare(query: Query, snapshot: Snapshot) -> Snapshot:
    """The same workers, those without such room as if they had none at all."""
    prefill, decode = snapshot.prefill, snapshot.decode
    at_once = _beyond_half(
        (view.worker for view in prefill if is_idle(view.num_pending_tokens, view.tokens_per_s)),
        len(prefill),
    )
    local = _beyond_half((view.worker for view in decode if computes_at_once(view)), len(decode))
    if prefill:  # others' prompts go there, but for the shortest
        local = {view.worker for view in decode if view.worker in local or _is_short(query, view)}
    return replace(
        snapshot,
        prefill=tuple(_with_runway(view, view.worker in at_once) for view in prefill),
        decode=tuple(_with_places(query, view, view.worker in local) for view in decode),
    )


def is_idle(num_tokens: int, tokens_per_s: float) -> bool:
    """Whether hardly anything waits where so many tokens of prompts do; a rate of 0: unknown."""
    return num_tokens <= _MOST_WAITING_S * tokens_per_s


def computes_at_once(view: DecodeView) -> bool:
    """Whether a prompt that comes next to a decode worker is computed at once."""
    if view.engine is None:
        return view.num_pending_tokens == 0
    token_s = view.engine.model.prefill.prefill_token_s
    return is_idle(view.num_pending_tokens, 1 / token_s if token_s > 0 else 0.0)


def _beyond_half(idle: Iterable[WorkerId], num_all: int) -> set[WorkerId]:
    """Of several, half are left to those that come next."""
    found = set(idle)
    return found if len(found) > num_all // 2 else set()


def _is_short(query: Query, view: DecodeView) -> bool:
    """Whether its prompt would delay those that decode there by little."""
    return view.engine is None or (
        query.num_tokens * view.engine.model.prefill.prefill_token_s <= _SHORT_S
    )


def _with_runway(view: PrefillView, is_spare: bool) -> PrefillView:
    if is_spare or not (view.has_runway or view.is_open_beyond):
        return view
    return replace(view, has_runway=False, is_open_beyond=False)


def _with_places(query: Query, view: DecodeView, is_spare: bool) -> DecodeView:
    most = _most_seqs(view, query.num_tokens // query.block_size + 1)
    local_prefill = view.local_prefill and is_spare
    if (most, local_prefill, 0) == (view.max_num_seqs, view.local_prefill, view.num_giving_way):
        return view
    return replace(
        view,
        max_num_seqs=most,
        local_prefill=local_prefill,
        num_giving_way=0,
        num_giving_way_blocks=0,
    )


def has_spare_place(view: DecodeView, num_blocks: int) -> bool:
    """Whether a decode worker has room for a batch's sequence that needs so many blocks."""
    most = _most_seqs(view, num_blocks)
    return most is None or view.num_sequences < most


def _most_seqs(view: DecodeView, num_blocks: int) -> int | None:
    """That run with one of a batch that needs so many blocks; None: it does not say."""
    free = view.num_available_blocks
    if free is not None and free < num_blocks + view.num_blocks // _KEPT_FREE:
        return 0
    most = view.max_num_seqs
    return None if most is None else most - most // _KEPT_FREE


def _keeping_all(view: DecodeView) -> DecodeView:
    """As if nobody gave way."""
    if not view.num_giving_way:
        return view
    return replace(view, num_giving_way=0, num_giving_way_blocks=0)
