"""Who counts beside a request, and for how much: those that are told of, and all others."""

import dataclasses
from typing import Any

import pytest

from diptych.paced import Paced
from diptych.step_model import StepWork
from router.placement.forecast import PrefillForecast, Span, of_decode
from router.placement.placement import DecodeOnly, Outlook, Paired
from router.placement.promises import Promise, promised
from router.placement.query import Objectives
from router.placement.told_paces import told_paces
from router.placement.views import DecodeView, Snapshot
from tests.unit.router.placement.predicted_world import P1, made, view_p
from tests.unit.router.placement.test_told_paces import (
    MODEL,
    QUERY,
    ROWS_COST,
    TINY,
    beside_rows,
    in_time,
    placed,
    worker,
)


def chosen(view: DecodeView, *promises: Promise) -> Outlook:
    """Beside those, for a prompt that is not refused; 40 tokens cannot bear its half a second."""
    view = dataclasses.replace(view, promised=promised(promises))
    query = QUERY._replace(num_output_tokens=40, may_refuse=False)
    placement = made().place(query, Snapshot(decode=(view,), has_prefill_pool=False))
    assert isinstance(placement, DecodeOnly)
    assert placement.forecast is not None
    return placement.forecast.chosen


def told_as(view: DecodeView, **changes: Any) -> DecodeView:
    assert view.engine is not None
    return dataclasses.replace(view, engine=dataclasses.replace(view.engine, **changes))


def test_who_asks_for_a_tighter_pace_is_held_up_by_a_looser_one_that_it_breaks() -> None:
    loose = Paced(0.05, 0.05 * 200 - 1.4, 100, 100)
    assert placed(worker(loose)) is None


@pytest.mark.parametrize(
    ("lost_s", "num_queued", "is_placed"),
    [(0.5, 0, True), (0.9, 0, False), (0.5, 800, False), (1.3, 0, True)],
)
def test_a_tighter_pace_bars_where_even_the_requests_own_is_broken(
    lost_s: float, num_queued: int, is_placed: bool
) -> None:
    """21 ms leave 0.2 s more than 20; of who has lost 1.3 s even that is broken as it is."""
    looser = QUERY._replace(objectives=Objectives(5.0, 0.021))
    assert (placed(worker(in_time(lost_s), num_queued=num_queued), query=looser) is not None) is (
        is_placed
    )


def test_who_may_miss_its_pace_as_it_is_is_judged_by_the_steps_that_are_there() -> None:
    """Of 15.5 ms steps of 15 leave little; one sequence more takes 20."""
    query = TINY._replace(num_output_tokens=90)
    assert placed(beside_rows(0.0155), query=query) is None


def test_one_sequence_more_slows_nobody_down_for_longer_than_it_decodes() -> None:
    """Ten tokens at 20 ms fit into 205, however long the new one stays."""
    view = told_as(worker(Paced(0.05, 0.05 * 110 - 10 * 0.0205, 100, 10)), model=ROWS_COST)
    assert placed(view, query=TINY._replace(num_output_tokens=90)) is not None


@pytest.mark.parametrize(("num_output", "is_placed"), [(10, True), (90, False)])
def test_whose_prompt_is_computed_elsewhere_is_one_more_where_it_decodes(
    num_output: int, is_placed: bool
) -> None:
    target = beside_rows(0.0165, local_prefill=False, proven=frozenset({"p1"}))
    query = TINY._replace(num_output_tokens=num_output)
    placement = made().place(query, Snapshot((view_p(P1, model=MODEL),), (target,)))
    assert isinstance(placement, Paired) is is_placed


def test_what_prompts_take_is_beside_steps_without_them() -> None:
    """Two steps, of which those that decode have a token each 15 ms, whatever prompts took."""
    view = beside_rows(0.0165, num_queued=1500, prefill_time_ratio=0.5)
    view = told_as(
        view, model=ROWS_COST._replace(decode=ROWS_COST.decode._replace(context_token_s=1e-6))
    )
    pace = of_decode(view, 1000)
    assert pace is not None
    told = told_paces(view, pace, 1000)
    assert told.before.expected_s == pytest.approx(0.0155)
    assert told.after.expected_s == pytest.approx(0.0215), "it has 1,000 tokens"
    assert told.queued_s == pytest.approx(0.75 - 2 * 0.0155)
    computed = PrefillForecast(Span(0.5, 0.5), 0.5, 2)
    assert told.beside(computed).stalled_s == pytest.approx(0.5 - 2 * 0.0155)


def test_who_is_told_of_is_no_stranger() -> None:
    """Those have time to spare; of two that were sent since by others nobody knows."""
    view = worker(*[in_time()] * 4)
    assert chosen(view).num_missed == pytest.approx(0.0, abs=0.01)
    more = dataclasses.replace(view, num_sequences=6)
    assert chosen(more).num_missed == pytest.approx(2.0, abs=0.01)
    assert chosen(more).num_barring == pytest.approx(0.0, abs=0.01)


