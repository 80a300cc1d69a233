"""Who yields waits while others have tokens to compute, and leaves for them, but not for ever."""

import math
from concurrent.futures import Future
from dataclasses import replace

import pytest

from diptych.engine.scheduling.queues import GivingWay
from diptych.engine.scheduling.scheduler import Scheduler
from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.engine.scheduling.step import SampledToken, SequenceUpdate, StepOutput, StepPlan
from diptych.engine.scheduling.yielding import (
    MOST_PASSED_S,
    MOST_PREEMPTIONS,
    QUIET_S,
    ShortSteps,
)
from diptych.errors import BlocksComingError, BlocksExhaustedError
from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel, StepWork
from router.placement.spare import BATCH_SPARE_ONLY_S
from tests.unit.engine.scheduling.steps import (
    make_scheduler,
    make_sequence,
    sequences_of,
    start_local,
    step,
)

WORK = StepWork.of_prompt(1000, 0)
PER_TOKEN_S = 0.001


def add(scheduler: Scheduler, num_tokens: int, token_id: int, *, yields: bool) -> Sequence:
    seq = make_sequence([token_id] * num_tokens, prefill_only=True)
    seq.yields = yields
    scheduler.add_prefill(seq)
    return seq


def lengths(
    scheduler: Scheduler, max_yielding_tokens: int | None = None, now_s: float = 0.0
) -> dict[Sequence, int]:
    """One step: how many tokens of each sequence it computes."""
    _, updates = step(scheduler, max_yielding_tokens, now_s)
    return {update.sequence: update.num_step_tokens for update in updates}


def model_of(constant_s: float, num_steps: int = NUM_KNOWN_STEPS) -> StepModel:
    return StepModel(
        StepCost(), StepCost(constant_s, prefill_token_s=PER_TOKEN_S, num_steps=num_steps)
    )


def after_others(at_s: float = 0.0) -> ShortSteps:
    short = ShortSteps(512)
    short.admitted(make_sequence([1]), at_s)
    return short


@pytest.mark.parametrize(("max_num_seqs", "num_set_aside"), [(8, 0), (1, 1)])
def test_a_prompt_that_comes_later_is_computed_first_and_alone(
    max_num_seqs: int, num_set_aside: int
) -> None:
    """One that is begun leaves its place, where that is wanted."""
    scheduler = make_scheduler(64, max_num_seqs=max_num_seqs, max_batched_tokens=16)
    of_batch = add(scheduler, 40, 1, yields=True)
    assert lengths(scheduler) == {of_batch: 16}
    other = add(scheduler, 20, 2, yields=False)
    assert lengths(scheduler) == {other: 16}
    assert lengths(scheduler) == {other: 4}
    assert lengths(scheduler) == {of_batch: 16}
    assert (scheduler.num_set_aside, scheduler.num_preemptions) == (num_set_aside, 0)


def test_prompts_that_wait_come_by_class_and_then_by_arrival() -> None:
    scheduler = make_scheduler(32, max_num_seqs=2, max_batched_tokens=16)
    batch = [add(scheduler, 8, number, yields=True) for number in (1, 2)]
    others = [add(scheduler, 8, number, yields=False) for number in (3, 4)]
    assert sequences_of(step(scheduler)[1]) == others
    assert sequences_of(step(scheduler)[1]) == batch


def test_a_prompt_that_left_its_place_keeps_the_blocks_that_readers_know_of() -> None:
    """Though others compute the same meanwhile."""
    scheduler = make_scheduler(64, max_num_seqs=1, max_batched_tokens=16)
    of_batch = add(scheduler, 40, 1, yields=True)
    step(scheduler)
    table = list(of_batch.block_table)
    twin = add(scheduler, 40, 1, yields=False)
    assert lengths(scheduler) == {twin: 16}
    assert lengths(scheduler) == {twin: 8}
    assert lengths(scheduler) == {of_batch: 16}
    assert of_batch.block_table == table
    assert lengths(scheduler) == {of_batch: 8}


