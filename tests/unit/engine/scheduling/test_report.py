"""What chunks tell of a sequence's tokens: each once, whatever is cached and however it is cut."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.report import (
    LogprobsPart,
    LogprobsReport,
    Pooling,
    PoolingReport,
    Report,
    StatesPart,
)
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey, SequenceState
from diptych.engine.scheduling.step import SampledToken, StepOutput
from diptych.errors import InvalidRequestError, LogitsError
from diptych.sampling_params import SamplingParams
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs
from diptych.v1 import prefill_pb2
from prefill_worker.asked_report import read_report

BLOCK_SIZE = 4


def sequence(number: int, num_tokens: int, report: Report | None) -> Sequence:
    return Sequence(
        key=SequenceKey("router", number),
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1),
        prefill_only=True,
        report=report,
    )


def scheduler_of(max_batched_tokens: int) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=1, max_batched_tokens=max_batched_tokens, max_model_len=48
    )
    return Scheduler(config, BlockPool(24, BLOCK_SIZE))


def run(scheduler: Scheduler, seq: Sequence) -> list[LogprobsPart]:
    """What its steps were to tell, until it has its token."""
    parts = []
    while seq.state is not SequenceState.LEASED:
        plan = scheduler.schedule()
        assert plan is not None
        (chunk,) = plan.chunks
        if chunk.report is not None:
            assert isinstance(chunk.report, LogprobsPart)
            at = chunk.report.first_row
            rows = chunk.token_ids[at : at + len(chunk.report.token_ids)]
            assert rows == tuple(each - 1 for each in chunk.report.token_ids)
            parts.append(chunk.report)
        token = SampledToken(7, math.nan) if chunk.sample else None
        scheduler.update(plan, StepOutput(tokens=(token,), duration_s=0.0))
    return parts


@given(
    num_tokens=st.integers(2, 40),
    bounds=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    max_batched_tokens=st.integers(1, 48),
    is_cached=st.booleans(),
)
def test_each_token_is_told_of_once(
    num_tokens: int, bounds: tuple[int, int], max_batched_tokens: int, is_cached: bool
) -> None:
    first, end = sorted(min(bound, num_tokens) for bound in bounds)
    scheduler = scheduler_of(max_batched_tokens)
    if is_cached:
        other = sequence(1, num_tokens, None)
        scheduler.add_prefill(other)
        run(scheduler, other)
    seq = sequence(2, num_tokens, LogprobsReport(first, end, 3))
    scheduler.add_prefill(seq)
    assert seq.num_cached_tokens < first
    if is_cached:
        assert seq.num_cached_tokens == (first - 1) // BLOCK_SIZE * BLOCK_SIZE
    parts = run(scheduler, seq)
    assert [each for part in parts for each in part.token_ids] == list(range(first, end))
    assert all(part.position == part.token_ids[0] and part.num_top == 3 for part in parts)


def test_one_that_waits_computes_itself_what_it_is_to_tell_of() -> None:
    """Another one's blocks, done meanwhile, are of no use to it."""
    scheduler = scheduler_of(64)
    other, seq = sequence(1, 20, None), sequence(2, 20, LogprobsReport(1, 20, 0))
    scheduler.add_prefill(other)
    scheduler.add_prefill(seq)
    run(scheduler, other)
    assert [part.token_ids for part in run(scheduler, seq)] == [tuple(range(1, 20))]


def test_a_report_comes_with_its_sequences_update_and_one_without_numbers_ends_it() -> None:
    scheduler = scheduler_of(8)
    seq = sequence(1, 16, LogprobsReport(1, 16, 0))
    scheduler.add_prefill(seq)
    told = PromptLogprobs(1, (TokenLogprobs(-1.0, (), ()),))
    plan = scheduler.schedule()
    assert plan is not None
    (update,) = scheduler.update(
        plan, StepOutput(tokens=(None,), duration_s=0.0, reports={0: told})
    )
    assert update.report == told
    plan = scheduler.schedule()
    assert plan is not None
    error = LogitsError("no numbers")
    (update,) = scheduler.update(plan, StepOutput(tokens=(error,), duration_s=0.0))
    assert update.error is error
    scheduler.release(seq)
    counts = scheduler.pool.counts()
    assert counts.free + counts.cached == counts.total


def states_parts(pooling: Pooling, max_batched_tokens: int, *, is_cached: bool) -> tuple[int, int]:
    """Rows that are summed of 20 tokens, and tokens that were computed."""
    scheduler = scheduler_of(max_batched_tokens)
    if is_cached:
        other = sequence(1, 20, None)
        scheduler.add_prefill(other)
        run(scheduler, other)
    seq = sequence(2, 20, PoolingReport(pooling))
    scheduler.add_prefill(seq)
    num_rows = num_computed = 0
    while seq.state is not SequenceState.LEASED:
        plan = scheduler.schedule()
        assert plan is not None
        (chunk,) = plan.chunks
        num_computed += len(chunk.token_ids)
        if isinstance(chunk.report, StatesPart):
            assert chunk.report.first_row + chunk.report.num_rows == len(chunk.token_ids)
            num_rows += chunk.report.num_rows
        token = SampledToken(7, math.nan) if chunk.sample else None
        scheduler.update(plan, StepOutput(tokens=(token,), duration_s=0.0))
    return num_rows, num_computed


@pytest.mark.parametrize("max_batched_tokens", [6, 48])
@pytest.mark.parametrize("is_cached", [False, True])
def test_a_mean_is_of_all_tokens_and_a_last_state_of_one(
    max_batched_tokens: int, *, is_cached: bool
) -> None:
    mean = states_parts(Pooling.MEAN, max_batched_tokens, is_cached=is_cached)
    assert mean == (20, 20)
    last = states_parts(Pooling.LAST_TOKEN, max_batched_tokens, is_cached=is_cached)
    assert last == (1, 4 if is_cached else 20)


@pytest.mark.parametrize(
    ("first", "end", "num_top", "field"),
    [
        (0, 3, 0, "first_position"),
        (3, 2, 0, "first_position"),
        (1, 6, 0, "first_position"),
        (1, 5, 21, "num_top"),
    ],
)
def test_a_report_that_cannot_be_is_refused(first: int, end: int, num_top: int, field: str) -> None:
    start = prefill_pb2.PrefillStart()
    start.spec.token_ids.extend(range(5))
    assert read_report(start) is None
    asked = start.report.logprobs
    asked.first_position, asked.end_position, asked.num_top = first, end, num_top
    with pytest.raises(InvalidRequestError) as caught:
        read_report(start)
    assert caught.value.field == f"report.logprobs.{field}"


def test_a_report_of_another_kind_is_refused() -> None:
    start = prefill_pb2.PrefillStart(report=prefill_pb2.PromptReport())
    with pytest.raises(InvalidRequestError) as caught:
        read_report(start)
    assert caught.value.field == "report.kind"
