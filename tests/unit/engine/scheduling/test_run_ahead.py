"""Steps planned while the one before them is in flight: who is in them, and who came in vain."""

import math
from collections.abc import Callable

import pytest

from diptych.constraint import OutputGrammar
from diptych.engine.scheduling.audit import pool_mismatch
from diptych.engine.scheduling.run_ahead import Awaited, awaited
from diptych.engine.scheduling.scheduler import Scheduler
from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.engine.scheduling.step import (
    UNKNOWN,
    SampledToken,
    SequenceUpdate,
    StepOutput,
    StepPlan,
)
from diptych.errors import DiptychError, LogitsError, StepFailedError
from diptych.finish_reason import FinishReason
from diptych.sampling_params import SamplingParams
from tests.unit.engine.scheduling.steps import make_scheduler, make_sequence, start_local

Tokens = Callable[[int], SampledToken | DiptychError]


def sevens(index: int) -> SampledToken:
    return SampledToken(7, math.nan)


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def book(scheduler: Scheduler, plan: StepPlan, token: Tokens = sevens) -> list[SequenceUpdate]:
    drawn = [token(at) if chunk.sample else None for at, chunk in enumerate(plan.chunks)]
    updates = scheduler.update(plan, StepOutput(tokens=tuple(drawn), duration_s=0.0))
    assert pool_mismatch(scheduler.pool, scheduler) is None
    return updates


def begin(
    *lengths: int, num_blocks: int = 32, max_batched_tokens: int = 16
) -> tuple[Scheduler, list[Sequence], StepPlan]:
    """Sequences whose prompts are in the step in flight, as far as there is room."""
    scheduler = make_scheduler(num_blocks, max_batched_tokens=max_batched_tokens, max_num_seqs=8)
    prompts = [[number] * length for number, length in enumerate(lengths)]
    seqs = [start_local(scheduler, make_sequence(prompt)) for prompt in prompts]
    return scheduler, seqs, plan_of(scheduler)


def test_a_chunk_names_the_one_that_draws_its_token() -> None:
    scheduler, (short, long, late), first = begin(3, 24, 2)
    assert [chunk.start for chunk in first.chunks] == [0, 0, 0]
    ahead = plan_of(scheduler)
    by_owner = dict(zip(scheduler.owners(ahead), ahead.chunks, strict=True))
    places = {seq: at for at, seq in enumerate(scheduler.owners(first))}
    for seq, num_prompt in ((short, 3), (late, 2)):
        chunk = by_owner[seq]
        assert (chunk.token_ids, chunk.start) == (UNKNOWN, num_prompt)
        assert chunk.follows == places[seq]
    assert by_owner[long].follows is None
    assert by_owner[long].start == first.chunks[places[long]].end
    book(scheduler, first)
    assert (short.token_ids[-1], short.num_computed_tokens) == (7, 3)
    (update,) = (each for each in book(scheduler, ahead) if each.sequence is short)
    assert (update.position, update.num_computed_tokens) == (4, 4)


def test_who_has_ended_with_a_stop_token_computed_in_vain() -> None:
    scheduler, (seq,), first = begin(4)
    seq.sampling = SamplingParams(max_tokens=9, stop_token_ids=frozenset({7}))
    ahead = plan_of(scheduler)
    (update,) = book(scheduler, first)
    assert update.finish_reason is FinishReason.STOP
    assert scheduler.pool.counts().running == len(seq.block_table) > 0, "the device has them"
    assert book(scheduler, ahead) == []
    assert seq.token_ids == [0, 0, 0, 0, 7]
    counts = scheduler.pool.counts()
    assert (counts.running, counts.cached) == (0, 1), "the prompt's block alone is shared"


def test_of_who_is_released_no_unknown_token_is_shared() -> None:
    scheduler, (seq,), first = begin(7)  # blocks of four: the token ahead fills the second
    ahead = plan_of(scheduler)
    scheduler.release(seq)
    assert book(scheduler, first) == []
    assert scheduler.pool.counts().running == 3
    assert book(scheduler, ahead) == []
    counts = scheduler.pool.counts()
    assert (counts.running, counts.cached) == (0, 1)


