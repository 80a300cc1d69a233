"""Who is chosen where workers say what their steps take."""

import dataclasses

import pytest

from diptych.step_model import NUM_KNOWN_STEPS, StepModel, StepWork
from router.placement import candidates
from router.placement.forecast import PrefillForecast, of_prefill
from router.placement.placement import DecodeOnly, Forecast, Paired, Placement, PrefillOnly, Why
from router.placement.promises import Promise, promised
from router.placement.query import Objectives
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId
from tests.told_caches import holds
from tests.unit.router.placement.predicted_world import (
    D1,
    D2,
    KEYS,
    MODEL,
    NO_PREFILL,
    P1,
    P2,
    QUERY,
    made,
    place,
    view_d,
    view_p,
)


def test_the_shortest_queue_and_the_shortest_step() -> None:
    chosen = place((view_p(P1, 3000), view_p(P2, 500)), (view_d(D1, 9), view_d(D2, 2)))
    assert chosen == Paired(P2, D2)
    assert isinstance(chosen, Paired)
    assert chosen.forecast is not None
    best = chosen.forecast.chosen
    assert (best.prefill, best.decode) == (P2, D2)
    assert best.ttft_s == pytest.approx(3 * 0.1 + 1.5 - 0.5 * 0.6)  # half of the step is over
    assert best.tpot_s == pytest.approx(0.04 + 3 * 0.002 + 2000 * 0.00001)
    assert best == chosen.forecast.candidates[0]
    seconds = [candidate.seconds for candidate in chosen.forecast.candidates]
    assert len(seconds) == 4
    assert seconds == sorted(seconds)


def test_a_worker_that_computes_faster_may_have_more_waiting() -> None:
    fast = MODEL._replace(prefill=MODEL.prefill._replace(prefill_token_s=0.0002))
    assert place((view_p(P1, 2000, fast), view_p(P2, 1000)), (view_d(D1),)) == Paired(P1, D1)


def test_a_cached_prefix_is_time_that_is_saved() -> None:
    policy, snapshot = made(), Snapshot((view_p(P1, 300), view_p(P2)), (view_d(D1),))
    assert policy.place(QUERY, snapshot) == Paired(P2, D1)
    holds(policy, P1, KEYS)
    assert policy.place(QUERY, snapshot) == Paired(P1, D1)
    policy.forget(P1)
    assert policy.place(QUERY, snapshot) == Paired(P2, D1)


def test_an_idle_decode_worker_computes_what_would_wait_for_long() -> None:
    """And only where what that takes is known."""
    queued = (view_p(P1, 8000),)
    assert place(queued, (view_d(D1, model=MODEL),)) == DecodeOnly(D1, Why.CHOICE)
    assert place(queued, (view_d(D1),)) == Paired(P1, D1)
    assert place(queued, (view_d(D1, model=MODEL, local_prefill=False),)) == Paired(P1, D1)


def test_a_prompt_that_is_to_be_told_of_goes_to_a_prefill_worker_however_long_it_waits() -> None:
    queued, decodes = (view_p(P1, 8000),), (view_d(D1, model=MODEL),)
    told = QUERY._replace(needs_prefill=True)
    assert place(queued, decodes, query=QUERY) == DecodeOnly(D1, Why.CHOICE)
    assert place(queued, decodes, query=told) == Paired(P1, D1)


def test_another_choice_of_a_prompt_runs_beside_the_first_one() -> None:
    policy, snapshot = made(), Snapshot((view_p(P1),), (view_d(D1), view_d(D2, 9)))
    holds(policy, D2, KEYS)
    assert policy.place(QUERY, snapshot) == Paired(P1, D1)
    beside = QUERY._replace(beside=D2, block_size=16)
    chosen = policy.place(beside, snapshot)
    assert isinstance(chosen, DecodeOnly)
    assert chosen.decode == D2


