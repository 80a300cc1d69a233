"""Workers of both roles: each has a part, and leaves it where objectives are at stake."""

from dataclasses import replace

import pytest

from diptych.step_model import StepModel, StepWork
from router.placement.parting import Parting
from router.placement.placement import DecodeOnly, Paired
from router.placement.predicted import Predicted
from router.placement.query import Objectives, Query
from router.placement.views import DecodeView, EngineView, Snapshot
from tests.unit.router.placement.predicted_world import D1, D2, MODEL, P1, made, view_d, view_p


def soft(num_queued: int = 0, num_rows: int = 2) -> Snapshot:
    """Two workers of both roles: the first has so many tokens of prompts, the other sequences."""
    work = StepWork.of_prompt(num_queued, 0)._replace(num_decode_rows=2, num_context_tokens=1000)
    busy = EngineView(model=MODEL, max_batched_tokens=512, work=work)
    first = view_d(D1, 2, MODEL, proven=frozenset({"d2"}), engine=busy)
    other = view_d(D2, num_rows, MODEL, proven=frozenset({"d1"}))
    computing = replace(view_p(D1, num_queued), engine=busy)
    return Snapshot((computing, replace(view_p(D2), engine=other.engine)), (first, other))


QUERY_OF_PACE = Query(num_tokens=300, num_max_tokens=330, objectives=Objectives(5.0, 0.15))
MOSTLY_PROMPT = QUERY_OF_PACE._replace(num_max_tokens=305)
MOSTLY_ANSWER = QUERY_OF_PACE._replace(num_max_tokens=600, num_output_tokens=300)


@pytest.mark.parametrize("usual", [MOSTLY_PROMPT, MOSTLY_ANSWER])
def test_two_workers_of_both_roles_compute_what_they_decode_where_one_phase_takes_more(
    usual: Query,
) -> None:
    """Whatever they have done of late; what has to be told of a prompt is no matter of theirs."""
    policy, snapshot = parted(usual), soft()
    first, other = snapshot.decode
    for num_rows, chosen in ((0, D2), (9, D1)):
        rows = view_d(D2, num_rows, MODEL, proven=other.proven, prefill_time_ratio=0.8)
        placement = policy.place(usual, replace(snapshot, decode=(first, rows)))
        assert isinstance(placement, DecodeOnly)
        assert placement.decode == chosen
    told = policy.place(usual._replace(needs_prefill=True), snapshot)
    assert isinstance(told, Paired)


def test_a_worker_that_only_computes_prompts_does_so_for_two_of_both_roles() -> None:
    policy, snapshot = parted(MOSTLY_PROMPT), soft()
    beside = replace(snapshot, prefill=(*snapshot.prefill, view_p(P1)))
    assert isinstance(policy.place(MOSTLY_PROMPT, snapshot), DecodeOnly)
    assert isinstance(policy.place(MOSTLY_PROMPT, beside), Paired)


def test_only_two_that_can_do_everything_are_each_for_itself() -> None:
    parting, snapshot = Parting(), soft()
    first, other = snapshot.decode
    whole = parting.together(snapshot)
    assert whole is not None
    assert whole.prefill == ()
    beside = replace(snapshot, prefill=(*snapshot.prefill, view_p(P1)))
    assert parting.together(beside) is None, "a worker that only computes prompts has to"
    assert parting.together(Snapshot((), snapshot.decode)) is None
    half = replace(snapshot, prefill=snapshot.prefill[:1])
    assert parting.together(half) is None, "the other one only decodes"
    apart = replace(snapshot, decode=(first, replace(other, local_prefill=False)))
    assert parting.together(apart) is None


def test_what_each_is_by_itself_is_made_once_for_all_that_are_weighed_by_it() -> None:
    parting, snapshot = Parting(), soft()
    busy = replace(snapshot, decode=tuple(map(_busy, snapshot.decode)))
    whole = parting.together(busy)
    assert whole is not None
    assert [view.prefill_time_ratio for view in whole.decode] == [0.0, 0.0]
    assert parting.together(busy) is whole
    assert parting.together(replace(busy, has_prefill_pool=False)) is not whole


def _busy(view: DecodeView) -> DecodeView:
    return replace(view, prefill_time_ratio=0.3)


def test_two_that_have_parted_stay_so_where_the_mix_is_about_as_it_was() -> None:
    """As near to the border they part anew only where it is well within."""
    policy, snapshot = made(), soft()
    between = QUERY_OF_PACE._replace(num_max_tokens=350, num_output_tokens=50)
    for _ in range(20):
        policy.place(between, snapshot)
    assert isinstance(policy.place(between, snapshot), DecodeOnly)
    policy = parted()
    for _ in range(200):
        policy.place(between, snapshot)
    assert isinstance(policy.place(between, snapshot), Paired)


def test_two_part_where_one_that_only_decodes_makes_several_answers_at_a_time() -> None:
    """The tighter the pace the fewer: fewer than twelve undo it, and at first it takes more."""
    snapshot = soft()

    def are_apart(parting: Parting, *paces_s: float) -> bool:
        whole: Snapshot | None = snapshot
        for pace_s in paces_s:
            usual = Query(num_tokens=300, num_max_tokens=330, objectives=Objectives(5.0, pace_s))
            for _ in range(400):
                parting.learn(usual, 300, 2)
            whole = parting.together(snapshot)
        return whole is None

    sixteen_s, thirteen_s, eleven_s = 0.15, 0.13, 0.115
    assert are_apart(Parting(), sixteen_s)
    assert not are_apart(Parting(), thirteen_s)
    assert are_apart(Parting(), sixteen_s, thirteen_s)
    assert not are_apart(Parting(), sixteen_s, eleven_s)
    assert not are_apart(Parting(), sixteen_s, eleven_s, thirteen_s)


