"""Of many pairs only those are looked at in full that may be among the best, and none is missed."""

import random
from dataclasses import replace
from heapq import nsmallest
from operator import itemgetter
from typing import Any

import pytest

from diptych.block_needs import ShippedBytes
from diptych.paced import Paced
from diptych.step_model import StepModel
from router.placement import candidates
from router.placement.cache_index import CacheIndex
from router.placement.candidates import Overheads, weigh
from router.placement.forecast import Span
from router.placement.glance import taken_alike
from router.placement.least_loaded import LeastLoaded
from router.placement.loss import least_slow_ratio, slow_ratio
from router.placement.parting import Parting
from router.placement.promises import Promised
from router.placement.query import Objectives
from router.placement.shortlist import NUM_WEIGHED
from router.placement.views import DecodeView, EngineView, Snapshot, WorkerId
from router.placement.weighed import Candidate, Weighed
from tests.unit.router.placement.predicted_world import MODEL, QUERY, view_d, view_p

NUM_BEST = 4
SOME_TOKENS = (1, 2, 30, 300)  # of answers


def weighed(rng: random.Random, num_workers: int, *, of_both: bool) -> Weighed:
    """Of a random request among random workers."""
    sources = [WorkerId(f"p{i}:1", f"p{i}") for i in range(num_workers)]
    targets = sources if of_both else [WorkerId(f"d{i}:1", f"d{i}") for i in range(num_workers)]
    first, *others = (decoding(worker, sources, rng) for worker in targets)
    snapshot = Snapshot(
        tuple(view_p(worker, rng.randrange(3000)) for worker in sources),
        (replace(first, local_prefill=True), *others),
    )
    query = QUERY._replace(
        num_max_tokens=QUERY.num_tokens + 400,
        num_output_tokens=rng.choice(SOME_TOKENS),
        objectives=Objectives(
            rng.choice([None, 0.5, 1.5, 4.0]), rng.choice([None, 0.03, 0.06, 0.09, 0.2])
        ),
    )
    index = CacheIndex(100)
    plain = LeastLoaded(index, local_below_tokens=0, allow_local=True, allow_recompute=True)
    overheads = Overheads(0.01, rng.choice([0.0, 0.02, 0.5]))
    found = weigh(query, snapshot, plain, Parting(), overheads)
    assert found is not None
    return found


def decoding(worker: WorkerId, sources: list[WorkerId], rng: random.Random) -> DecodeView:
    """One with anything to do, and links of any speed."""
    near = rng.sample(sources, rng.randrange(1, len(sources) + 1))
    proven = frozenset(each.incarnation for each in near) - {worker.incarnation}
    view = view_d(
        worker,
        rng.randrange(30),
        MODEL,
        proven=proven,
        bytes_per_s={each: rng.choice([0.0, 1e6, 1e8, 1e9]) for each in sorted(proven)},
        shipped=ShippedBytes.even(46080.0),
        promised=Promised(1, ((rng.choice([0.05, 0.1]), 60, 1.0),)),
        local_prefill=rng.random() < 0.7,
    )
    assert view.engine is not None
    paced = tuple(Paced(0.08, rng.uniform(0.0, 5.0), 50, rng.randrange(1, 90)) for _ in range(4))
    queued = view.engine.work._replace(num_prefill_tokens=rng.choice([0, 0, 700]))
    return replace(view, engine=replace(view.engine, paced=paced, work=queued))


@pytest.mark.parametrize("of_both", [False, True])
@pytest.mark.parametrize("seed", range(150))
def test_the_best_are_those_of_all(seed: int, *, of_both: bool) -> None:
    rng = random.Random(seed)
    found = weighed(rng, rng.choice([2, 5, 12]), of_both=of_both)
    every = found.where(lambda _, decode: decode is not None)
    assert len(every) == len(found) > 0
    loss, outlook = itemgetter(0), itemgetter(1)
    assert found.best(NUM_BEST) == nsmallest(NUM_BEST, every, key=loss)
    assert found.best(1) == [min(every, key=loss)]
    assert found.best(1000) == sorted(every, key=loss)
    assert found.soonest_s == min(outlook(each).ttft_s for each in every)


