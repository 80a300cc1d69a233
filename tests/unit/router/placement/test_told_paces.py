"""Placement beside sequences of which workers tell how far they are."""

import dataclasses
from typing import Any

import pytest

from diptych.paced import Paced
from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel, StepWork
from router.placement.placement import DecodeOnly, Paired, Placement
from router.placement.promises import Promise, promised
from router.placement.query import Objectives, Query
from router.placement.views import DecodeView, EngineView, PrefillView, Snapshot
from tests.unit.router.placement.predicted_world import D1, D2, made

# A token each 10 ms whoever else decodes; a prompt of 1,000 tokens takes half a second.
MODEL = StepModel(
    StepCost(0.01, 0.0, 0.0, 0.0, 0.0, 1.05, NUM_KNOWN_STEPS),
    StepCost(0.0, 0.0, 0.0, 0.0005, 0.0, 1.05, NUM_KNOWN_STEPS),
)
QUERY = Query(
    num_tokens=1000,
    num_max_tokens=1100,
    num_output_tokens=100,
    objectives=Objectives(5.0, 0.02),
    may_refuse=True,
)


def worker(*paced: Paced, num_queued: int = 0, **changes: Any) -> DecodeView:
    """One that decodes those, told just now, with prompts of so many tokens before it."""
    num = len(paced)
    engine = EngineView(
        model=MODEL,
        max_batched_tokens=1000,
        work=StepWork(num, 500 * num, num_queued),
        paced=paced,
        prefill_age_s=0.0 if num_queued else None,
    )
    view = DecodeView(
        worker=D1,
        num_sequences=num,
        max_model_len=4096,
        local_prefill=True,
        proven=frozenset(),
        engine=engine,
    )
    return dataclasses.replace(view, **changes)


def placed(*decodes: DecodeView, query: Query = QUERY) -> Placement | None:
    return made().place(query, Snapshot(decode=decodes, has_prefill_pool=False))


def in_time(lost_s: float = 0.0, num_more: int = 100) -> Paced:
    """Half way, with so many tokens to come; it gains 10 ms with each, and has lost so much."""
    return Paced(0.02, 0.02 * 100 + lost_s, 100, num_more)


def test_a_prompt_that_breaks_a_pace_which_earlier_ones_wore_down_is_refused() -> None:
    """100 tokens gain 1 s: who lost 0.4 s can lose half a second more, who lost 0.6 s cannot."""
    assert placed(worker(in_time(0.4))) is not None
    assert placed(worker(in_time(0.6))) is None


def test_prompts_that_are_there_are_to_be_lost_yet() -> None:
    assert placed(worker(in_time())) is not None
    assert placed(worker(in_time(), num_queued=700)) is not None  # 0.35 s
    assert placed(worker(in_time(), num_queued=1200)) is None  # 0.6 s
    begun = worker(in_time(0.1), num_queued=1200)
    assert begun.engine is not None
    begun = dataclasses.replace(begun, engine=dataclasses.replace(begun.engine, prefill_age_s=0.3))
    assert placed(begun) is not None, "half of them is in what it has lost"


def test_near_its_end_there_is_less_to_gain() -> None:
    assert placed(worker(in_time(num_more=80))) is not None
    assert placed(worker(in_time(num_more=30))) is None


def test_who_has_missed_its_pace_whatever_comes_bars_nobody() -> None:
    assert placed(worker(in_time(lost_s=3.0))) is not None


def test_who_asked_for_less_is_not_held_up_by_a_tighter_pace() -> None:
    """Its own pace is what others are to leave it."""
    patient = QUERY._replace(objectives=Objectives(5.0, 0.2))
    assert placed(worker(in_time(0.6)), query=patient) is not None
    aimless = QUERY._replace(objectives=Objectives(5.0, None))
    assert placed(worker(in_time(0.6)), query=aimless) is not None


def test_of_two_workers_it_goes_where_nobody_loses_its_pace() -> None:
    """Though more decode there."""
    worn = worker(in_time(0.6))
    calm = dataclasses.replace(worker(in_time(), in_time(), in_time()), worker=D2)
    placement = placed(worn, calm)
    assert isinstance(placement, DecodeOnly)
    assert placement.decode == D2


@pytest.mark.parametrize("num_sent", [0, 4])
def test_those_that_were_sent_since_count_by_what_they_were_promised(num_sent: int) -> None:
    """Each expects 40 tokens, so that half a second is more than it gains."""
    sent = promised([Promise(0.02, 40)] * num_sent)
    view = dataclasses.replace(worker(in_time()), num_sequences=1 + num_sent, promised=sent)
    assert (placed(view) is None) == bool(num_sent)


def test_of_a_worker_that_does_not_tell_those_promises_are_all_that_is_known() -> None:
    view = worker(in_time())
    assert view.engine is not None
    silent = dataclasses.replace(view.engine, paced=None)
    there = promised([Promise(0.02, 40)])
    assert placed(dataclasses.replace(view, engine=silent, promised=there)) is None


