"""What is refused, waited for or left to others, where workers say what their steps take."""

import dataclasses

import pytest

from diptych.step_model import StepModel, StepWork
from router.placement import predicted
from router.placement.cache_index import CacheIndex
from router.placement.claim import Asked
from router.placement.forecast import PrefillForecast, of_prefill
from router.placement.least_loaded import LeastLoaded
from router.placement.overhead import Overhead
from router.placement.placement import DecodeOnly, Outlook, Paired, Placement, Unreachable, Why
from router.placement.predicted import Predicted
from router.placement.promises import Promise, promised
from router.placement.query import Objectives
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId
from tests.unit.router.placement.predicted_world import (
    D1,
    D2,
    MODEL,
    NO_OBJECTIVES,
    P1,
    P2,
    QUERY,
    made,
    place,
    view_d,
    view_p,
)


def foresee(
    prefills: tuple[PrefillView, ...],
    decodes: tuple[DecodeView, ...],
    objectives: Objectives,
    wait_s: float = 0.0,
    chance: float = 0.5,
) -> Unreachable | None:
    policy = Predicted(made()._plain, lambda: chance)
    asked = QUERY._replace(objectives=objectives, may_refuse=True)
    placed = policy.place(asked, Snapshot(prefills, decodes))
    found = policy.foresee(asked, Snapshot(prefills, decodes), wait_s)
    assert found is None or placed is None or wait_s, "it is placed, or else it is refused"
    return found


BUSY = (view_p(P1, 8000),)  # 9 s of prompts are before ours, which takes 1.2 s


def test_a_first_token_that_will_be_late_is_refused_with_when_to_come_back() -> None:
    decodes = (view_d(D1),)
    found = foresee(BUSY, decodes, Objectives(ttft_s=3.0))
    assert found is not None
    assert "wanted within 3.000 s" in found.what
    chosen = place(BUSY, decodes)
    assert isinstance(chosen, Paired)
    assert chosen.forecast is not None
    late_s = chosen.forecast.chosen.ttft_s - 3.0
    assert found.retry_after_s == pytest.approx(late_s)
    for chance, ratio in ((0.0, 0.5), (0.999, 1.499)):
        jittered = foresee(BUSY, decodes, Objectives(ttft_s=3.0), chance=chance)
        assert jittered is not None
        assert jittered.retry_after_s == pytest.approx(ratio * late_s)
    assert foresee(BUSY, decodes, Objectives(ttft_s=30.0)) is None
    assert foresee(BUSY, decodes, NO_OBJECTIVES) is None


def test_one_that_has_waited_is_told_what_it_asked_for_and_what_is_left_of_it() -> None:
    found = foresee(BUSY, (view_d(D1),), Objectives(ttft_s=1.5, whole_ttft_s=3.0))
    assert found is not None
    assert found.what.startswith(
        "ttft_ms: the first token is wanted within 3.000 s, of which 1.500 are left, "
    )
    over = foresee(BUSY, (view_d(D1),), Objectives(ttft_s=-0.5, whole_ttft_s=3.0))
    assert over is not None
    assert "of which 0.000 are left, and foretold in" in over.what
    just_came = foresee(BUSY, (view_d(D1),), Objectives(ttft_s=2.995, whole_ttft_s=3.0))
    assert just_came is not None
    assert just_came.what.startswith(
        "ttft_ms: the first token is wanted within 3.000 s and foretold in"
    )


def test_what_goes_before_it_in_the_router_counts() -> None:
    prefills, decodes, within = (view_p(P1),), (view_d(D1),), Objectives(ttft_s=3.0)
    assert foresee(prefills, decodes, within) is None
    assert foresee(prefills, decodes, within, wait_s=1.0) is None
    assert foresee(prefills, decodes, within, wait_s=2.5) is not None


def test_workers_without_room_are_judged_as_if_they_had_some() -> None:
    full = (dataclasses.replace(BUSY[0], has_runway=False),)
    decodes = (view_d(D1, 4, max_num_seqs=4),)
    assert foresee(full, decodes, Objectives(ttft_s=3.0)) is not None
    assert foresee(full, decodes, Objectives(ttft_s=30.0)) is None


