"""A scheduler, sequences for it, and its steps without a model."""

import math

from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey
from diptych.engine.scheduling.step import SampledToken, SequenceUpdate, StepOutput, StepPlan
from diptych.sampling_params import SamplingParams


def make_scheduler(
    num_blocks: int = 16,
    block_size: int = 4,
    max_model_len: int = 60,
    *,
    max_num_seqs: int = 64,
    max_batched_tokens: int = 512,
    decode_headroom_blocks: int = 1,
) -> Scheduler:
    config = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        decode_headroom_blocks=decode_headroom_blocks,
    )
    return Scheduler(config, BlockPool(num_blocks, block_size))


def make_sequence(
    token_ids: list[int], *, prefill_only: bool = False, max_tokens: int = 16
) -> Sequence:
    return Sequence(
        key=SequenceKey("router", 1),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(max_tokens=max_tokens),
        prefill_only=prefill_only,
    )


def start_local(scheduler: Scheduler, seq: Sequence) -> Sequence:
    """Admit a sequence that computes its prompt itself."""
    scheduler.reserve(seq)
    scheduler.start(seq, [], compute_missing=True)
    return seq


def start_handed_over(scheduler: Scheduler, seq: Sequence) -> Sequence:
    """Admit one whose prompt was computed elsewhere, and whose first token was drawn there."""
    scheduler.reserve(seq)
    scheduler.mark_proven(seq)
    scheduler.start(seq, [8], compute_missing=False)
    return seq


def step(
    scheduler: Scheduler, max_yielding_tokens: int | None = None, now_s: float = 0.0
) -> tuple[StepPlan, list[SequenceUpdate]]:
    """One step in which every drawn token is 7."""
    plan = scheduler.schedule(max_yielding_tokens=max_yielding_tokens, now_s=now_s)
    assert plan is not None
    tokens = tuple(SampledToken(7, math.nan) if chunk.sample else None for chunk in plan.chunks)
    return plan, scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.01))


def sequences_of(updates: list[SequenceUpdate]) -> list[Sequence]:
    return [update.sequence for update in updates]
