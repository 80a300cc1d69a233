"""What the scheduler puts into a step, whom it admits, and who makes room for whom."""

import math

import pytest

from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.engine.scheduling.step import SampledToken, StepOutput
from diptych.errors import (
    BlocksExhaustedError,
    ConfigurationError,
    InvalidRequestError,
)
from diptych.finish_reason import FinishReason
from diptych.sampling_params import SamplingParams
from diptych.step_model import StepWork
from tests.unit.engine.scheduling.steps import (
    make_scheduler,
    make_sequence,
    sequences_of,
    start_handed_over,
    start_local,
    step,
)


def test_a_step_mixes_decode_tokens_and_chunks_of_several_prompts() -> None:
    scheduler = make_scheduler(32, max_batched_tokens=16, max_num_seqs=4)
    start_local(scheduler, make_sequence([1, 2, 3]))
    step(scheduler)
    start_local(scheduler, make_sequence([4] * 6))
    start_local(scheduler, make_sequence([5] * 20))
    assert scheduler.work.num_prefill_tokens == 26
    assert scheduler.work == StepWork(1, 4, 26, 6 * 7 // 2 + 20 * 21 // 2)
    plan, updates = step(scheduler)
    assert [chunk.token_ids for chunk in plan.chunks] == [(7,), (4,) * 6, (5,) * 8]
    assert [chunk.sample is not None for chunk in plan.chunks] == [True, True, False]
    assert [update.num_computed_tokens for update in updates] == [4, 6, 8]
    assert [update.position for update in updates] == [4, 6, None]
    assert scheduler.work.num_prefill_tokens == 12
    assert scheduler.work == StepWork(2, 5 + 7, 12, 20 * 21 // 2 - 8 * 9 // 2)
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 0)


def test_a_bound_on_prompts_lets_those_that_decode_and_those_that_begin_to_pass() -> None:
    scheduler = make_scheduler(32, max_batched_tokens=16, max_num_seqs=4)
    start_local(scheduler, make_sequence([1, 2, 3]))
    step(scheduler)
    long = start_local(scheduler, make_sequence([5] * 20))
    start_handed_over(scheduler, make_sequence([6] * 7))
    for most, num_computed in ((0, 0), (8, 8), (5, 12), (None, 20)):
        plan = scheduler.schedule(most)
        assert plan is not None
        tokens = tuple(SampledToken(7, math.nan) if chunk.sample else None for chunk in plan.chunks)
        scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.01))
        assert long.num_computed_tokens == num_computed
        assert sum(len(chunk.token_ids) == 1 for chunk in plan.chunks) == 2


def test_a_bound_on_prompts_stops_nothing_where_nobody_decodes() -> None:
    scheduler = make_scheduler(32, max_batched_tokens=16, max_num_seqs=4)
    start_local(scheduler, make_sequence([5] * 6))
    plan = scheduler.schedule(0)
    assert plan is not None
    assert plan.num_tokens == 6


def test_chunks_end_with_a_block_unless_the_prompt_ends() -> None:
    scheduler = make_scheduler(max_batched_tokens=10, max_num_seqs=4)
    start_local(scheduler, make_sequence([5] * 19))
    ends = [step(scheduler)[0].chunks[0].end for _ in range(3)]
    assert ends == [8, 16, 19]


def test_a_prefilled_prompt_is_cached_for_the_next() -> None:
    scheduler = make_scheduler()
    first = make_sequence([1] * 8 + [2], prefill_only=True)
    scheduler.add_prefill(first)
    step(scheduler)
    assert first.state is SequenceState.LEASED
    second = make_sequence([1] * 8, prefill_only=True)
    scheduler.add_prefill(second)
    assert second.num_cached_tokens == 4  # the last token is computed, for its logits
    assert second.block_table[0] == first.block_table[0]
    assert second.block_table[1] != first.block_table[1]
    assert scheduler.pool.counts().leased == 3
    scheduler.release(second)
    decode = make_sequence([1] * 8)
    scheduler.reserve(decode)
    assert decode.num_cached_tokens == 8
    assert (scheduler.num_hit_tokens, scheduler.num_lookup_tokens) == (12, 25)