def test_a_pace_that_will_be_better_is_waited_for_and_one_that_never_is_is_refused() -> None:
    """Twenty sequences make a step of 0.29 s here, one alone makes it 0.05 s."""
    prefills, crowded = (view_p(P1),), (view_d(D1, 20),)
    within = Objectives(ttft_s=3.0, tpot_s=0.1)
    asked = QUERY._replace(objectives=within)
    snapshot = Snapshot(prefills, crowded)
    assert isinstance(made().place(asked, snapshot), Paired), "admission is off"
    assert made().place(asked._replace(may_refuse=True), snapshot) is None
    assert foresee(prefills, crowded, within) is None, "it waits"
    found = foresee(prefills, crowded, Objectives(ttft_s=3.0, tpot_s=0.03))
    assert found is not None
    assert found.retry_after_s is None, "it need not come back"
    assert found.what == (
        "tpot_ms: a token is wanted each 30 ms, and no worker makes one in less than 52"
    )


def test_nothing_is_refused_while_somebodys_steps_are_not_known() -> None:
    hopeless = Objectives(ttft_s=-1.0, tpot_s=0.0001)
    asked = QUERY._replace(objectives=hopeless, may_refuse=True)
    for cold in (
        Snapshot((view_p(P1, 8000, StepModel()),), (view_d(D1),)),
        Snapshot(BUSY, (dataclasses.replace(view_d(D1), engine=None),)),
    ):
        assert made().foresee(asked, cold, 99.0) is None
        assert made().place(asked, cold) == Paired(P1, D1)
    assert made()._plain.foresee(asked, Snapshot(BUSY, (view_d(D1),)), 99.0) is None


def test_what_is_bound_already_is_never_refused() -> None:
    hopeless = QUERY._replace(objectives=Objectives(ttft_s=-1.0), may_refuse=True)
    for changes in ({"beside": D2}, {"failed": frozenset({"p2"})}, {"num_max_tokens": 1001}):
        bound = hopeless._replace(**changes)
        assert made().foresee(bound, Snapshot(BUSY, (view_d(D1),)), 0.0) is None


def test_one_of_many_that_are_refused_is_tried_so_that_a_wrong_forecast_learns_it() -> None:
    policy, snapshot = made(), Snapshot((view_p(P1),), (view_d(D1),))
    asked = QUERY._replace(objectives=Objectives(ttft_s=3.0), may_refuse=True)
    tried = policy.place(asked, snapshot)
    assert isinstance(tried, Paired)
    assert tried.forecast is not None
    for _ in range(200):  # all were slow, once
        policy.came_true(tried.forecast, 9.0)
    for _ in range(2):
        num_refused = 0
        while (chosen := policy.place(asked, snapshot)) is None:
            assert policy.foresee(asked, snapshot, 0.0) is not None
            num_refused += 1
        assert num_refused == 16
    assert isinstance(chosen, Paired)
    assert chosen.forecast is not None
    for _ in range(200):
        policy.came_true(chosen.forecast, 1.5)
    assert policy.foresee(asked, snapshot, 0.0) is None


def test_once_a_stall_is_over_one_probe_says_so() -> None:
    policy, snapshot = made(), Snapshot((view_p(P1),), (view_d(D1),))
    asked = QUERY._replace(objectives=Objectives(ttft_s=3.0), may_refuse=True)

    def num_refused() -> int:
        """Until one is placed, which has its first token as early as steps tell."""
        num = 0
        while (placed := policy.place(asked, snapshot)) is None:
            assert policy.foresee(asked, snapshot, 0.0) is not None
            num += 1
        assert isinstance(placed, Paired)
        assert placed.forecast is not None
        policy.came_true(
            placed.forecast, placed.forecast.chosen.ttft_s - placed.forecast.overhead_s
        )
        return num

    stalled = policy.place(asked, snapshot)
    assert isinstance(stalled, Paired)
    assert stalled.forecast is not None
    for _ in range(31):
        policy.came_true(stalled.forecast, 9.0)
    assert num_refused() == 16
    assert [num_refused() for _ in range(50)] == [0] * 50


