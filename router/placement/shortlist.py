"""Of large pools, the workers that are worth a look ahead. Pure."""

from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import Final, Generic, NamedTuple, TypeVar

from router.placement.forecast import DecodeForecast, PrefillForecast
from router.placement.views import DecodeView, PrefillView, WorkerId

NUM_WEIGHED: Final = 8  # of each pool, those with the least to wait for
# Of larger pools not every queue is rolled out, but those that look short, and who has a prefix.
_NUM_ROLLED_OUT: Final = 16
NUM_HOLDERS: Final = 4
_NUM_OTHERS: Final = 4  # of workers of both roles, that have the other part
_NUM_FIRST: Final = 2  # of those that were chosen: one does not pair with itself
_NUM_PARTNERS: Final = 8  # of the other pool's, that were not chosen for themselves
_MOST_LACKING: Final = 32  # for whom one is looked for: there may be none, in a large pool

V = TypeVar("V", bound=PrefillView | DecodeView)
F = TypeVar("F", PrefillForecast, DecodeForecast)
A = TypeVar("A")
B = TypeVar("B")


class Chosen(NamedTuple, Generic[A]):
    """A few of one pool."""

    few: Sequence[A]  # unless they are all there are, those come first that are first
    every: Sequence[A]
    order: Callable[[A], float]  # the least is the first


def near(
    views: Sequence[V],
    holders: set[str],
    others: frozenset[WorkerId],
    looks: Callable[[V], float],
    num_missing: Callable[[WorkerId], int],
) -> Chosen[V]:
    """Those that are idle as it ``looks``, or with a prefix: incarnations of ``holders``, of which
    that many tokens are missing.

    ``others`` have another part, so only a few are.
    """
    if len(views) <= _NUM_ROLLED_OUT:
        return Chosen(views, views, looks)
    own = [view for view in views if view.worker not in others] if others else views
    near = nsmallest(_NUM_ROLLED_OUT, own, key=looks)
    if others:
        near += nsmallest(_NUM_OTHERS, (v for v in views if v.worker in others), key=looks)
    if holders:
        having = [view for view in views if view.worker.incarnation in holders]
        most = nsmallest(NUM_HOLDERS, having, key=lambda view: num_missing(view.worker))
        found = {view.worker for view in near}
        near += [view for view in most if view.worker not in found]
    return Chosen(near, views, looks)


def soonest(
    forecasts: Sequence[tuple[V, F]], others: frozenset[WorkerId], after_s: Callable[[F], float]
) -> Chosen[tuple[V, F]]:
    """Of what was rolled out those with the least to wait for, few of them ``others``."""

    def order(each: tuple[V, F]) -> float:
        return after_s(each[1])

    if len(forecasts) <= _NUM_OTHERS:
        return Chosen(forecasts, forecasts, order)
    own = [each for each in forecasts if each[0].worker not in others]
    few = sorted(own, key=order)[:NUM_WEIGHED]
    apart = [each for each in forecasts if each[0].worker in others]
    return Chosen(few + sorted(apart, key=order)[:_NUM_OTHERS], forecasts, order)


def partnered(
    one: Chosen[A], other: Chosen[B], is_pair: Callable[[A, B], bool]
) -> tuple[Sequence[A], Sequence[B]]:
    """Those of both pools that were chosen, and the first that pair with each of the other pool.

    Where all pairs are proven these are the few as they were. But it may be so within zones only,
    and the soonest of one pool be in another zone than those of the other pool, and the best of
    both in a third one.
    """
    return (
        _with_partners(one, other, is_pair),
        _with_partners(other, one, lambda each, that: is_pair(that, each)),
    )


def _with_partners(
    chosen: Chosen[A], others: Chosen[B], is_pair: Callable[[A, B], bool]
) -> Sequence[A]:
    """Not too many more; rather for those of the ``others`` that are first."""
    few, every, order = chosen
    if len(few) == len(every):
        return few
    lacking: Sequence[B] = others.every
    for each in few[:_NUM_FIRST]:  # nearly always that is all
        lacking = [other for other in lacking if not is_pair(each, other)]
    if not lacking:
        return few
    ordered, found = sorted(every, key=order), {id(each): each for each in few}
    for other in nsmallest(_MOST_LACKING, lacking, key=others.order):
        first = next((each for each in ordered if is_pair(each, other)), None)
        if first is not None:
            found[id(first)] = first
        if len(found) == len(few) + _NUM_PARTNERS:
            break
    return [*found.values()]