def test_a_worker_of_both_roles_whose_sequences_would_wait_is_no_better_than_a_queue() -> None:
    """They lose to a prompt that another one decodes as they do to one that stays."""
    queued, decodes = view_p(P2, 500), (view_d(P1, 20, MODEL), view_d(D1))
    assert place((view_p(P1), queued), (view_d(D1),)) == Paired(P1, D1)  # it only computes
    assert place((view_p(P1), queued), decodes) == Paired(P2, D1)
    full = dataclasses.replace(decodes[0], max_num_seqs=20)
    assert place((view_p(P1), queued), (full, decodes[1])) == Paired(P2, D1)
    assert place((view_p(P1), view_p(P2, 40_000)), decodes) == Paired(P1, D1)


def test_the_paces_of_those_who_decode_where_a_prompt_would_be_computed_count() -> None:
    snapshot = Snapshot((view_p(P1), view_p(P2, 2000)), (view_d(P1, 1, MODEL), view_d(D1)))

    def placed(promise: Promise) -> Placement | None:
        beside = dataclasses.replace(snapshot.decode[0], promised=promised([promise]))
        return made().place(
            QUERY, dataclasses.replace(snapshot, decode=(beside, snapshot.decode[1]))
        )

    assert placed(Promise(None)) == Paired(P1, D1)
    assert placed(Promise(0.05)) == Paired(P2, D1)


def test_a_decode_worker_with_many_sequences_does_not_stall_them() -> None:
    """Forty wait for each of its steps: their seconds are more than those that it would save."""
    queued = (view_p(P1, 2000),)
    assert place(queued, (view_d(D1, 40, model=MODEL),)) == Paired(P1, D1)
    assert place(queued, (view_d(D1, 1, model=MODEL),)) == DecodeOnly(D1, Why.CHOICE)


def test_objectives_come_before_seconds() -> None:
    """What computing here breaks is one objective of eight others; the queue breaks ours alone."""
    prefills, decodes = (view_p(P1, 8000),), (view_d(D1, 8, model=MODEL),)
    assert place(prefills, decodes) == DecodeOnly(D1, Why.CHOICE)
    tpot = Objectives(tpot_s=0.105)
    assert place(prefills, decodes, Objectives(ttft_s=2.0)) == DecodeOnly(D1, Why.CHOICE)
    assert place(prefills, decodes, Objectives(ttft_s=2.0, tpot_s=0.105)) == Paired(P1, D1)
    chosen = place(prefills, decodes, tpot)
    assert isinstance(chosen, Paired)
    assert chosen.forecast is not None
    assert chosen.forecast.chosen.num_missed < chosen.forecast.candidates[1].num_missed


def test_what_an_answer_costs_others_counts_for_as_long_as_it_will_be() -> None:
    """Few tokens beside others are soon over; many slow them down for long."""
    prefills = (view_p(P1),)
    decodes = (view_d(D1, 8, num_pending_tokens=0), view_d(D2, 2, proven=frozenset()))
    seconds = []
    for num_output in (1, 10, 1000):
        query = QUERY._replace(num_output_tokens=num_output)
        chosen = place(prefills, decodes, query=query)
        assert isinstance(chosen, Paired)
        assert chosen.forecast is not None
        seconds.append(chosen.forecast.chosen.seconds)
    first_s, more_s, most_s = seconds
    assert more_s - first_s == pytest.approx((most_s - first_s) * 9 / 99), "100 at the most"


def test_a_first_token_that_is_too_late_anyway_is_missed_everywhere() -> None:
    """What is left then decides among the candidates."""
    late = Objectives(ttft_s=-1.0)
    chosen = place((view_p(P1, 3000), view_p(P2, 500)), (view_d(D1),), late)
    assert chosen == Paired(P2, D1)
    assert isinstance(chosen, Paired)
    assert chosen.forecast is not None
    assert [each.num_missed for each in chosen.forecast.candidates] == [1.0, 1.0]