def test_few_of_many_pairs_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is all that is saved by it."""
    num_looked = 0
    look = candidates._Candidates._pair

    def counted(self: Any, source: Any, target: Any) -> Candidate:
        nonlocal num_looked
        num_looked += 1
        return look(self, source, target)

    monkeypatch.setattr(candidates._Candidates, "_pair", counted)
    num_pairs = 0
    for seed in range(20):
        found = weighed(random.Random(seed), 12, of_both=False)
        found.best(NUM_BEST)
        num_pairs += len(found)
    assert 20 < num_looked < 0.4 * num_pairs


def test_what_others_lose_is_not_asked_where_the_first_token_would_be_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of twelve workers of both roles, four have no prompts that wait."""
    asked: list[str] = []
    look = candidates._Candidates._beside_decoding

    def counted(self: Any, view: DecodeView, computed: Any) -> Any:
        asked.append(view.worker.incarnation)
        return look(self, view, computed)

    monkeypatch.setattr(candidates._Candidates, "_beside_decoding", counted)
    workers = [WorkerId(f"p{i}:1", f"p{i}") for i in range(12)]
    proven = frozenset(worker.incarnation for worker in workers)
    decode = [
        view_d(worker, 5, MODEL, proven=proven - {worker.incarnation}, local_prefill=False)
        for worker in workers
    ]
    prefill = [view_p(worker, 9000 * (i >= NUM_BEST)) for i, worker in enumerate(workers)]
    query = QUERY._replace(objectives=Objectives(2.0, None))
    index = CacheIndex(100)
    plain = LeastLoaded(index, local_below_tokens=0, allow_local=True, allow_recompute=True)
    snapshot = Snapshot(tuple(prefill), tuple(decode))
    found = weigh(query, snapshot, plain, Parting(), Overheads(0.01, 0.0))
    assert found is not None
    assert not asked
    best = found.best(NUM_BEST)
    assert sorted(asked) == ["p0", "p1", "p2", "p3"]
    every = found.where(lambda *_: True)
    assert len(asked) == NUM_WEIGHED
    assert best == nsmallest(NUM_BEST, every, key=itemgetter(0))


def test_only_those_on_wanted_workers_are_looked_at() -> None:
    found = weighed(random.Random(7), 5, of_both=False)
    wanted = {WorkerId("p1:1", "p1"), WorkerId("d1:1", "d1"), WorkerId("d3:1", "d3")}
    some = found.where(lambda prefill, decode: decode in wanted and prefill in {None, *wanted})
    ways = {(each[1].prefill, each[1].decode) for each in some}
    assert ways
    assert all({prefill, decode} - {None} <= wanted for prefill, decode in ways)
    every = {(each[1].prefill, each[1].decode) for each in found.where(lambda *_: True)}
    assert ways == {way for way in every if set(way) - {None} <= wanted}


def test_no_answer_is_less_likely_too_slow_than_the_least() -> None:
    """Also where the longest waits make it so by less than counts."""
    rng = random.Random(1)
    for _ in range(3000):
        expected_s = rng.uniform(0.02, 0.1)
        pace = Span(expected_s, expected_s * rng.uniform(1.0, 1.5))
        longest_s = rng.choice([0.0, 0.01, 0.5])
        waits_s = [longest_s, 0.5 * longest_s] if rng.random() < 0.8 else []
        tpot_s, num_tokens = expected_s * rng.uniform(0.9, 2.0), rng.choice(SOME_TOKENS)
        ratio = slow_ratio(pace, tpot_s, num_tokens, rng.choice([0.0, 0.02]), waits_s)
        assert least_slow_ratio(pace, tpot_s) <= ratio + 1e-12
    assert least_slow_ratio(pace, None) == slow_ratio(pace, None, 30) == 0.0


def test_a_pool_of_which_one_does_not_know_its_steps_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Views are not compared with each other, which are long."""
    views = [view_p(WorkerId(f"p{i}:1", f"p{i}")) for i in range(20)]
    new = view_p(WorkerId("new:1", "new"), model=StepModel())
    monkeypatch.setattr(EngineView, "__eq__", None)  # whoever compares fails
    *known, last = taken_alike([*views, new], "prefill")
    assert [view.worker for view in known] == [view.worker for view in views]
    assert last.engine is not None
    assert last.engine.model == StepModel(prefill=MODEL.prefill)
