"""Steps that fail, or give no numbers: who ends, and what is never shared afterwards."""

import math

import pytest

from diptych.engine.scheduling.scheduler import Scheduler
from diptych.engine.scheduling.sequence import SequenceState
from diptych.engine.scheduling.step import SampledToken, StepOutput
from diptych.errors import (
    LogitsError,
    StepFailedError,
)
from tests.unit.engine.scheduling.steps import (
    make_scheduler,
    make_sequence,
    sequences_of,
    start_local,
    step,
)


def spoil(scheduler: Scheduler) -> None:
    """One step whose logits are not numbers."""
    plan = scheduler.schedule()
    assert plan is not None
    tokens = tuple(LogitsError("nan") if chunk.sample else None for chunk in plan.chunks)
    scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.0))


def test_a_step_without_numbers_leaves_nothing_to_share() -> None:
    scheduler = make_scheduler(max_batched_tokens=8, max_num_seqs=4)
    spoilt = make_sequence([1] * 12 + [2], prefill_only=True)
    scheduler.add_prefill(spoilt)
    step(scheduler)  # enters two blocks, before anybody can know
    spoil(scheduler)
    scheduler.release(spoilt)
    assert scheduler.pool.counts().cached == 0
    other = make_sequence([1] * 12 + [3], prefill_only=True)
    scheduler.add_prefill(other)
    assert other.num_cached_tokens == 0


def test_a_hit_that_led_to_no_numbers_is_forgotten_with_all_that_came_of_it() -> None:
    scheduler = make_scheduler(64, max_batched_tokens=64, max_num_seqs=4)
    first = make_sequence([1] * 8 + [2] * 5, prefill_only=True)
    scheduler.add_prefill(first)
    step(scheduler)
    scheduler.release(first)
    assert scheduler.pool.counts().cached == 3
    sharer = make_sequence([1] * 8 + [3] * 5, prefill_only=True)  # still computes
    scheduler.add_prefill(sharer)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.chunks[0].start == 8
    scheduler.update(plan, StepOutput(tokens=(SampledToken(7, math.nan),), duration_s=0.0))
    bad = make_sequence([1] * 8 + [4], prefill_only=True)
    scheduler.add_prefill(bad)
    assert bad.num_cached_tokens == 8
    spoil(scheduler)
    counts = scheduler.pool.counts()
    assert counts.cached == 0, "the child of a forgotten block would be found again with it"
    scheduler.release(bad)
    scheduler.release(sharer)
    assert scheduler.pool.counts().free == 64


def test_who_shares_with_a_sequence_without_numbers_enters_nothing_more() -> None:
    scheduler = make_scheduler(64, max_batched_tokens=8, max_num_seqs=4)
    first = make_sequence([1] * 8, prefill_only=True)
    scheduler.add_prefill(first)
    step(scheduler)
    sharer = start_local(scheduler, make_sequence([1] * 8 + [3] * 20))
    step(scheduler)
    bad = make_sequence([1] * 8 + [4], prefill_only=True)
    scheduler.add_prefill(bad)
    while bad.state is not SequenceState.LEASED:
        plan = scheduler.schedule()
        assert plan is not None
        tokens = tuple(LogitsError("nan") if chunk.sample else None for chunk in plan.chunks)
        scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.0))
    while sharer.num_output_tokens == 0:
        step(scheduler)
    for seq in (first, bad, sharer):
        scheduler.release(seq)
    assert scheduler.pool.counts().free == 64


def test_a_step_that_fails_ends_its_sequences_and_no_other() -> None:
    scheduler = make_scheduler(64, max_batched_tokens=64, max_num_seqs=3)
    lease = make_sequence([1] * 6, prefill_only=True)
    scheduler.add_prefill(lease)
    decode, gone = (start_local(scheduler, make_sequence([n] * 6)) for n in (2, 3))
    waiting = start_local(scheduler, make_sequence([4] * 6))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.release(gone)
    error = StepFailedError("a step failed")
    updates = scheduler.fail(plan, error)
    assert [(update.sequence, update.error) for update in updates] == [
        (lease, error),
        (decode, error),
    ]
    assert (lease.state, decode.state) == (SequenceState.LEASED, SequenceState.FINISHED)
    assert scheduler.pool.counts().cached == 0
    _, updates = step(scheduler)
    assert sequences_of(updates) == [waiting]
    scheduler.release(lease)
    scheduler.release(waiting)
    counts = scheduler.pool.counts()
    assert counts.free + counts.cached == 64


@pytest.mark.parametrize("prefill_only", [False, True])
def test_a_sequence_without_a_token_ends_alone(prefill_only: bool) -> None:
    scheduler = make_scheduler()
    broken = make_sequence([1] * 8, prefill_only=prefill_only)
    if prefill_only:
        scheduler.add_prefill(broken)
    else:
        start_local(scheduler, broken)
    other = start_local(scheduler, make_sequence([2] * 8))
    plan = scheduler.schedule()
    assert plan is not None
    error = LogitsError("not numbers")
    tokens = (error, SampledToken(1, math.nan))
    updates = scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.0))
    assert [update.error for update in updates] == [error, None]
    assert updates[0].token is None
    # Readers of a lease may be reading its blocks until it is released.
    held = SequenceState.LEASED if prefill_only else SequenceState.FINISHED
    assert broken.state is held
    assert other.state is SequenceState.RUNNING
    scheduler.release(broken)
    scheduler.release(other)
    counts = scheduler.pool.counts()
    assert counts.free + counts.cached == scheduler.pool.num_blocks