def test_the_least_loaded_until_steps_are_known() -> None:
    cold = tuple(view_p(worker, num, StepModel()) for worker, num in ((P1, 500), (P2, 10)))
    for prefills, decodes in (
        (cold, (view_d(D1, 3), view_d(D2, 1))),
        (
            (view_p(P1, 500), view_p(P2, 10)),
            (view_d(D1, 3, StepModel()), view_d(D2, 1, StepModel())),
        ),
    ):
        chosen = place(prefills, decodes)
        assert chosen == Paired(P2, D2)
        assert isinstance(chosen, Paired)
        assert chosen.forecast is None
    silent = dataclasses.replace(view_d(D2, 1), engine=None)
    assert place((view_p(P1),), (view_d(D1, 3), silent)) == Paired(P1, D2)


def test_who_has_just_come_is_taken_to_be_as_those_of_its_pool_that_know() -> None:
    """Each kind of step of the one that knows it best."""
    d3 = WorkerId("d3:1", "d3")
    slow = MODEL._replace(decode=MODEL.decode._replace(fixed_s=0.2, num_steps=500))
    barely = MODEL._replace(prefill=MODEL.prefill._replace(num_steps=NUM_KNOWN_STEPS - 1))
    prefills = (view_p(P1, 500), view_p(P2, 10, barely))
    for decodes, tpot_s in (
        ((view_d(D1, 3), view_d(D2, 1, StepModel())), 0.059),
        ((view_d(D1, 3), view_d(D2, 1, StepModel()), view_d(d3, 2, slow)), 0.219),
    ):
        chosen = place(prefills, decodes)
        assert chosen is not None
        assert not isinstance(chosen, PrefillOnly)
        assert chosen.forecast is not None
        told = {each.decode: each for each in chosen.forecast.candidates if each.prefill == P2}
        assert told[D2].tpot_s == pytest.approx(tpot_s)


def test_who_is_handed_over_waits_for_the_step_that_runs() -> None:
    """Of an answer of two tokens that is nearly all of its pace; of a long one it is nothing."""
    missed = []
    for num_output in (1, 100):
        query = QUERY._replace(num_output_tokens=num_output)
        chosen = place((view_p(P1),), (view_d(D1, 2),), Objectives(tpot_s=0.09), query)
        assert isinstance(chosen, Paired)
        assert chosen.forecast is not None
        missed.append(chosen.forecast.chosen.num_missed)
    short, long = missed
    assert short > 0.5
    assert long < 0.1


@pytest.mark.parametrize(("num_gaps", "share"), [(1, 0.5), (2, 0.25)])
def test_any_part_of_that_step_is_as_likely(num_gaps: int, share: float) -> None:
    """Of ``num_gaps`` between its tokens the first has it: so likely is that one too long."""
    sure = NO_PREFILL._replace(decode=MODEL.decode._replace(upper_ratio=1.01))
    before_s, after_s = map(sure.decode.expected_s, (StepWork(2, 1000), StepWork(3, 2000)))
    within_s = after_s + (1.0 - share) * before_s / num_gaps
    query = QUERY._replace(num_output_tokens=1 + num_gaps)
    chosen = place((view_p(P1),), (view_d(D1, 2, sure),), Objectives(tpot_s=within_s), query)
    assert isinstance(chosen, Paired)
    assert chosen.forecast is not None
    assert chosen.forecast.chosen.num_missed == pytest.approx(share, abs=0.05)


def test_who_is_handed_over_waits_for_prompts_that_are_computed_there() -> None:
    """What is left of them when its first token comes, parted among the gaps of its answer."""
    busy = view_d(D1, 1, MODEL)
    assert busy.engine is not None
    work = StepWork.of_prompt(400, 0)._replace(num_decode_rows=1, num_context_tokens=500)
    told = dataclasses.replace(busy.engine, work=work)
    sent = dataclasses.replace(busy.engine, num_departed_tokens=400)
    short = QUERY._replace(num_tokens=10, num_max_tokens=20)  # computed in 0.11 s

    def chosen(view: DecodeView, num_output: int) -> float:
        query = short._replace(num_max_tokens=10 + num_output)
        pair = Snapshot((view_p(P1),), (dataclasses.replace(view, local_prefill=False),))
        asked = query._replace(objectives=Objectives(tpot_s=0.07))
        placed = made().place(asked, pair)
        assert isinstance(placed, Paired)
        assert placed.forecast is not None
        return placed.forecast.chosen.num_missed

    for engine in (told, sent):
        there = dataclasses.replace(busy, engine=engine)
        assert chosen(there, 10) > 0.3, "some of 0.5 s more in nine gaps"
        assert chosen(there, 1000) < 0.3
    assert chosen(busy, 10) < 0.1


