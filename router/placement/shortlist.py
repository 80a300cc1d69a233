"""Of large pools, the workers that are worth a look ahead. Pure."""

from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import Final, TypeVar

from router.placement.forecast import DecodeForecast, PrefillForecast
from router.placement.types import DecodeView, PrefillView, WorkerId

NUM_WEIGHED: Final = 8  # of each pool, those with the least to wait for
# Of larger pools not every queue is rolled out, but those that look short, and who has a prefix.
_NUM_ROLLED_OUT: Final = 16
NUM_HOLDERS: Final = 4
_NUM_OTHERS: Final = 4  # of workers of both roles, that have the other part

V = TypeVar("V", bound=PrefillView | DecodeView)
F = TypeVar("F", PrefillForecast, DecodeForecast)


def near(
    views: Sequence[V],
    holders: set[str],
    others: frozenset[WorkerId],
    looks: Callable[[V], float],
    num_missing: Callable[[WorkerId], int],
) -> Sequence[V]:
    """Those that are idle as it ``looks``, or with a prefix: incarnations of ``holders``, of which
    that many tokens are missing.

    ``others`` have another part, so only a few are.
    """
    if len(views) <= _NUM_ROLLED_OUT:
        return views
    own = [view for view in views if view.worker not in others] if others else views
    near = nsmallest(_NUM_ROLLED_OUT, own, key=looks)
    if others:
        near += nsmallest(_NUM_OTHERS, (v for v in views if v.worker in others), key=looks)
    if holders:
        having = [view for view in views if view.worker.incarnation in holders]
        most = nsmallest(NUM_HOLDERS, having, key=lambda view: num_missing(view.worker))
        near += [view for view in most if view not in near]
    return near


def soonest(
    forecasts: Sequence[tuple[V, F]], others: frozenset[WorkerId], after_s: Callable[[F], float]
) -> list[tuple[V, F]]:
    """Of what was rolled out those with the least to wait for, few of them ``others``."""
    own = [each for each in forecasts if each[0].worker not in others]
    few = nsmallest(NUM_WEIGHED, own, key=lambda each: after_s(each[1]))
    apart = (each for each in forecasts if each[0].worker in others)
    return few + nsmallest(_NUM_OTHERS, apart, key=lambda each: after_s(each[1]))