@pytest.mark.parametrize("is_asked_in_vain", [True, False])
def test_what_made_first_tokens_late_is_forgotten_where_none_came_for_long(
    *, is_asked_in_vain: bool
) -> None:
    policy, snapshot = made(), Snapshot((view_p(P1),), (view_d(D1),))
    asked = QUERY._replace(objectives=Objectives(ttft_s=3.0), may_refuse=True)
    placed = policy.place(asked, snapshot)
    assert isinstance(placed, Paired)
    assert placed.forecast is not None
    for _ in range(31):
        policy.came_true(placed.forecast, placed.forecast.chosen.ttft_s + 4.0)
    assert policy.place(asked, snapshot) is None
    found = policy.foresee(asked, snapshot, 0.0)
    assert found is not None
    assert found.retry_after_s is not None, "it passes: workers that are idle could be in time"
    later = asked._replace(now_s=31.0)
    if is_asked_in_vain:  # of those that come to a queue it is asked first
        assert policy.foresee(later, snapshot, 0.0) is None
    assert isinstance(policy.place(later, snapshot), Paired)


def test_a_probe_that_is_late_too_forgets_nothing() -> None:
    overhead = Overhead()
    for _ in range(31):
        overhead.came_true(9.0, 1.0)
    overhead.came_true(6.0, 1.0, is_probe=True)
    assert overhead.expected_s == 8.0
    overhead.came_true(1.5, 1.0)
    assert overhead.expected_s == 8.0, "it was no probe"
    overhead.came_true(1.5, 1.0, is_probe=True)
    assert overhead.expected_s == 0.0


@pytest.mark.parametrize("tpot_s", [None, 0.5])
def test_while_no_prefill_worker_is_there_others_are_weighed_as_where_none_shall_be(
    tpot_s: float | None,
) -> None:
    idle, busy = view_d(D1, 0, MODEL), view_d(D2, 0, MODEL)
    assert busy.engine is not None
    work = busy.engine.work._replace(num_prefill_tokens=20_000)
    busy = dataclasses.replace(busy, engine=dataclasses.replace(busy.engine, work=work))
    asked = QUERY._replace(objectives=Objectives(3.0, tpot_s), may_refuse=True)
    placed = made().place(asked, Snapshot((), (busy, idle)))
    assert isinstance(placed, DecodeOnly)
    assert (placed.decode, placed.why) == (D1, Why.NO_PREFILL)
    assert placed.forecast is not None
    policy, late = made(), Snapshot((), (busy,))
    assert policy.place(asked, late) is None
    found = policy.foresee(asked, late, 0.0)
    assert found is not None
    assert found == policy.foresee(asked, dataclasses.replace(late, has_prefill_pool=False), 0.0)


def test_where_nobody_may_compute_locally_it_is_waited_for_prefill_workers() -> None:
    plain = LeastLoaded(
        CacheIndex(100), local_below_tokens=0, allow_local=False, allow_recompute=True
    )
    policy, snapshot = Predicted(plain, lambda: 0.5), Snapshot((), (view_d(D1, 0, MODEL),))
    asked = QUERY._replace(objectives=Objectives(0.001), may_refuse=True)
    assert policy.place(asked, snapshot) is None
    assert policy.foresee(asked, snapshot, 0.0) is None


def test_what_is_merely_foreseen_parts_nobody() -> None:
    """With room for all, workers would have other parts than they have."""
    policy = made()
    views = [WorkerId(f"w{number}:1", f"w{number}") for number in range(8)]
    snapshot = Snapshot(
        tuple(view_p(worker) for worker in views),
        tuple(view_d(worker, 0, MODEL, max_num_seqs=4) for worker in views),
    )
    asked = QUERY._replace(objectives=Objectives(60.0, 0.5))
    parts = set()
    for _ in range(12):
        policy.place(asked, snapshot)
        parts.add(policy._parting._parts)
        policy.foresee(asked, snapshot, 0.0)
        policy._held = None
        assert policy._parting._parts in parts
    assert any(each.computing for each in parts)


