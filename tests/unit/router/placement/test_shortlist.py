"""Of large pools whose pairs are proven within zones, good pairs are among those weighed."""

import random
from dataclasses import replace

import pytest

from router.placement.cache_index import CacheIndex
from router.placement.candidates import Overheads, weigh
from router.placement.least_loaded import LeastLoaded
from router.placement.parting import Parting
from router.placement.query import Objectives
from router.placement.shortlist import NUM_WEIGHED, Chosen, partnered
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId
from router.placement.weighed import Weighed
from tests.unit.router.placement.predicted_world import MODEL, QUERY, view_d, view_p

GOALS = Objectives(6.0, 0.1)


def zones(nums: list[tuple[int, int]], size: int = 12) -> Snapshot:
    """Of so many prefill and so many decode workers each. ``nums``: tokens that wait on the first
    of the former, and sequences that each of the latter has.
    """
    prefill: list[PrefillView] = []
    decode: list[DecodeView] = []
    for zone, (num_waiting, num_rows) in enumerate(nums):
        sources = [WorkerId(f"z{zone}p{i}:1", f"z{zone}p{i}") for i in range(size)]
        targets = [WorkerId(f"z{zone}d{i}:1", f"z{zone}d{i}") for i in range(size)]
        proven = frozenset(each.incarnation for each in sources)
        prefill += (view_p(each, num_waiting + 100 * i) for i, each in enumerate(sources))
        decode += (
            view_d(each, num_rows, MODEL, proven=proven, local_prefill=False) for each in targets
        )
    return Snapshot(tuple(prefill), tuple(decode))


def weighed(snapshot: Snapshot, objectives: Objectives = GOALS) -> Weighed:
    plain = LeastLoaded(
        CacheIndex(100), local_below_tokens=0, allow_local=True, allow_recompute=True
    )
    query = QUERY._replace(objectives=objectives)
    found = weigh(query, snapshot, plain, Parting(), Overheads(0.01, 0.0))
    assert found is not None
    return found


def pairs(found: Weighed) -> set[tuple[str, str]]:
    """Incarnations."""
    outlooks = (outlook for _, outlook in found.where(lambda *_: True))
    return {
        (each.prefill.incarnation, each.decode.incarnation) for each in outlooks if each.prefill
    }


@pytest.mark.parametrize("size", [9, 12, 24])
def test_the_soonest_of_one_zone_and_the_fastest_of_another_leave_pairs_of_both(size: int) -> None:
    """Prompts are soonest in the first zone, and answers fastest in the second."""
    found = weighed(zones([(0, 9), (2500, 1)], size))
    assert {(source[:2], target[:2]) for source, target in pairs(found)} == {
        ("z0", "z0"),
        ("z1", "z1"),
    }
    sources = {source for source, _ in pairs(found)}
    assert {"z0p0", "z1p0"} <= sources, "of each zone the one that is soonest"


@pytest.mark.parametrize(
    ("objectives", "zone"),
    [(Objectives(2.5, 0.2), "z0"), (Objectives(9.0, 0.06), "z1")],
)
def test_the_best_pair_is_found_in_whichever_zone_it_is(objectives: Objectives, zone: str) -> None:
    best = weighed(zones([(0, 12), (2500, 1)]), objectives).best(1)[0][1]
    assert best.prefill is not None
    assert (best.prefill.incarnation, best.decode.incarnation[:2]) == (f"{zone}p0", zone)


def test_each_of_many_zones_is_looked_at() -> None:
    found = weighed(zones([(0, 12), (900, 11), (1800, 2), (2700, 1)]))
    assert {source[:2] for source, _ in pairs(found)} == {"z0", "z1", "z2", "z3"}


def test_the_best_pair_is_found_where_both_are_neither_the_soonest_nor_the_fastest() -> None:
    found = weighed(zones([(0, 12), (500, 2), (2500, 1)]), Objectives(3.0, 0.08))
    best = found.best(1)[0][1]
    assert best.prefill is not None
    assert (best.prefill.incarnation, best.decode.incarnation[:2]) == ("z1p0", "z1")


def test_where_all_pairs_are_proven_no_more_are_looked_at_than_the_soonest() -> None:
    snapshot, rng = zones([(0, 9), (2500, 1)]), random.Random(2)
    proven = frozenset(view.worker.incarnation for view in snapshot.prefill)
    views = [replace(view, proven=proven) for view in snapshot.decode]
    rng.shuffle(views)
    found = weighed(replace(snapshot, decode=tuple(views)))
    assert len(found) == NUM_WEIGHED**2


def divides(one: int, other: int) -> bool:
    return other % one == 0


def test_of_each_of_the_other_pool_the_first_that_pairs_with_it_is_there() -> None:
    every = [9, 8, 7, 6, 5, 4, 3]
    chosen = Chosen([3, 4], every, float)
    assert partnered(chosen, Chosen([60], [60, 12], float), divides) == ([3, 4], [60])
    assert partnered(chosen, Chosen([49], [49, 11, 25], float), divides)[0] == [3, 4, 5, 7]
    assert partnered(chosen, Chosen([11], [11, 40], float), divides) == ([3, 4], [11, 40])
    whole = Chosen([11], [11], float)
    assert partnered(Chosen(every, every, float), whole, divides) == (every, [11])


def test_where_each_has_one_partner_not_too_many_more_are_looked_at() -> None:
    every = [float(number) for number in range(64)]
    ones, others = Chosen(every[:8], every, float), Chosen(every[56:], every, lambda each: -each)
    few, fast = partnered(ones, others, lambda one, other: one == other)
    assert (few[8:], fast[8:]) == (every[:55:-1], every[:8])