def test_what_a_prompt_costs_those_beside_it_goes_with_the_length_of_their_answers() -> None:
    """Not of its own: a second is much for ten tokens, and little for a thousand."""
    query = QUERY._replace(objectives=Objectives(9.0, 0.1), may_refuse=True)
    view, asked = view_d(D1, 1, MODEL), query._replace(num_output_tokens=100)
    for num_output, is_held in ((10, True), (1000, False), (0, False)):
        told = dataclasses.replace(view, promised=promised([Promise(0.1, num_output)]))
        snapshot = Snapshot((), (told,), has_prefill_pool=False)
        assert (made().place(asked, snapshot) is None) == is_held
    free = Snapshot((), (view,), has_prefill_pool=False)
    assert made().place(asked, free) is not None


def test_who_could_not_learn_of_prompts_yet_gets_some() -> None:
    """Without a prefill pool: else all of them would go to whoever learned first, for ever."""
    knows, cold = view_d(D1, 9, MODEL), view_d(D2, 0, NO_PREFILL)
    assert made().place(QUERY, Snapshot((), (knows, cold), has_prefill_pool=False)) == DecodeOnly(
        D2, Why.CHOICE
    )


def test_what_is_no_fresh_placement_is_as_ever() -> None:
    prefills, decodes = (view_p(P1), view_p(P2)), (view_d(D1, model=MODEL), view_d(D2, model=MODEL))
    held = QUERY._replace(on_prefill=P2)
    assert isinstance(place(prefills, decodes, query=held), Paired)
    failed = QUERY._replace(failed=frozenset({"p1", "p2"}))
    again = place(prefills, decodes, query=failed)
    assert isinstance(again, DecodeOnly)
    assert again.why is Why.RECOMPUTE
    alone = QUERY._replace(num_max_tokens=1001)
    assert isinstance(place(prefills, decodes, query=alone), PrefillOnly)
    assert place((), decodes) in {DecodeOnly(D1, Why.NO_PREFILL), DecodeOnly(D2, Why.NO_PREFILL)}


def test_nobody_is_chosen_where_nobody_has_room() -> None:
    full = view_d(D1, 4, max_num_seqs=4)
    assert place((view_p(P1),), (full,)) is None
    refused = QUERY._replace(refused=frozenset({"p1"}))
    assert place((view_p(P1), view_p(P2, 9000)), (view_d(D1),), query=refused) == Paired(P2, D1)


def test_of_many_workers_few_are_weighed() -> None:
    prefills = tuple(view_p(WorkerId(f"p{n}:1", f"p{n}"), 100 * n) for n in range(32))
    proven = frozenset(f"p{n}" for n in range(32))
    decodes = tuple(
        view_d(WorkerId(f"d{n}:1", f"d{n}"), n + 1, model=MODEL, proven=proven) for n in range(32)
    )
    chosen = place(prefills, decodes)
    assert chosen == Paired(WorkerId("p0:1", "p0"), WorkerId("d0:1", "d0"))


def test_what_first_tokens_take_beside_steps_is_learned() -> None:
    """A tenth of a second of messages; and one that took a minute changes little."""
    policy, snapshot = made(), Snapshot((view_p(P1),), (view_d(D1),))

    def foretold() -> Forecast:
        chosen = policy.place(QUERY, snapshot)
        assert isinstance(chosen, Paired)
        assert chosen.forecast is not None
        return chosen.forecast

    steps_s = foretold().chosen.ttft_s
    for _ in range(200):
        policy.came_true(foretold(), steps_s + 0.1)
    assert foretold().chosen.ttft_s == pytest.approx(steps_s + 0.1, rel=0.001)
    policy.came_true(foretold(), 60.0)
    assert foretold().chosen.ttft_s < 1.1 * (steps_s + 0.1)
    for _ in range(300):
        policy.came_true(foretold(), 0.0)
    assert foretold().chosen.ttft_s == pytest.approx(steps_s)