def test_prompts_go_on_ahead_and_are_shared_when_their_step_has_ended() -> None:
    scheduler, (seq,), first = begin(40)
    ahead = plan_of(scheduler)
    assert (ahead.chunks[0].start, ahead.chunks[0].end) == (16, 32)
    scheduler.release(seq)
    book(scheduler, first)
    book(scheduler, ahead)
    assert scheduler.pool.counts().cached == 8


def test_nothing_of_a_step_after_one_that_failed_is_used() -> None:
    scheduler, (long, short), first = begin(40, 3, max_batched_tokens=19)
    assert len(first.chunks) == 2
    other = start_local(scheduler, make_sequence([9] * 2))
    ahead = plan_of(scheduler)
    failed = scheduler.fail(first, StepFailedError("broken"))
    assert {update.sequence for update in failed} == {long, short}
    assert scheduler.pool.counts().running > 0, "the device has them"
    (update,) = book(scheduler, ahead)
    assert update.sequence is other
    assert (long.state, short.state) == (SequenceState.FINISHED,) * 2
    assert scheduler.pool.counts().cached == 0
    scheduler.release(other)
    assert scheduler.pool.counts().free == 32


def test_a_lease_that_failed_keeps_its_blocks_from_others_while_a_step_writes_them() -> None:
    scheduler = make_scheduler(32, max_batched_tokens=16, max_num_seqs=8)
    seq = make_sequence([1] * 40, prefill_only=True)
    scheduler.add_prefill(seq)
    first, ahead = plan_of(scheduler), plan_of(scheduler)
    scheduler.fail(first, StepFailedError("broken"))
    assert seq.state is SequenceState.LEASED
    scheduler.release(seq)
    assert pool_mismatch(scheduler.pool, scheduler) is None
    assert scheduler.pool.counts().running == 10
    assert book(scheduler, ahead) == []
    assert scheduler.pool.counts().free == 32


def test_a_step_ahead_of_one_without_numbers_gives_none_to_share() -> None:
    scheduler, (seq, other), first = begin(8, 4)
    ahead = plan_of(scheduler)
    book(scheduler, first, lambda at: LogitsError("nan") if at == 0 else sevens(at))
    (update,) = book(scheduler, ahead, lambda at: LogitsError("nan") if at == 0 else sevens(at))
    assert update.sequence is other
    assert seq.state is SequenceState.FINISHED
    assert scheduler.pool.counts().cached == 0, "of the other one the block is still held"


def test_nobody_computes_what_a_step_in_flight_does() -> None:
    scheduler, (first_come,), first = begin(40)
    twin = start_local(scheduler, make_sequence([0] * 40))
    ahead = plan_of(scheduler)
    assert scheduler.owners(ahead) == (first_come,)
    book(scheduler, first)
    book(scheduler, ahead)
    last = plan_of(scheduler)
    assert scheduler.owners(last) == (first_come,)
    book(scheduler, last)
    starts = {chunk.start for chunk in plan_of(scheduler).chunks}
    assert (starts, twin.num_computed_tokens) == ({36, 40}, 36)


def test_no_step_is_planned_ahead_of_a_token_that_somebody_waits_for() -> None:
    scheduler, (seq, _), first = begin(3, 4)
    seq.sampling = SamplingParams(max_tokens=9, return_margins=True)
    assert scheduler.schedule() is None
    book(scheduler, first)
    assert len(plan_of(scheduler).chunks) == 2


def test_who_ends_whatever_it_draws_holds_nobody_up() -> None:
    scheduler, (seq, other), first = begin(3, 4)
    seq.sampling = SamplingParams(max_tokens=1, return_margins=True)
    ahead = plan_of(scheduler)
    assert scheduler.owners(ahead) == (other,)
    book(scheduler, first)


@pytest.mark.parametrize(("num_tokens", "goes_on"), [(58, True), (59, False)])
def test_nothing_is_planned_behind_the_longest_sequence_there_may_be(
    num_tokens: int, goes_on: bool
) -> None:
    """The token in flight makes 60 of 59: the model has no place for one more."""
    scheduler = make_scheduler(32, max_model_len=60)
    start_local(scheduler, make_sequence([1] * num_tokens))
    plan_of(scheduler)
    assert (scheduler.schedule() is not None) is goes_on