def test_of_those_that_are_not_told_of_no_more_were_promised_a_pace_than_were_placed() -> None:
    view = dataclasses.replace(worker(in_time()), num_sequences=4)
    outlook = chosen(view, Promise(0.02, 40))
    assert outlook.num_missed == pytest.approx(1.0 + 2.0, abs=0.01)
    assert outlook.num_barring == pytest.approx(1.0, abs=0.01)


def test_who_is_not_told_of_bars_as_it_was_promised() -> None:
    view = dataclasses.replace(worker(*[in_time()] * 4), num_sequences=5)
    assert chosen(view, Promise(0.02, 40)).num_barring == pytest.approx(1.0, abs=0.01)


def test_who_has_ended_since_hides_nobody_who_came_since() -> None:
    """The worker told of one that decodes; that one is over, and another one is at its prompt."""
    view = told_as(worker(in_time()), paced=(), num_ended_rows=1)
    assert chosen(view, Promise(0.02, 40)).num_barring == pytest.approx(1.0, abs=0.01)
    assert chosen(view).num_missed == pytest.approx(1.0, abs=0.01), "a stranger"


def test_who_has_ended_since_leaves_its_context_to_nobody() -> None:
    """A new one has its own, and those that stay have their part."""
    model = ROWS_COST._replace(decode=ROWS_COST.decode._replace(context_token_s=1e-6))
    told = told_as(worker(in_time(), in_time()), model=model, work=StepWork(2, 200))
    idle = dataclasses.replace(told_as(told, num_ended_rows=2), num_sequences=0)
    stays = dataclasses.replace(told_as(told, num_ended_rows=1), num_sequences=1)
    for view, num_there, context in ((idle, 0, 0), (stays, 1, 100), (told, 2, 200)):
        pace = of_decode(view, 30_000)
        assert pace is not None
        assert pace.num_rows == num_there
        work = StepWork(num_there, context)
        assert pace.before.expected_s == pytest.approx(model.decode.expected_s(work))
        more = StepWork(num_there + 1, context + 30_000)
        assert pace.after.expected_s == pytest.approx(model.decode.expected_s(more))


def test_each_counts_by_its_own_pace_and_length() -> None:
    """A short one with much time and a long one with little bear half a second; neither would
    with the other's."""
    view = told_as(dataclasses.replace(worker(), num_sequences=2), paced=None)
    both = Promise(0.2, 16), Promise(0.0165, 4096)
    assert chosen(view, *both).num_missed == pytest.approx(0.0, abs=0.05)
    assert chosen(view, Promise(0.0165, 16)).num_missed > 0.9


def test_who_has_ended_since_slows_nobody() -> None:
    told = told_as(worker(*[in_time()] * 4), model=ROWS_COST)
    left = dataclasses.replace(told_as(told, num_ended_rows=3), num_sequences=1)
    four, one = of_decode(told, 100), of_decode(left, 100)
    alone = of_decode(told_as(worker(in_time()), model=ROWS_COST), 100)
    assert four is not None
    assert one is not None
    assert one == alone
    assert one.after.expected_s < four.before.expected_s


def test_where_nothing_is_told_all_promises_count() -> None:
    view = told_as(worker(in_time()), paced=None)
    assert chosen(view, *[Promise(0.02, 40)] * 2).num_missed == pytest.approx(2.0, abs=0.01)


def test_where_it_is_told_that_nobody_has_a_pace_nobody_can_miss_one() -> None:
    view = told_as(worker(in_time(), in_time()), paced=())
    assert chosen(view).num_missed == pytest.approx(0.0, abs=0.01)
    assert chosen(view, *[Promise()] * 2).num_missed == pytest.approx(0.0, abs=0.01)


def test_whoever_decodes_without_a_pace_or_has_lost_it_is_told_of_too() -> None:
    view = told_as(worker(in_time()), work=StepWork(3, 1500))
    view = dataclasses.replace(view, num_sequences=3)
    assert chosen(view).num_missed == pytest.approx(0.0, abs=0.01)
    lost = told_as(worker(in_time()), paced=())
    assert chosen(lost).num_missed == pytest.approx(0.0, abs=0.01)


def test_each_way_counts_by_how_likely_it_is() -> None:
    """With 30 tokens to come one misses its pace by the prompt, and with a hundred it does not."""
    ways = in_time()._replace(share=0.75), in_time(num_more=30)._replace(share=0.25)
    view = dataclasses.replace(told_as(worker(*ways), work=StepWork(1, 500)), num_sequences=1)
    outlook = chosen(view)
    assert outlook.num_missed == pytest.approx(0.25, abs=0.01)
    assert outlook.num_barring == pytest.approx(0.25, abs=0.01)