def many(num: int) -> Snapshot:
    """So many of each role; the first ones have the least to do."""
    proven = frozenset(f"p{n}" for n in range(num))
    return Snapshot(
        tuple(view_p(WorkerId(f"p{n}:1", f"p{n}"), 10 * n) for n in range(num)),
        tuple(view_d(WorkerId(f"d{n}:1", f"d{n}"), n // 8, proven=proven) for n in range(num)),
    )


def test_of_a_large_pool_few_queues_are_rolled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of 500 workers as of 50."""
    rolled: list[WorkerId] = []

    def counted(
        view: PrefillView | DecodeView, prompt: StepWork, now_s: float, num_passed: int = 0
    ) -> PrefillForecast | None:
        rolled.append(view.worker)
        return of_prefill(view, prompt, now_s, num_passed)

    monkeypatch.setattr(candidates, "of_prefill", counted)
    counts = []
    for num in (50, 500):
        policy = made()
        holds(policy, WorkerId("p40:1", "p40"), KEYS[:2])
        rolled.clear()
        assert policy.place(QUERY, many(num)) is not None
        assert WorkerId("p40:1", "p40") in rolled, "who has a prefix is looked at"
        counts.append(len(rolled))
    assert counts[0] == counts[1] <= 40


def test_in_a_large_pool_a_cached_prefix_still_counts() -> None:
    policy, snapshot = made(), many(100)
    holder = WorkerId("p30:1", "p30")  # half of what it saves is waiting there
    holds(policy, holder, KEYS[:38])
    chosen = policy.place(QUERY, snapshot)
    assert isinstance(chosen, Paired)
    assert chosen.prefill == holder


def test_without_a_prefill_pool_the_decode_worker_with_the_least_loss() -> None:
    """Not the one with the fewest sequences, if these are slower or wait for long prompts."""
    slow = MODEL._replace(decode=MODEL.decode._replace(fixed_s=0.2))
    decodes = (view_d(D1, 2, slow), view_d(D2, 3, MODEL))
    colocated = Snapshot((), decodes, has_prefill_pool=False)
    chosen = made().place(QUERY, colocated)
    assert chosen == DecodeOnly(D2, Why.CHOICE)
    assert isinstance(chosen, DecodeOnly)
    assert chosen.forecast is not None
    assert made()._plain.place(QUERY, colocated) == DecodeOnly(D1, Why.CHOICE)
    unknown = Snapshot((), (view_d(D1, 2), view_d(D2, 3)), has_prefill_pool=False)
    assert made().place(QUERY, unknown) == DecodeOnly(D1, Why.CHOICE), "least load until it knows"


# What is refused, or waits, by what is foretold


def test_who_passes_others_is_foretold_so() -> None:
    """A payer's first prompt waits for the step that runs, and not for those before it."""
    flooded = dataclasses.replace(
        view_p(P1, 4000), num_own_tokens=4000, own_payers=frozenset({b"flood"})
    )
    foretold_s = {}
    for payer in (b"light", b"flood"):
        query = QUERY._replace(payer=payer, needs_prefill=True)
        chosen = made().place(query, Snapshot((flooded,), (view_d(D1),)))
        assert isinstance(chosen, Paired)
        assert chosen.forecast is not None
        foretold_s[payer] = chosen.forecast.chosen.ttft_s
    assert foretold_s[b"light"] < 0.6 * foretold_s[b"flood"]
    wanted = Objectives((foretold_s[b"light"] + foretold_s[b"flood"]) / 2)
    for payer in foretold_s:
        query = QUERY._replace(payer=payer, needs_prefill=True, objectives=wanted, may_refuse=True)
        found = made().place(query, Snapshot((flooded,), (view_d(D1),)))
        assert (found is not None) is (payer == b"light")