def test_what_prompts_take_of_the_time_of_both_roles_is_in_how_far_they_are() -> None:
    """Foretold from that part once more, it would have missed its pace already, and bar nobody.

    Each of its 100 tokens may take 14 ms, and 9 ms with another prompt.
    """
    loose = QUERY._replace(objectives=Objectives(5.0, 0.05))
    worn = Paced(0.05, 0.05 * 200 - 1.4, 100, 100)
    assert placed(worker(worn, prefill_time_ratio=0.6), query=loose) is None
    ample = Paced(0.05, 0.05 * 200 - 4.0, 100, 100)
    assert placed(worker(ample, prefill_time_ratio=0.6), query=loose) is not None


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.8, 0.9])
def test_a_prompt_takes_as_long_of_each_however_many_were_computed_of_late(ratio: float) -> None:
    """90 ms of who has 50 ms to spare, and 150 ms; what the request itself expects is no matter."""
    short = QUERY._replace(num_tokens=200, objectives=Objectives(5.0, 0.2))
    for spare_s, is_placed in ((0.05, False), (0.15, True)):
        one = Paced(0.2, 0.2 * 200 - 1.0 - spare_s, 100, 100)
        placement = placed(worker(one, prefill_time_ratio=ratio), query=short)
        assert (placement is not None) is is_placed, spare_s


def test_what_prompts_attend_to_that_were_sent_since_is_to_be_lost_too() -> None:
    """3,000 tokens of others, 0.3 s but for what they attend to: 0.45 s with it, as for ours."""
    costly = MODEL._replace(prefill=StepCost(0.0, 0.0, 0.0, 0.0001, 1e-7, 1.05, NUM_KNOWN_STEPS))
    query = QUERY._replace(num_tokens=3000, num_max_tokens=3100)
    view = worker(in_time(-0.1))
    assert view.engine is not None
    free = dataclasses.replace(view.engine, model=costly)
    assert placed(dataclasses.replace(view, engine=free), query=query) is not None
    sent = dataclasses.replace(free, num_departed_tokens=3000)
    assert placed(dataclasses.replace(view, engine=sent), query=query) is None


def test_a_prompt_for_another_worker_costs_those_beside_whom_it_is_computed() -> None:
    """Who decodes it slows nobody down here, and computes nothing."""
    source = dataclasses.replace(worker(in_time(0.6)), proven=frozenset({"d2"}))
    computing = PrefillView(
        worker=D1, num_pending_tokens=0, max_model_len=4096, engine=source.engine
    )
    target = dataclasses.replace(
        worker(in_time(0.6)), worker=D2, local_prefill=False, proven=frozenset({"d1"})
    )
    assert made().place(QUERY, Snapshot((computing,), (source, target))) is None
    calm = dataclasses.replace(source, engine=worker(in_time()).engine)
    computing = dataclasses.replace(computing, engine=calm.engine)
    placement = made().place(QUERY, Snapshot((computing,), (calm, target)))
    assert placement is not None


# A token takes 10 ms and 5 ms for each that decodes.
ROWS_COST = MODEL._replace(decode=StepCost(0.01, 0.005, 0.0, 0.0, 0.0, 1.02, NUM_KNOWN_STEPS))
TINY = QUERY._replace(num_tokens=10, objectives=Objectives(5.0, 0.05))


def beside_rows(allowed_s: float, **changes: Any) -> DecodeView:
    """Decodes one that may take so long for each of a hundred tokens, and takes 15 ms."""
    view = worker(Paced(0.05, 0.05 * 200 - 100 * allowed_s, 100, 100), **changes)
    assert view.engine is not None
    engine = dataclasses.replace(view.engine, model=ROWS_COST)
    return dataclasses.replace(view, engine=engine)


@pytest.mark.parametrize(("num_output", "is_placed"), [(10, True), (90, False)])
def test_one_sequence_more_slows_others_down_while_it_is_there(
    num_output: int, is_placed: bool
) -> None:
    """By 5 ms with each of its tokens, of the 165 ms that the other one has to spare."""
    query = TINY._replace(num_output_tokens=num_output)
    assert (placed(beside_rows(0.0165), query=query) is not None) is is_placed


def test_who_only_computes_a_prompt_takes_no_place_among_those_that_decode() -> None:
    source = beside_rows(0.0165, proven=frozenset({"d2"}))
    computing = PrefillView(
        worker=D1, num_pending_tokens=0, max_model_len=4096, engine=source.engine
    )
    target = dataclasses.replace(worker(), worker=D2, local_prefill=False, proven=frozenset({"d1"}))
    query = TINY._replace(num_output_tokens=90)
    placement = made().place(query, Snapshot((computing,), (source, target)))
    assert isinstance(placement, Paired)
    assert placement.prefill == D1


def test_who_is_told_of_counts_by_that_and_who_is_not_by_what_it_was_promised() -> None:
    there = promised([Promise(0.02, 40)])  # one prompt is more than that bears
    view = dataclasses.replace(worker(*[in_time()] * 4), num_sequences=5, promised=there)
    placement = placed(view, query=QUERY._replace(may_refuse=False))
    assert isinstance(placement, DecodeOnly)
    assert placement.forecast is not None
    assert placement.forecast.chosen.num_missed == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("share", "is_placed"), [(0.08, True), (0.12, False)])
def test_who_may_be_near_its_end_bars_by_how_likely_that_is(share: float, is_placed: bool) -> None:
    """With 100 tokens to come it bears the prompt, and with 30 it does not."""
    ways = in_time()._replace(share=1.0 - share), in_time(num_more=30)._replace(share=share)
    there = dataclasses.replace(worker(*ways), num_sequences=1)
    assert there.engine is not None
    engine = dataclasses.replace(there.engine, work=StepWork(1, 500))
    assert (placed(dataclasses.replace(there, engine=engine)) is not None) is is_placed
