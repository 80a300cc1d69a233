"""Blocks that hold their first groups of layers only: who may use them, who replaces them."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.block_needs import BlockNeeds, GroupExtent
from diptych.engine.scheduling.block_pool import BlockPool, Owner
from diptych.engine.scheduling.prefix_cache import PrefixCache
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence as EngineSequence
from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import SampledToken, StepOutput
from diptych.sampling_params import SamplingParams

BLOCK_SIZE = 4
WINDOW = 6  # a block's tokens see two blocks before their own
NEEDS = BlockNeeds(BLOCK_SIZE, [GroupExtent(None, 1), GroupExtent(WINDOW, 1)])
HOLE, WHOLE = 1, 2  # groups of a block that are there
A, B = b"a" * 16, b"b" * 16  # keys


def cache_of(needs: BlockNeeds, held: Sequence[int]) -> tuple[PrefixCache, list[bytes]]:
    """A chain of blocks 0, 1, 2 and so on, each with so many groups."""
    cache = PrefixCache(needs, len(held))
    keys = [bytes([i]) * 16 for i in range(len(held))]
    for index, num_groups in enumerate(held):
        cache.insert(index, keys[index], keys[index - 1] if index else None, num_groups)
    return cache, keys


def sequence_of(num_tokens: int, number: int = 1) -> EngineSequence:
    return EngineSequence(
        key=SequenceKey("router", number),
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=8),
    )


def scheduler_of(num_blocks: int = 20) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=2, max_batched_tokens=16, max_model_len=64)
    return Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE, NEEDS))


@given(
    block_size=st.integers(1, 4),
    windows=st.lists(st.integers(1, 9), max_size=3, unique=True),
    has_full=st.booleans(),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_the_longest_prefix_that_serves_is_found(
    block_size: int, windows: list[int], has_full: bool, data: st.DataObject
) -> None:
    """Token by token: all that the next one sees, or that those of the last block see."""
    reach: list[int | None] = [*sorted(windows, reverse=True)]
    if has_full or not windows:
        reach.insert(0, None)
    needs = BlockNeeds(block_size, [GroupExtent(window, 1) for window in reach])
    num_groups = st.integers(needs.num_full_groups, len(reach))
    held = data.draw(st.lists(num_groups, max_size=7))
    cache, keys = cache_of(needs, held)
    step_back = data.draw(st.booleans())

    def serves(position: int) -> bool:
        """Whether the token there sees no hole before it."""
        return all(
            held[seen // block_size] > group
            for group, window in enumerate(reach)
            for seen in range(0 if window is None else max(0, position - window + 1), position)
        )

    def usable(num_blocks: int) -> bool:
        again = True
        if step_back and num_blocks == len(keys):  # its last tokens see themselves, too
            again = serves((num_blocks - 1) * block_size) and held[num_blocks - 1] == len(reach)
        return again and serves(num_blocks * block_size)

    longest = max(n for n in range(len(keys) + 1) if not n or usable(n))
    assert cache.lookup(keys, step_back=step_back) == list(range(longest))


def test_a_whole_block_takes_the_key_of_one_with_a_hole() -> None:
    pool = BlockPool(4, BLOCK_SIZE, NEEDS)
    held, idle, whole, late = pool.allocate(4, Owner.RUNNING)
    pool.insert(held, A, None, HOLE)
    pool.insert(idle, B, A, HOLE)
    pool.free([idle], Owner.RUNNING)
    assert pool.counts().cached == 1
    assert pool.insert(late, B, A)
    assert pool.is_free(idle)
    assert pool.insert(whole, A, None)
    assert pool.key_of(held) is None
    assert pool.holders(held) == {Owner.RUNNING: 1}
    assert pool.lookup([A, B]) == [whole, late]
    assert not pool.insert(held, A, None, HOLE)
    assert pool.lookup([A]) == [whole]
    pool.free([held, whole, late], Owner.RUNNING)
    assert pool.counts()._asdict() | {"free": 2, "cached": 2} == pool.counts()._asdict()


def test_an_evicted_child_of_a_replaced_block_leaves_no_count_behind() -> None:
    pool = BlockPool(3, BLOCK_SIZE, NEEDS)
    blocks = pool.allocate(3, Owner.RUNNING)
    pool.insert(blocks[0], A, None, HOLE)
    pool.insert(blocks[1], B, A)
    pool.insert(blocks[2], A, None)
    pool.free([blocks[0], blocks[2], blocks[1]], Owner.RUNNING)
    assert pool.allocate(2, Owner.RUNNING) == [blocks[0], blocks[1]]  # the leaf before its parent
    assert pool.lookup([A]) == [blocks[2]]


def test_what_was_pulled_serves_the_same_prompt_again_and_no_shorter_one() -> None:
    scheduler = scheduler_of()
    first = sequence_of(22)  # its last block is the sixth; the window holds three before that
    scheduler.reserve(first)
    scheduler.mark_proven(first)
    again, longer, shorter = sequence_of(22, 2), sequence_of(30, 3), sequence_of(18, 4)
    for seq, num_cached in ((again, 20), (longer, 20), (shorter, 0)):
        scheduler.reserve(seq)
        assert seq.num_cached_tokens == num_cached
        scheduler.release(seq)


def test_what_was_pulled_whole_is_kept_when_its_sequence_starts() -> None:
    """It has holes where nothing looks any more; only a part of it could not be gone on from."""
    scheduler = scheduler_of()
    seq = sequence_of(22)
    seq.to_pull = True
    scheduler.reserve(seq)
    scheduler.mark_proven(seq)
    blocks = list(seq.block_table)
    scheduler.start(seq, [7], compute_missing=False)
    assert (seq.block_table, seq.num_computed_tokens) == (blocks, 22)


@pytest.mark.parametrize(("num_pulled", "num_cached"), [(20, 20), (22, 0)])
def test_a_whole_hit_serves_only_if_its_last_block_can_be_computed_again(
    num_pulled: int, num_cached: int
) -> None:
    """22 tokens needed the window before their sixth block, not that before the fifth."""
    scheduler = scheduler_of()
    first = sequence_of(num_pulled)
    scheduler.reserve(first)
    scheduler.mark_proven(first)
    seq = sequence_of(20, 2)
    scheduler.reserve(seq)
    assert seq.num_cached_tokens == num_cached


@given(
    block_size=st.integers(1, 4),
    windows=st.lists(st.integers(1, 9), max_size=3, unique=True),
    num_tokens=st.integers(1, 20),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_a_hit_to_pull_has_what_the_whole_sequence_needs_of_it(
    block_size: int, windows: list[int], num_tokens: int, data: st.DataObject
) -> None:
    """And is never shorter than one that serves at once."""
    needs = BlockNeeds(
        block_size, [GroupExtent(window, 1) for window in [None, *sorted(windows, reverse=True)]]
    )
    num_blocks, last_block = num_tokens // block_size, (num_tokens - 1) // block_size
    num_groups = st.integers(1, needs.num_groups)
    held = data.draw(st.lists(num_groups, min_size=num_blocks, max_size=num_blocks))
    cache, keys = cache_of(needs, held)
    found = len(cache.lookup_to_pull(keys, last_block))
    enough = [num >= needs.num_groups_of(index, last_block) for index, num in enumerate(held)]
    assert all(enough[:found])
    assert found == num_blocks or not enough[found]
    step_back = num_blocks * block_size == num_tokens
    assert found >= len(cache.lookup(keys, step_back=step_back))


def test_a_prompt_that_shares_a_prefix_is_hit_if_the_rest_is_pulled() -> None:
    """And if it is computed after all, then from where it can be."""
    scheduler = scheduler_of()
    first = sequence_of(22)
    scheduler.reserve(first)
    scheduler.mark_proven(first)
    seq = sequence_of(30, 2)
    seq.token_ids[14:] = [100 + i for i in range(16)]
    seq.to_pull = True
    scheduler.reserve(seq)
    assert seq.num_cached_tokens == 12
    hits = seq.block_table[:3]
    assert hits == first.block_table[:3]
    scheduler.start(seq, [], compute_missing=True)
    assert seq.num_computed_tokens == 0
    assert len(seq.block_table) >= 8
    assert not set(hits) & set(seq.block_table)


def test_what_cannot_be_computed_now_waits_for_blocks() -> None:
    scheduler = scheduler_of(18)  # seven each, of which two share three
    for number, num_tokens in ((1, 22), (3, 22)):
        seq = sequence_of(num_tokens, number)
        seq.token_ids[0] = number
        scheduler.reserve(seq)
        scheduler.mark_proven(seq)
    late = sequence_of(22, 2)
    late.token_ids[0], late.token_ids[14:] = 1, [99] * 8
    late.to_pull = True
    scheduler.reserve(late)
    assert late.num_cached_tokens == 12
    scheduler.start(late, [], compute_missing=True)
    assert late.block_table == []
    assert scheduler.num_waiting == 1
    scheduler.release(seq)
    assert scheduler.schedule() is not None
    assert len(late.block_table) >= 6


def test_what_was_computed_has_no_holes() -> None:
    scheduler = scheduler_of()
    computed = sequence_of(22)
    scheduler.reserve(computed)
    scheduler.start(computed, [], compute_missing=True)
    while scheduler.pool.key_of(computed.block_table[4]) is None:
        plan = scheduler.schedule()
        assert plan is not None
        tokens = [None if chunk.sample is None else SampledToken(7, 1.0) for chunk in plan.chunks]
        scheduler.update(plan, StepOutput(tokens=tuple(tokens), duration_s=0.01))
    for num_tokens in range(2, 20):
        seq = sequence_of(num_tokens, num_tokens)
        scheduler.reserve(seq)
        assert seq.num_cached_tokens == num_tokens // BLOCK_SIZE * BLOCK_SIZE
        scheduler.release(seq)