def test_single_tokens_go_on_beside_prompts_of_others() -> None:
    scheduler = make_scheduler(64, max_num_seqs=8, max_batched_tokens=16)
    seq = make_sequence([1] * 4)
    seq.yields = True
    start_local(scheduler, seq)
    step(scheduler)
    other = add(scheduler, 20, 2, yields=False)
    assert lengths(scheduler) == {seq: 1, other: 12}


def test_they_share_a_step_of_so_many_tokens() -> None:
    scheduler = make_scheduler(64, max_num_seqs=8, max_batched_tokens=16)
    first, second = add(scheduler, 10, 1, yields=True), add(scheduler, 30, 2, yields=True)
    assert lengths(scheduler, max_yielding_tokens=12) == {first: 10}
    assert lengths(scheduler, max_yielding_tokens=12) == {second: 12}
    assert lengths(scheduler) == {second: 16}


def test_a_long_one_gets_no_more_of_what_is_left() -> None:
    scheduler = make_scheduler(64, max_num_seqs=8, max_batched_tokens=16)
    long = add(scheduler, 40, 1, yields=True)
    assert lengths(scheduler, max_yielding_tokens=8) == {long: 8}


def test_others_are_not_held_to_it() -> None:
    scheduler = make_scheduler(64, max_num_seqs=8, max_batched_tokens=16)
    other = add(scheduler, 16, 1, yields=False)
    assert lengths(scheduler, max_yielding_tokens=4) == {other: 16}


def test_whoever_was_passed_by_for_long_goes_like_any_other() -> None:
    scheduler = make_scheduler(64, max_num_seqs=8, max_batched_tokens=16)
    of_batch = add(scheduler, 16, 1, yields=True)
    others = [add(scheduler, 16, 2 + number, yields=False) for number in range(4)]
    assert lengths(scheduler, now_s=5.0) == {others[0]: 16}
    assert lengths(scheduler, now_s=4.9 + MOST_PASSED_S) == {others[1]: 16}
    assert lengths(scheduler, now_s=5.0 + MOST_PASSED_S) == {others[2]: 16}
    assert lengths(scheduler, now_s=5.1 + MOST_PASSED_S) == {of_batch: 16}
    assert of_batch.has_aged


def test_only_who_is_passed_by_on_end_ages() -> None:
    scheduler = make_scheduler(64, max_num_seqs=8, max_batched_tokens=16)
    of_batch = add(scheduler, 40, 1, yields=True)
    for now_s in (0.0, MOST_PASSED_S):
        other = add(scheduler, 16, 2 + int(now_s), yields=False)
        assert lengths(scheduler, now_s=now_s) == {other: 16}
        assert lengths(scheduler, now_s=now_s) == {of_batch: 16}
    assert not of_batch.has_aged


def test_a_worker_passes_by_as_long_as_a_router() -> None:
    assert MOST_PASSED_S == BATCH_SPARE_ONLY_S


def test_steps_are_as_large_as_any_where_nobody_else_comes() -> None:
    short = ShortSteps(512)
    seq = make_sequence([1])
    seq.yields = True
    short.admitted(seq, 0.0)
    assert short.max_tokens(WORK, model_of(0.0), 0.0) is None
    assert after_others(3.0).max_tokens(WORK, model_of(0.0), 2.9 + QUIET_S) is not None
    assert after_others(3.0).max_tokens(WORK, model_of(0.0), 3.0 + QUIET_S) is None


@pytest.mark.parametrize(
    ("model", "num_tokens"),
    [
        (model_of(0.0), 50),  # 50 ms
        (model_of(0.004), 46),
        (model_of(0.04), 360),  # a tenth of 400 ms is the constant
        (model_of(0.1), 512),  # as many as a step can have
        (model_of(0.12), None),  # all that there is
        (model_of(0.0, num_steps=0), 128),  # a quarter, while nothing is known
    ],
)
def test_a_step_is_short_but_mostly_of_use(model: StepModel, num_tokens: int | None) -> None:
    assert after_others().max_tokens(WORK, model, 1.0) == num_tokens


