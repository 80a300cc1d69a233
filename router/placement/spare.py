"""What a batch sees of workers: the room that nobody else is likely to want at once. Pure.

Whoever comes next should find workers as they would be without it: no prompts before its own,
and a place to decode. So a prompt of a batch goes where hardly anything waits to be computed, one
by one, and a part of the sequences and blocks of each decode worker is left free.
"""

from dataclasses import replace
from typing import Final

from router.placement.types import DecodeView, PrefillView, Query, Snapshot

_MOST_WAITING_S: Final = 0.02  # that computing what waits there takes
_KEPT_FREE: Final = 4  # one in so many, of sequences and of blocks


def spare(query: Query, snapshot: Snapshot) -> Snapshot:
    """The same workers, those without such room as if they had none at all."""
    return replace(
        snapshot,
        prefill=tuple(map(_spare_runway, snapshot.prefill)),
        decode=tuple(_spare_place(query, view) for view in snapshot.decode),
    )


def is_idle(num_tokens: int, tokens_per_s: float) -> bool:
    """Whether hardly anything waits where so many tokens of prompts do; a rate of 0: unknown."""
    return num_tokens <= _MOST_WAITING_S * tokens_per_s


def computes_at_once(view: DecodeView) -> bool:
    """Whether a prompt that comes next to a decode worker is computed at once."""
    if view.engine is None:
        return view.num_pending_tokens == 0
    num_tokens = view.num_pending_tokens + view.engine.num_departed_tokens
    token_s = view.engine.model.prefill.prefill_token_s
    return is_idle(num_tokens, 1 / token_s if token_s > 0 else 0.0)


def _spare_runway(view: PrefillView) -> PrefillView:
    if view.has_runway and not is_idle(view.num_pending_tokens, view.tokens_per_s):
        return replace(view, has_runway=False)
    return view


def _spare_place(query: Query, view: DecodeView) -> DecodeView:
    most = view.max_num_seqs
    if not _has_blocks(query, view):
        most = 0
    elif most is not None:
        most -= most // _KEPT_FREE
    local_prefill = view.local_prefill and computes_at_once(view)
    return replace(view, max_num_seqs=most, local_prefill=local_prefill)


def _has_blocks(query: Query, view: DecodeView) -> bool:
    if view.num_available_blocks is None:
        return True
    needed = query.num_tokens // query.block_size + 1
    return view.num_available_blocks >= needed + view.num_blocks // _KEPT_FREE