def test_the_fewer_answers_one_makes_the_nearer_to_half_prompts_have_to_be() -> None:
    """Else the one that decodes idles, and parting wins nothing for that."""
    for num_output, pace_s, are_apart in (
        (30, 0.15, True),  # 0.61 of the time, 16 answers
        (20, 0.15, False),  # 0.70, 16
        (25, 0.2, True),  # 0.68, 25
    ):
        usual = Query(
            num_tokens=300, num_max_tokens=300 + num_output, objectives=Objectives(5.0, pace_s)
        )
        parting = Parting()
        for _ in range(10):
            parting.learn(usual, 300, 2)
        assert (parting.together(soft()) is None) is are_apart, (num_output, pace_s)


@pytest.mark.parametrize(("computing_s", "decoding_s"), [(0.0, 0.048), (0.06, 0.03)])
def test_once_they_are_apart_only_the_one_that_decodes_says_how_many(
    computing_s: float, decoding_s: float
) -> None:
    """What the other one learned of that is old by then, and wrong by any number."""
    usual = Query(num_tokens=300, num_max_tokens=335, objectives=Objectives(5.0, 0.13))
    parting, snapshot = Parting(), soft()
    for _ in range(10):
        parting.learn(usual, 300, 2)
    alike = told(snapshot, 0.03, 0.03)
    assert parting.together(alike) is None
    assert parting.parts(alike).decoding == {D2}
    later = told(snapshot, computing_s, decoding_s)
    assert (parting.together(later) is None) is (decoding_s < 0.04)


def test_what_one_of_the_two_learned_of_late_does_not_part_them() -> None:
    """What steps take varies: it is the average of both that counts."""
    usual = Query(num_tokens=300, num_max_tokens=335, objectives=Objectives(5.0, 0.13))
    snapshot = soft()
    for costs, are_apart in (((0.02, 0.04), True), ((0.04, 0.02), True), ((0.035, 0.045), False)):
        parting = Parting()
        for _ in range(10):
            parting.learn(usual, 300, 2)
        assert (parting.together(told(snapshot, *costs)) is None) is are_apart, costs


def told(snapshot: Snapshot, *constants_s: float) -> Snapshot:
    """With such steps of its workers that decode."""
    views = (
        replace(view, engine=replace(view.engine, model=with_constant(fixed_s)))
        for view, fixed_s in zip(snapshot.decode, constants_s, strict=True)
        if view.engine is not None
    )
    return replace(snapshot, decode=tuple(views))


def with_constant(fixed_s: float) -> StepModel:
    """Steps that only decode take that and 4.5 ms for each of about three hundred tokens."""
    return MODEL._replace(decode=MODEL.decode._replace(fixed_s=fixed_s))


def parted(usual: Query = QUERY_OF_PACE) -> Predicted:
    """One that has seen such requests."""
    policy = made()
    for _ in range(20):
        policy.place(usual, soft())
    return policy


def test_of_workers_of_both_roles_some_compute_and_others_decode() -> None:
    placement = parted().place(QUERY_OF_PACE, soft())
    assert isinstance(placement, Paired)
    assert (placement.prefill, placement.decode) == (D1, D2)


def test_whose_part_is_to_decode_computes_what_would_be_late_elsewhere() -> None:
    placement = parted().place(QUERY_OF_PACE, soft(num_queued=20_000))
    assert isinstance(placement, DecodeOnly)
    assert placement.decode == D2


def test_a_worker_without_sequences_computes_whatever_its_part_is_where_that_is_sooner() -> None:
    """It keeps nobody waiting, and nobody said how soon a first token is soon enough."""
    policy = parted()
    query = QUERY_OF_PACE._replace(objectives=Objectives(None, 0.15))
    assert isinstance(policy.place(query, soft(num_queued=1_000)), Paired)
    alone = policy.place(query, soft(num_queued=1_000, num_rows=0))
    assert isinstance(alone, DecodeOnly)
    assert alone.decode == D2


def test_a_worker_without_sequences_is_kept_for_answers_while_first_tokens_are_in_time() -> None:
    """Elsewhere, that is: those that come would wait for the prompt."""
    policy = parted()
    assert isinstance(policy.place(QUERY_OF_PACE, soft(num_queued=1_000, num_rows=0)), Paired)
    alone = policy.place(QUERY_OF_PACE, soft(num_queued=20_000, num_rows=0))
    assert isinstance(alone, DecodeOnly)
    assert alone.decode == D2


def test_what_it_computed_of_prompts_keeps_nobody_from_a_worker_that_bears_no_more() -> None:
    """Its part is to decode, and the next one's pace bars further prompts: it is as fast as ever.

    Who bears prompts beside its tokens is told that there will be some.
    """
    policy, before = parted(), soft(num_rows=0)
    first, other = before.decode
    after = replace(before, decode=(first, replace(other, prefill_time_ratio=0.5)))
    for tpot_s, is_slower in ((0.055, False), (0.5, True)):
        query = QUERY_OF_PACE._replace(num_max_tokens=320, objectives=Objectives(5.0, tpot_s))
        paces = []
        for snapshot in (before, after):
            placement = policy.place(query, snapshot)
            assert isinstance(placement, Paired | DecodeOnly)
            assert placement.decode == D2
            assert placement.forecast is not None
            paces.append(placement.forecast.chosen.tpot_s)
        assert (paces[1] > 1.1 * paces[0]) is is_slower