def test_single_tokens_in_the_step_count_as_its_constant() -> None:
    model = StepModel(StepCost(), StepCost(0.0, 0.002, 0.0, PER_TOKEN_S, 0.0, 1.0, NUM_KNOWN_STEPS))
    beside = WORK._replace(num_decode_rows=5)
    assert after_others().max_tokens(beside, model, 1.0) == 90


def test_without_prompts_there_is_nothing_to_bound() -> None:
    assert after_others().max_tokens(StepWork(num_decode_rows=3), model_of(0.0), 1.0) is None


def decoding(scheduler: Scheduler, token_id: int, *, yields: bool, num_tokens: int = 4) -> Sequence:
    """One that has drawn its first token."""
    seq = make_sequence([token_id] * num_tokens)
    seq.yields = yields
    start_local(scheduler, seq)
    while not seq.num_output_tokens:
        step(scheduler)
    return seq


def reserved(num_tokens: int, token_id: int = 9) -> Sequence:
    return make_sequence([token_id] * num_tokens)


def test_a_place_in_the_batch_is_left_with_all_blocks_kept() -> None:
    scheduler = make_scheduler(32, max_num_seqs=2)
    first, last = (decoding(scheduler, each, yields=True) for each in (1, 2))
    blocks, num_computed = last.block_table.copy(), last.num_computed_tokens
    other = start_local(scheduler, reserved(4))
    assert sequences_of(step(scheduler)[1]) == [first, other]
    assert last.state is SequenceState.WAITING
    assert (last.block_table, last.num_computed_tokens) == (blocks, num_computed)
    assert (scheduler.num_set_aside, scheduler.num_preemptions) == (1, 0)
    scheduler.release(other)
    assert sequences_of(step(scheduler)[1]) == [first, last]
    assert last.token_ids[4:] == [7] * last.num_output_tokens


def test_nobody_leaves_a_place_for_one_that_is_not_prepared() -> None:
    scheduler = make_scheduler(32, max_num_seqs=2)
    rows = [decoding(scheduler, each, yields=True) for each in (1, 2)]
    other = reserved(4)
    other.preparation = preparing = Future[None]()
    start_local(scheduler, other)
    assert sequences_of(step(scheduler)[1]) == rows
    assert scheduler.num_set_aside == 0
    preparing.set_result(None)
    assert sequences_of(step(scheduler)[1]) == [rows[0], other]


def test_nobody_leaves_a_place_for_one_that_gives_way_too() -> None:
    scheduler = make_scheduler(32, max_num_seqs=1)
    first = decoding(scheduler, 1, yields=True)
    second = make_sequence([2] * 4)
    second.yields = True
    start_local(scheduler, second)
    assert sequences_of(step(scheduler)[1]) == [first]


def test_a_reservation_takes_blocks_of_the_last_that_gives_way_and_of_no_more() -> None:
    scheduler = make_scheduler(16)
    first, last = (decoding(scheduler, each, yields=True, num_tokens=24) for each in (1, 2))
    seq = reserved(20)
    scheduler.reserve(seq)
    assert seq.state is SequenceState.RESERVED
    assert not last.block_table
    assert first.block_table
    assert (last.num_preemptions, scheduler.num_batch_preemptions) == (1, 1)


def batch_at_work() -> tuple[Scheduler, Sequence, StepPlan]:
    """One sequence of a batch, with nearly all blocks, and the step that it is in."""
    scheduler = make_scheduler(16)
    of_batch = decoding(scheduler, 1, yields=True, num_tokens=50)
    plan = scheduler.schedule()
    assert plan is not None
    return scheduler, of_batch, plan


def end(scheduler: Scheduler, plan: StepPlan) -> list[SequenceUpdate]:
    output = StepOutput(tokens=(SampledToken(7, math.nan),), duration_s=0.0)
    return scheduler.update(plan, output)


