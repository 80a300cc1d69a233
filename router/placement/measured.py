"""What a request would have by what workers measured of themselves, without any learned law. Pure.

Rough, but of what was: how many tokens of prompts a worker computed in a second, what its newest
steps without prompts took, and how much of its time went into prompts. No more is believed of
workers while forecasts are in doubt.
"""

from collections.abc import Callable
from typing import Final

from router.placement.placement import DecodeOnly, Placement, PrefillOnly
from router.placement.query import Query
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId

_MOST_PREFILL_TIME: Final = 0.95

NumMissing = Callable[[Query, WorkerId], int]  # tokens of the prompt that a worker lacks


def is_in_time(
    placement: Placement, query: Query, snapshot: Snapshot, num_missing: NumMissing
) -> bool:
    """Whether it looks as if it kept its objectives where it is placed, or nothing is known."""
    ttft_s = first_token_s(placement, query, snapshot, num_missing)
    within_s, wanted_s = query.objectives[:2]
    if within_s is not None and ttft_s is not None and ttft_s > within_s:
        return False
    if wanted_s is None or isinstance(placement, PrefillOnly):
        return True
    there = (view for view in snapshot.decode if view.worker == placement.decode)
    return all(_tpot_s(view) <= wanted_s for view in there)


def first_token_s(
    placement: Placement, query: Query, snapshot: Snapshot, num_missing: NumMissing
) -> float | None:
    """When its prompt will be computed, behind all that waits there.

    None while no worker that leases prompts has measured what it computes.
    """
    computing = placement.decode if isinstance(placement, DecodeOnly) else placement.prefill
    rates = {view.worker: view.tokens_per_s for view in snapshot.prefill if view.tokens_per_s}
    views: tuple[DecodeView | PrefillView, ...] = (*snapshot.decode, *snapshot.prefill)
    waiting = {view.worker: view.num_pending_tokens for view in views}
    if not rates or computing not in waiting:
        return None
    num_tokens = waiting[computing] + num_missing(query, computing)
    return num_tokens / rates.get(computing, sum(rates.values()) / len(rates))


def _tpot_s(view: DecodeView) -> float:
    """Between tokens there, if prompts go on taking as much of its time; 0: it has nobody."""
    if not view.num_sequences:
        return 0.0
    return view.step_s / (1.0 - min(view.prefill_time_ratio, _MOST_PREFILL_TIME))