def test_who_is_tried_is_one_of_many_refused_in_a_row() -> None:
    """Each between two that are placed is none of those."""
    policy, snapshot = made(), Snapshot((view_p(P1, 8000),), (view_d(D1),))
    late = QUERY._replace(objectives=Objectives(ttft_s=3.0), may_refuse=True)
    for _ in range(100):
        assert policy.place(QUERY, snapshot) is not None
        assert policy.place(late, snapshot) is None
        assert policy.foresee(late, snapshot, 0.0) is not None


def test_a_worker_that_is_idle_while_many_are_refused_is_tried_though_others_serve() -> None:
    """Its steps look slow, and nothing would ever show that they are not."""
    slow = StepModel(MODEL.decode._replace(fixed_s=1.0), MODEL.prefill)
    idle, busy = view_d(D2, 0, slow), view_d(D1, 20)
    policy, snapshot = made(), Snapshot((view_p(P1),), (busy, idle))
    asked = QUERY._replace(objectives=Objectives(3.0, 0.1), may_refuse=True)
    hopeless = asked._replace(objectives=Objectives(0.001, 0.1))
    roomy = Snapshot((view_p(P1),), (view_d(D1), idle))
    for number in range(16):
        assert policy.place(asked, snapshot) is None, number
        assert policy.foresee(hopeless, snapshot, 0.0) is not None
        served = policy.place(asked, roomy)
        assert isinstance(served, Paired)
        assert served.decode == D1
    tried = policy.place(asked, snapshot)
    assert isinstance(tried, Paired | DecodeOnly)
    assert tried.decode == D2
    assert policy.place(asked, snapshot) is None, "one is enough to learn from"


@pytest.mark.parametrize("num_rows", [0, 3])
def test_none_is_tried_where_the_pace_is_not_at_fault_or_somebody_decodes(num_rows: int) -> None:
    """Sixteen were refused that want no pace; or else the worker is idle no more."""
    slow = StepModel(MODEL.decode._replace(fixed_s=1.0), MODEL.prefill)
    policy = made()
    tpot_s = None if not num_rows else 0.1
    hopeless = QUERY._replace(objectives=Objectives(0.001, tpot_s), may_refuse=True)
    idle = Snapshot((view_p(P1),), (view_d(D1, 20), view_d(D2, 0, slow)))
    for _ in range(16):
        assert policy.foresee(hopeless, idle, 0.0) is not None
        assert policy.place(QUERY, Snapshot((view_p(P1),), (view_d(D1),))) is not None
    now = Snapshot((view_p(P1),), (view_d(D1, 20), view_d(D2, num_rows, slow)))
    asked = QUERY._replace(objectives=Objectives(3.0, 0.1), may_refuse=True)
    assert policy.place(asked, now) is None