def test_of_those_at_work_a_reservation_gets_the_blocks_when_the_step_has_ended() -> None:
    scheduler, of_batch, plan = batch_at_work()
    seq = reserved(20)
    with pytest.raises(BlocksComingError):
        scheduler.reserve(seq)
    assert of_batch.block_table
    assert scheduler.schedule() is None, "no step is planned ahead of those that leave"
    (update,) = end(scheduler, plan)
    assert update.token is not None
    scheduler.reserve(seq)
    assert not of_batch.block_table
    assert of_batch.token_ids[50:] == [7, 7]


@pytest.mark.parametrize(("num_places", "is_ahead"), [(2, False), (3, True)])
def test_no_step_is_planned_ahead_of_a_place_that_is_to_be_left(
    num_places: int, is_ahead: bool
) -> None:
    """Else rows whose steps are always planned ahead would keep it for ever."""
    scheduler = make_scheduler(32, max_num_seqs=num_places)
    for token_id in (1, 2):
        decoding(scheduler, token_id, yields=True)
    assert scheduler.schedule() is not None
    start_local(scheduler, reserved(4))
    assert (scheduler.schedule() is not None) is is_ahead


def test_who_has_left_and_is_back_goes_on_as_any() -> None:
    """Its steps are planned ahead again, and nobody has it leave once more."""
    scheduler, of_batch, plan = batch_at_work()
    seq = reserved(20)
    with pytest.raises(BlocksComingError):
        scheduler.reserve(seq)
    end(scheduler, plan)
    scheduler.reserve(seq)
    scheduler.release(seq)
    for _ in range(2):
        assert sequences_of(step(scheduler)[1]) == [of_batch]
    assert scheduler.schedule() is not None
    assert scheduler.schedule() is not None, "ahead"
    assert of_batch.num_preemptions == 1


def test_a_prompt_that_is_held_for_readers_takes_blocks_as_a_reservation_does() -> None:
    scheduler, of_batch, plan = batch_at_work()
    with pytest.raises(BlocksComingError):
        add(scheduler, 20, 2, yields=False)
    with pytest.raises(BlocksExhaustedError) as caught:
        add(scheduler, 20, 2, yields=True)
    assert not isinstance(caught.value, BlocksComingError)
    end(scheduler, plan)
    seq = add(scheduler, 20, 2, yields=False)
    assert not of_batch.block_table
    step(scheduler)
    assert seq.state is SequenceState.LEASED
    scheduler.release(seq)
    step(scheduler)
    assert of_batch.token_ids[50:] == [7, 7, 7], "it goes on"


@pytest.mark.parametrize("ends", [False, True])
def test_who_leaves_and_ends_by_itself_is_waited_for_while_it_is_at_work(ends: bool) -> None:
    scheduler = make_scheduler(16)
    of_batch = decoding(scheduler, 1, yields=True, num_tokens=50)
    of_batch.sampling = replace(of_batch.sampling, stop_token_ids=frozenset({9}))
    plans = [scheduler.schedule(), scheduler.schedule()]
    seq = reserved(20)
    for plan in plans:
        with pytest.raises(BlocksComingError):
            scheduler.reserve(seq)
        assert plan is not None
        token = SampledToken(9 if ends else 7, math.nan)
        scheduler.update(plan, StepOutput(tokens=(token,), duration_s=0.0))
        assert (of_batch.state is SequenceState.FINISHED) == ends
    scheduler.reserve(seq)
    assert not of_batch.block_table
    assert of_batch.num_preemptions == (0 if ends else 1)


def test_those_that_give_way_are_counted_with_their_blocks() -> None:
    scheduler = make_scheduler(64)
    assert scheduler.giving_way() == GivingWay(0, 0)
    of_batch = [decoding(scheduler, token_id, yields=True, num_tokens=12) for token_id in (1, 2)]
    decoding(scheduler, 3, yields=False)
    add(scheduler, 8, 4, yields=True)  # others may read its blocks
    held = sum(len(seq.block_table) for seq in of_batch)
    assert scheduler.giving_way() == GivingWay(2, held)
    of_batch[0].has_aged = True
    assert scheduler.giving_way() == GivingWay(1, len(of_batch[1].block_table))