def test_a_wholly_cached_sequence_computes_its_last_block_elsewhere() -> None:
    scheduler = make_scheduler()
    first = make_sequence([1] * 8, prefill_only=True)
    scheduler.add_prefill(first)
    step(scheduler)
    second = make_sequence([1] * 8)
    scheduler.reserve(second)
    scheduler.mark_proven(second)
    scheduler.start(second, [], compute_missing=True)
    plan, _ = step(scheduler)
    assert (plan.chunks[0].start, plan.chunks[0].end) == (4, 8)
    assert second.block_table[0] == first.block_table[0]
    assert second.block_table[1] not in first.block_table


def test_a_started_sequence_uses_what_others_computed_meanwhile() -> None:
    scheduler = make_scheduler()
    first, second = make_sequence([1] * 12), make_sequence([1] * 10)
    scheduler.reserve(second)
    start_local(scheduler, first)
    step(scheduler)
    scheduler.start(second, [], compute_missing=True)
    plan, _ = step(scheduler)
    assert plan.chunks[1].start == 8
    assert second.block_table[:2] == first.block_table[:2]


def test_emitted_tokens_are_computed_and_never_sampled_again() -> None:
    scheduler = make_scheduler()
    seq = make_sequence([1] * 5, max_tokens=9)
    scheduler.reserve(seq)
    scheduler.mark_proven(seq)
    scheduler.start(seq, [4, 5, 6], compute_missing=False)
    plan, updates = step(scheduler)
    assert plan.chunks[0].token_ids == (4, 5, 6)
    assert plan.chunks[0].start == 5
    assert updates[0].position == 8


def test_the_youngest_gives_way_and_comes_back() -> None:
    scheduler = make_scheduler(6, decode_headroom_blocks=0, max_model_len=24)
    old = start_local(scheduler, make_sequence([1] * 10, max_tokens=6))
    young = start_local(scheduler, make_sequence([2] * 12, max_tokens=4))
    step(scheduler)
    step(scheduler)  # young needs a fourth block, and there is none
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert young.state is SequenceState.WAITING
    with pytest.raises(BlocksExhaustedError):  # what it waits for is not given away
        scheduler.reserve(make_sequence([3]))
    while old.state is not SequenceState.FINISHED:
        step(scheduler)
    plan, updates = step(scheduler)
    assert sequences_of(updates) == [young]
    assert plan.chunks[0].token_ids == (2,) * 4 + (7,)  # the rest was still cached
    assert scheduler.num_preemptions == 1


def test_blocks_that_readers_may_read_are_never_taken() -> None:
    scheduler = make_scheduler(6, decode_headroom_blocks=0, max_model_len=24, max_batched_tokens=64)
    decode = start_local(scheduler, make_sequence([1] * 12))
    step(scheduler)
    lease = make_sequence([2] * 12, prefill_only=True)
    scheduler.add_prefill(lease)
    table = list(lease.block_table)
    _, updates = step(scheduler)  # decode needs a fourth block, and all others are the lease's
    assert sequences_of(updates) == [lease]
    assert (decode.state, lease.state) == (SequenceState.WAITING, SequenceState.LEASED)
    assert lease.block_table == table


def test_who_has_blocks_does_not_wait_behind_who_has_none() -> None:
    scheduler = make_scheduler(6, decode_headroom_blocks=0, max_model_len=24, max_num_seqs=1)
    old = start_local(scheduler, make_sequence([1] * 12))
    step(scheduler)
    lease = make_sequence([2] * 12, prefill_only=True)
    scheduler.add_prefill(lease)
    _, updates = step(scheduler)
    assert (old.num_preemptions, sequences_of(updates)) == (1, [lease])
    assert scheduler.schedule() is None
    scheduler.release(lease)
    _, updates = step(scheduler)
    assert sequences_of(updates) == [old]


def test_a_lone_sequence_waits_for_reservations_to_end() -> None:
    scheduler = make_scheduler(4, decode_headroom_blocks=0, max_model_len=16)
    reserved = make_sequence([3] * 8, max_tokens=2)
    scheduler.reserve(reserved)
    seq = start_local(scheduler, make_sequence([1] * 8, max_tokens=4))
    step(scheduler)
    assert scheduler.schedule() is None
    assert seq.state is SequenceState.WAITING
    scheduler.release(reserved)
    _, updates = step(scheduler)
    assert sequences_of(updates) == [seq]


def test_blocks_of_a_sequence_released_in_flight_stay_until_the_step_ends() -> None:
    scheduler = make_scheduler()
    seq = start_local(scheduler, make_sequence([1] * 8))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.release(seq)
    assert scheduler.pool.counts().running == 3
    token = SampledToken(7, math.nan)
    assert scheduler.update(plan, StepOutput(tokens=(token,), duration_s=0.01)) == []
    counts = scheduler.pool.counts()
    assert (counts.running, counts.cached, counts.free) == (0, 2, 14)