def test_what_was_weighed_for_a_place_is_not_weighed_again_to_foresee(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rolled: list[WorkerId] = []

    def counted(
        view: PrefillView | DecodeView, prompt: StepWork, now_s: float, num_passed: int = 0
    ) -> PrefillForecast | None:
        rolled.append(view.worker)
        return of_prefill(view, prompt, now_s, num_passed)

    monkeypatch.setattr(predicted, "of_prefill", counted)
    policy, snapshot = made(), Snapshot((view_p(P1), view_p(P2)), (view_d(D1, 20),))
    waits = QUERY._replace(objectives=Objectives(3.0, 0.1), may_refuse=True)
    assert policy.place(waits, snapshot) is None
    num_weighed = len(rolled)
    later = waits._replace(objectives=Objectives(2.999, 0.1))
    assert policy.foresee(later, snapshot, 0.0) is None
    assert len(rolled) == num_weighed
    assert policy.foresee(later, snapshot, 0.0) is None
    assert len(rolled) == 2 * num_weighed, "it was just now no more"


def test_what_is_late_on_idle_workers_need_not_come_back() -> None:
    """The prompt takes 1.2 s there, whatever waits."""
    found = foresee(BUSY, (view_d(D1),), Objectives(ttft_s=1.0))
    assert found is not None
    assert found.retry_after_s is None
    waited = foresee(BUSY, (view_d(D1),), Objectives(ttft_s=0.0, whole_ttft_s=3.0))
    assert waited is not None
    assert waited.retry_after_s is not None, "it waited too long"


def paced(
    num: int, tpot_s: float | None, policy: Predicted, own_s: float = 0.1
) -> Placement | None:
    """One beside so many that were promised ``tpot_s``; about 0.09 s are foretold."""
    view = dataclasses.replace(view_d(D1, 5), promised=promised([Promise(tpot_s)] * num))
    asked = QUERY._replace(objectives=Objectives(9.0, own_s), may_refuse=True)
    return policy.place(asked, Snapshot((view_p(P1),), (view,)))


def test_others_hold_one_by_what_was_promised_to_them() -> None:
    """Its own pace would be kept; five others' are as they were promised, if they were."""
    assert paced(5, 0.1, made()) is None
    assert isinstance(paced(5, None, made()), Paired), "nothing was"
    assert isinstance(paced(5, 0.1, made(), 0.3), Paired), "they wanted more than any of its kind"
    assert isinstance(paced(0, None, made()), Paired), "nothing that this router knows of"


def test_what_was_promised_to_others_counts_for_one_that_was_promised_nothing() -> None:
    policy, snapshot = made(), Snapshot((view_p(P1),), (view_d(D1, 5), view_d(D2, 7)))
    assert policy.place(QUERY, snapshot) == Paired(P1, D1)
    paced = dataclasses.replace(snapshot.decode[0], promised=promised([Promise(0.1)] * 5))
    snapshot = dataclasses.replace(snapshot, decode=(paced, snapshot.decode[1]))
    assert policy.place(QUERY, snapshot) == Paired(P1, D2)
    held = QUERY._replace(may_refuse=True)
    assert policy.place(held, snapshot) is not None, "but it is never held for them"


def test_only_who_misses_objectives_was_declined_and_not_who_lacks_room() -> None:
    """Others are kept from workers for the one, and not for the other."""
    policy, decodes = made(), (view_d(D1, 20),)
    asked = QUERY._replace(objectives=Objectives(9.0, 0.1), may_refuse=True)
    full = Snapshot(
        (dataclasses.replace(view_p(P1), has_runway=False),), (view_d(D1, model=MODEL),)
    )
    alone = asked._replace(num_max_tokens=asked.num_tokens + 1)
    assert not policy.has_declined
    assert policy.place(asked, Snapshot((view_p(P1),), decodes)) is None
    assert policy.has_declined
    assert full.has_room_for([Asked(b"any")]), "for others"
    assert policy.place(alone, full) is None
    assert not policy.has_declined
    assert policy.place(asked, Snapshot((view_p(P1),), decodes)) is None
    assert policy.place(asked, Snapshot((view_p(P1),), (view_d(D1),))) is not None
    assert not policy.has_declined


@pytest.mark.parametrize(
    ("prefill", "num_own", "num_others", "is_barred"),
    [
        (P1, 0.4, 0.0, False),
        (P1, 0.6, 0.0, True),
        (P1, 0.0, 0.28, False),
        (P1, 0.0, 0.32, True),
        (P1, 0.3, 0.25, True),
        (None, 0.4, 0.0, False),
        (None, 0.0, 0.08, False),
        (None, 0.0, 0.12, True),
    ],
)
def test_what_others_would_lose_bars_sooner_than_what_it_would_lose_itself(
    prefill: WorkerId | None, num_own: float, num_others: float, is_barred: bool
) -> None:
    outlook = Outlook(prefill, D1, 0.1, 0.01, 9.0, 1.0, num_own + num_others, num_own)
    assert predicted._is_barred(outlook) is is_barred