def test_a_lease_draws_one_token_and_no_step_is_planned_behind_it() -> None:
    scheduler = make_scheduler(32)
    seq = make_sequence([1] * 9, prefill_only=True)
    scheduler.add_prefill(seq)
    num_blocks = len(seq.block_table)
    plan_of(scheduler)
    assert scheduler.schedule() is None
    assert len(seq.block_table) == num_blocks


def test_who_ends_with_the_step_in_flight_is_not_among_those_that_decode_with_the_next() -> None:
    """Else what prompts get of that would go by promises that nobody is owed any more."""
    scheduler, (going_on,), _ = begin(3)
    scheduler.add_prefill(make_sequence([5] * 4, prefill_only=True))
    start_local(scheduler, make_sequence([6] * 4, max_tokens=1))
    assert len(plan_of(scheduler).chunks) == 3
    assert scheduler.decoding == [going_on]


def test_nobody_gives_blocks_up_to_a_step_ahead() -> None:
    scheduler, (old, young), step = begin(8, 8, num_blocks=15)
    old.sampling = young.sampling = SamplingParams(max_tokens=50)
    while (ahead := scheduler.schedule()) is not None:
        book(scheduler, step)
        step = ahead
    assert young.num_preemptions == 0
    book(scheduler, step)
    plan_of(scheduler)
    assert young.num_preemptions == 1


GRAMMAR = OutputGrammar("{}", frozenset())


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(temperature=0.0), None),
        (SamplingParams(temperature=0.7, seed=3), None),
        (SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1), None),
        (SamplingParams(top_p=0.5), None),
        (SamplingParams(top_k=5), None),
        (SamplingParams(min_p=0.1), None),
        (SamplingParams(presence_penalty=0.5), None),
        (SamplingParams(frequency_penalty=0.5), None),
        (SamplingParams(repetition_penalty=1.5), None),
        (SamplingParams(bad_words=frozenset({(1, 2), (3,)})), None),
        (SamplingParams(logit_bias={3: 1.0}), None),
        (SamplingParams(stop_token_ids=frozenset({1}), min_tokens=9), None),
        (SamplingParams(logprobs=0), None),
        (SamplingParams(constraint=GRAMMAR), Awaited.CONSTRAINT),
        (SamplingParams(constraint=GRAMMAR, return_margins=True), Awaited.CONSTRAINT),
        (SamplingParams(return_margins=True), Awaited.MARGINS),
    ],
)
def test_whose_tokens_the_host_has_to_see(params: SamplingParams, reason: Awaited | None) -> None:
    assert awaited(params) is reason


@pytest.mark.parametrize(
    "told", [SamplingParams(constraint=GRAMMAR), SamplingParams(return_margins=True)]
)
def test_who_waits_holds_up_its_batch_and_nobody_after_it(told: SamplingParams) -> None:
    scheduler, (seq, other), first = begin(3, 4)
    seq.sampling = told
    assert scheduler.schedule() is None
    book(scheduler, first)
    step = plan_of(scheduler)
    assert scheduler.schedule() is None
    scheduler.release(seq)
    ahead = plan_of(scheduler)
    assert scheduler.owners(ahead) == (other,)
    assert ahead.chunks[0].follows is not None
    book(scheduler, step)


def test_what_is_counted_lacks_the_token_that_the_device_alone_has() -> None:
    scheduler, (seq,), first = begin(3)
    seq.sampling = SamplingParams(
        max_tokens=9, min_tokens=2, presence_penalty=1.0, stop_token_ids=frozenset({4})
    )
    specs = []
    for _ in range(3):
        ahead = plan_of(scheduler)
        (chunk,) = ahead.chunks
        assert chunk.follows == 0
        assert chunk.sample is not None
        assert chunk.sample.history is not None
        specs.append((len(chunk.sample.history.token_ids), chunk.end, chunk.sample.allow_stop))
        book(scheduler, first)
        first = ahead
    assert specs == [(3, 4, False), (4, 5, True), (5, 6, True)]