def test_headroom_is_not_more_than_the_output_needs() -> None:
    scheduler = make_scheduler()
    seq = make_sequence([1] * 8, max_tokens=1)
    scheduler.reserve(seq)
    assert len(seq.block_table) == 2


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(2, 60), (50, 10)])
def test_length_ends_a_sequence(max_tokens: int, max_model_len: int) -> None:
    scheduler = make_scheduler(max_model_len=max_model_len)
    seq = start_local(scheduler, make_sequence([1] * 8, max_tokens=max_tokens))
    assert step(scheduler)[1][0].finish_reason is None
    assert step(scheduler)[1][0].finish_reason is FinishReason.LENGTH
    assert seq.state is SequenceState.FINISHED
    assert not scheduler.has_work


def test_a_prefill_that_finishes_is_leased_all_the_same() -> None:
    scheduler = make_scheduler()
    seq = make_sequence([1] * 8, prefill_only=True, max_tokens=1)
    scheduler.add_prefill(seq)
    _, updates = step(scheduler)
    assert updates[0].finish_reason is FinishReason.LENGTH
    assert seq.state is SequenceState.LEASED
    assert scheduler.pool.counts().leased == 2
    assert scheduler.schedule() is None
    scheduler.release(seq)
    assert scheduler.pool.counts().leased == 0


def test_prompts_that_come_together_compute_what_they_share_once() -> None:
    scheduler = make_scheduler(64, max_batched_tokens=16, max_num_seqs=8)
    system_prompt = list(range(24))
    seqs = [make_sequence([*system_prompt, 100 + n], prefill_only=True) for n in range(6)]
    for seq in seqs:
        scheduler.add_prefill(seq)
    num_computed = 0
    while scheduler.has_work:
        plan, _ = step(scheduler)
        num_computed += plan.num_tokens
    assert num_computed == len(system_prompt) + len(seqs)
    assert len({tuple(seq.block_table[:6]) for seq in seqs}) == 1
    assert (scheduler.num_hit_tokens, scheduler.num_lookup_tokens) == (5 * 24, 6 * 25)


def test_who_waits_for_a_prefix_does_not_wait_for_a_sequence_that_went() -> None:
    scheduler = make_scheduler(max_batched_tokens=8, max_num_seqs=4)
    first, second = (make_sequence([1] * 20 + [n], prefill_only=True) for n in range(2))
    scheduler.add_prefill(first)
    scheduler.add_prefill(second)
    _, updates = step(scheduler)
    assert sequences_of(updates) == [first]
    scheduler.release(first)
    plan, updates = step(scheduler)
    assert sequences_of(updates) == [second]
    assert plan.chunks[0].start == 8  # what was computed is used


def test_what_is_left_of_a_step_begins_no_sliver() -> None:
    scheduler = make_scheduler(32, max_batched_tokens=11, max_num_seqs=4)
    for prompt in ([1] * 6, [2] * 6, [3] * 2):
        scheduler.add_prefill(make_sequence(prompt, prefill_only=True))
    plan, _ = step(scheduler)
    # 11 - 6 leaves a block and a token; what then is left fills none, but ends the third.
    assert [chunk.token_ids for chunk in plan.chunks] == [(1,) * 6, (2,) * 4]
    plan, _ = step(scheduler)
    assert [chunk.token_ids for chunk in plan.chunks] == [(2,) * 2, (3,) * 2]


def test_a_prompt_gets_on_where_steps_are_smaller_than_a_block() -> None:
    scheduler = make_scheduler(max_batched_tokens=3, max_num_seqs=3)
    start_local(scheduler, make_sequence([1, 2]))
    step(scheduler)
    start_local(scheduler, make_sequence([3] * 9))
    ends = [step(scheduler)[0].chunks[1].end for _ in range(4)]
    assert ends == [2, 4, 6, 8]


