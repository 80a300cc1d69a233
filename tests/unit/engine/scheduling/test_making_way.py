"""Who leaves for whom, by the block and by the step; what else is told of it: test_yielding."""

import math

import pytest

from diptych.engine.scheduling.sequence import SequenceState
from diptych.engine.scheduling.step import SampledToken, StepOutput
from diptych.errors import BlocksComingError, BlocksExhaustedError
from tests.unit.engine.scheduling.steps import make_scheduler, sequences_of, start_local, step
from tests.unit.engine.scheduling.test_yielding import decoding, end, reserved


@pytest.mark.parametrize("is_at_work", [False, True])
def test_one_that_lost_its_blocks_gets_those_of_who_gives_way_once_they_are_needed(
    is_at_work: bool,
) -> None:
    """When that came there was room for both, and then another one grew."""
    scheduler = make_scheduler(24, decode_headroom_blocks=0)
    scheduler.reserve(large := reserved(40))
    first, last = (decoding(scheduler, each, yields=False, num_tokens=24) for each in (1, 2))
    while not last.num_preemptions or len(first.block_table) * 4 > (
        first.num_computed_tokens + is_at_work
    ):
        step(scheduler)
    plan = scheduler.schedule() if is_at_work else None
    scheduler.release(large)
    num_blocks = scheduler.pool.num_available_blocks - len(last.token_ids) // 4
    of_batch = reserved(4 * num_blocks, 6)
    of_batch.yields = True
    start_local(scheduler, of_batch)
    if plan is not None:
        assert scheduler.schedule() is None, "it would be [first, of_batch], and so on"
        end(scheduler, plan)
    assert sequences_of(step(scheduler)[1]) == [first, last]
    assert not of_batch.block_table


@pytest.mark.parametrize("num_more", [0, 1])
def test_who_leaves_is_told_by_the_block(num_more: int) -> None:
    scheduler = make_scheduler(16, decode_headroom_blocks=0)
    first, last = (decoding(scheduler, each, yields=True, num_tokens=24) for each in (1, 2))
    num_blocks = scheduler.pool.num_available_blocks + len(last.block_table) + num_more
    scheduler.reserve(reserved(4 * num_blocks))
    assert not last.block_table
    assert bool(first.block_table) is (num_more == 0)


def test_nobody_leaves_in_vain_where_one_block_would_lack() -> None:
    scheduler = make_scheduler(16, decode_headroom_blocks=0)
    decoding(scheduler, 1, yields=False, num_tokens=24)
    of_batch = decoding(scheduler, 2, yields=True, num_tokens=24)
    num_blocks = scheduler.pool.num_available_blocks + len(of_batch.block_table)
    with pytest.raises(BlocksExhaustedError) as caught:
        scheduler.reserve(reserved(4 * num_blocks + 1))
    assert not isinstance(caught.value, BlocksComingError)
    assert of_batch.block_table
    scheduler.reserve(reserved(4 * num_blocks))
    assert not of_batch.block_table


def test_who_leaves_for_one_leaves_though_the_next_wants_less() -> None:
    """The first comes again when the step has ended, and finds its blocks."""
    scheduler = make_scheduler(16)
    first, last = (decoding(scheduler, each, yields=True, num_tokens=24) for each in (1, 2))
    plan = scheduler.schedule()
    assert plan is not None
    for seq in (large := reserved(44)), reserved(20, 8):
        with pytest.raises(BlocksComingError):
            scheduler.reserve(seq)
    tokens = (SampledToken(7, math.nan),) * 2
    scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.0))
    assert not first.block_table
    assert not last.block_table
    scheduler.reserve(large)


def test_steps_are_planned_ahead_where_nobody_has_a_place_to_leave() -> None:
    """Who gave its own up waits with its blocks; the others' places are theirs."""
    scheduler = make_scheduler(32, max_num_seqs=2)
    of_batch = decoding(scheduler, 1, yields=True)
    for token_id in (2, 3):
        decoding(scheduler, token_id, yields=False)
    assert of_batch.state is SequenceState.WAITING
    assert of_batch.block_table
    start_local(scheduler, reserved(4))
    assert scheduler.schedule() is not None
    assert scheduler.schedule() is not None, "ahead"


def test_steps_are_planned_ahead_of_one_that_lost_its_blocks_where_nobody_gives_way() -> None:
    scheduler = make_scheduler(16)
    first, last = (decoding(scheduler, each, yields=False, num_tokens=28) for each in (1, 2))
    while not last.num_preemptions:
        step(scheduler)
    assert not last.block_table
    assert scheduler.schedule() is not None
    assert scheduler.schedule() is not None, "ahead"
    assert not first.num_preemptions


def test_steps_are_planned_ahead_where_only_those_wait_that_give_way_too() -> None:
    scheduler = make_scheduler(32, max_num_seqs=1)
    decoding(scheduler, 1, yields=True)
    second = reserved(4, 2)
    second.yields = True
    start_local(scheduler, second)
    assert scheduler.schedule() is not None
    assert scheduler.schedule() is not None, "ahead"


def test_of_those_that_give_way_none_takes_anothers_blocks_back() -> None:
    scheduler = make_scheduler(16)
    first, last = (decoding(scheduler, each, yields=True, num_tokens=24) for each in (1, 2))
    scheduler.reserve(other := reserved(20))
    assert not last.block_table
    for _ in range(3):
        assert sequences_of(step(scheduler)[1]) == [first]
    assert (first.num_preemptions, last.num_preemptions) == (0, 1)
    scheduler.release(other)
    assert sequences_of(step(scheduler)[1]) == [first, last]


def test_for_a_place_alone_nobody_loses_blocks_however_few_are_left() -> None:
    scheduler = make_scheduler(16, max_num_seqs=2, decode_headroom_blocks=0)
    first, last = (decoding(scheduler, each, yields=True, num_tokens=12) for each in (1, 2))
    num_blocks = scheduler.pool.num_available_blocks - 2  # into which others grow
    other = start_local(scheduler, reserved(4 * num_blocks))
    assert sequences_of(step(scheduler)[1]) == [first, other]
    assert last.block_table
    assert (scheduler.num_set_aside, scheduler.num_preemptions) == (1, 0)