def test_who_has_left_for_others_still_gives_way() -> None:
    """It waits behind them: to those that come next its place is free."""
    scheduler = make_scheduler(16)
    first, last = (decoding(scheduler, each, yields=True, num_tokens=24) for each in (1, 2))
    scheduler.reserve(reserved(20))
    assert not last.block_table
    assert scheduler.giving_way() == GivingWay(2, len(first.block_table))


def test_nobody_leaves_where_too_few_blocks_would_come_of_it() -> None:
    scheduler = make_scheduler(16)
    decoding(scheduler, 1, yields=False, num_tokens=40)
    of_batch = decoding(scheduler, 2, yields=True, num_tokens=8)
    with pytest.raises(BlocksExhaustedError):
        scheduler.reserve(reserved(30))
    assert of_batch.block_table


def test_shared_blocks_are_not_counted_on() -> None:
    """The longer one's blocks are the other's as well: only its last ones would come free."""
    scheduler = make_scheduler(16, max_model_len=60)
    shared = [1] * 32
    decoding_alone = make_sequence(shared)
    start_local(scheduler, decoding_alone)
    step(scheduler)
    of_batch = make_sequence([*shared, 2])
    of_batch.yields = True
    start_local(scheduler, of_batch)
    step(scheduler)
    num_left = scheduler.pool.num_available_blocks
    with pytest.raises(BlocksExhaustedError):
        scheduler.reserve(reserved(4 * (num_left + 4)))
    assert of_batch.block_table


def test_who_grows_takes_blocks_of_those_that_give_way_however_old_they_are() -> None:
    scheduler = make_scheduler(16, max_model_len=60)
    of_batch = decoding(scheduler, 1, yields=True, num_tokens=28)
    other = decoding(scheduler, 2, yields=False, num_tokens=28)
    while not of_batch.num_preemptions:
        step(scheduler)
    assert not other.num_preemptions


def test_what_is_owed_to_those_that_give_way_is_no_matter_to_others() -> None:
    scheduler = make_scheduler(16)
    of_batch = decoding(scheduler, 1, yields=True, num_tokens=50)
    first, second = reserved(20), reserved(20, 8)
    scheduler.reserve(first)
    scheduler.reserve(second)
    assert not of_batch.block_table
    like = reserved(4, 6)
    like.yields = True
    with pytest.raises(BlocksExhaustedError):
        scheduler.reserve(like)


def test_whoever_lost_its_blocks_often_keeps_them() -> None:
    scheduler = make_scheduler(16)
    of_batch = decoding(scheduler, 1, yields=True, num_tokens=40)
    for _ in range(MOST_PREEMPTIONS):
        seq = reserved(40)
        scheduler.reserve(seq)
        scheduler.release(seq)
        step(scheduler)
    assert of_batch.num_preemptions == MOST_PREEMPTIONS
    with pytest.raises(BlocksExhaustedError):
        scheduler.reserve(reserved(40))


def test_sequences_that_leave_go_on_exactly() -> None:
    """Each token is the sum of those before it."""

    def answer(others: int) -> list[int]:
        scheduler = make_scheduler(16)
        seq = make_sequence([1] * 20)
        seq.yields = True
        start_local(scheduler, seq)
        while seq.state is not SequenceState.FINISHED:
            if others and seq.num_output_tokens in (2, 5):
                others -= 1
                guest = reserved(44, 3)
                scheduler.reserve(guest)
                assert not seq.block_table
                scheduler.release(guest)
            plan = scheduler.schedule()
            assert plan is not None
            token = SampledToken(sum(seq.token_ids) % 97, math.nan)
            tokens = tuple(token if chunk.sample else None for chunk in plan.chunks)
            scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.0))
        return seq.token_ids

    assert answer(others=2) == answer(others=0)