def test_a_long_prompt_does_not_stop_the_others() -> None:
    scheduler = make_scheduler(400, max_model_len=700, max_batched_tokens=32, max_num_seqs=8)
    long = make_sequence([1] * 600, prefill_only=True)
    scheduler.add_prefill(long)
    assert step(scheduler)[0].num_tokens == 32  # alone it has all
    shorts = [make_sequence([2 + n] * 14, prefill_only=True) for n in range(4)]
    other_long = make_sequence([9] * 600, prefill_only=True)
    for seq in (other_long, *shorts):
        scheduler.add_prefill(seq)
    num_steps = 0
    while any(short.state is not SequenceState.LEASED for short in shorts):
        before = long.num_computed_tokens
        plan, _ = step(scheduler)
        num_steps += 1
        assert long.num_computed_tokens - before >= 16  # nor do they stop it
        assert plan.num_tokens > 32 - scheduler.pool.block_size
    assert num_steps == 4
    assert other_long.num_computed_tokens == 0  # first come, first served among the long
    assert step(scheduler)[0].num_tokens == 32


def beside_prompts(max_num_seqs: int) -> tuple[Scheduler, list[Sequence], Sequence]:
    """Two prompts that fill a step each, and one that was handed over after them."""
    scheduler = make_scheduler(64, max_batched_tokens=16, max_num_seqs=max_num_seqs)
    prompts = [make_sequence([number] * 16, prefill_only=True) for number in (1, 2)]
    for prompt in prompts:
        scheduler.add_prefill(prompt)
    return scheduler, prompts, start_handed_over(scheduler, make_sequence([6] * 7))


def test_who_was_handed_over_does_not_wait_behind_prompts_that_fill_steps() -> None:
    scheduler, prompts, handed_over = beside_prompts(max_num_seqs=3)
    assert sequences_of(step(scheduler)[1]) == [handed_over, prompts[0]]
    assert handed_over.num_output_tokens == 2


def test_where_places_are_short_who_was_handed_over_waits_for_its_turn() -> None:
    scheduler, prompts, handed_over = beside_prompts(max_num_seqs=2)
    assert sequences_of(step(scheduler)[1]) == [prompts[0]]
    assert sequences_of(step(scheduler)[1]) == [handed_over, prompts[1]]


def test_a_table_is_packed_once_and_grows_by_its_new_ids() -> None:
    scheduler = make_scheduler(32, decode_headroom_blocks=0)
    seq = start_local(scheduler, make_sequence([1] * 6, max_tokens=9))
    tables = [step(scheduler)[0].chunks[0].block_table for _ in range(8)]
    assert [table is tables[0] for table in tables] == [True] * 3 + [False] * 5
    assert [table is tables[3] for table in tables[3:]] == [True] * 4 + [False]
    assert [len(table) for table in tables] == [2] * 3 + [3] * 4 + [4]
    assert list(tables[-1]) == seq.block_table


def test_who_asks_for_a_penalty_takes_along_what_came_before_and_nobody_else() -> None:
    scheduler = make_scheduler()
    asking, silent = make_sequence([1, 2, 3]), make_sequence([4, 5])
    asking.sampling = SamplingParams(presence_penalty=0.5)
    start_local(scheduler, asking)
    start_local(scheduler, silent)
    plans = [step(scheduler)[0] for _ in range(3)]
    samples = [chunk.sample for plan in plans for chunk in plan.chunks]
    histories = [sample.history for sample in samples if sample is not None]
    taken = [(list(one.token_ids), one.num_prompt_tokens) for one in histories if one is not None]
    assert taken == [([1, 2, 3], 3), ([1, 2, 3, 7], 3), ([1, 2, 3, 7, 7], 3)]
    assert histories.count(None) == 3


def test_what_never_fits_is_refused() -> None:
    scheduler = make_scheduler(max_model_len=10)
    for num_tokens in (0, 10):
        with pytest.raises(InvalidRequestError, match="token_ids"):
            scheduler.reserve(make_sequence([1] * num_tokens))
    seq = make_sequence([1] * 5, max_tokens=3)
    scheduler.reserve(seq)
    for emitted in ([1] * 3, [1] * 5):
        with pytest.raises(InvalidRequestError, match="emitted_token_ids"):
            scheduler.start(seq, emitted, compute_missing=True)
    scheduler.start(seq, [1], compute_missing=True)
    with pytest.raises(InvalidRequestError, match="WAITING"):
        scheduler.start(seq, [1], compute_missing=True)


def test_a_pool_must_hold_the_longest_sequence() -> None:
    make_scheduler(4, 4, 17)
    with pytest.raises(ConfigurationError, match="max_model_len"):
        make_scheduler(4, 4, 18)
    with pytest.raises(ValueError, match="max_num_seqs"):
        SchedulerConfig(max_model_len=10, max_batched_tokens=3, max_num_seqs=4)
