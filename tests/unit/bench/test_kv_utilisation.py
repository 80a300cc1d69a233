"""How full the held KV blocks are: a running batch wastes less than a twentieth of its slots."""

import math
import random

import pytest

from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey, SequenceState
from diptych.engine.scheduling.step import SampledToken, StepOutput, StepPlan
from diptych.sampling_params import SamplingParams

BLOCK_SIZE = 16
NUM_SEQUENCES = 24
NUM_STEPS = 1500
MIN_MEAN_LENGTH = 300  # tokens


def make_sequence(number: int, rng: random.Random) -> Sequence:
    num_prompt_tokens = rng.randint(100, 450)
    return Sequence(
        key=SequenceKey("router", number),
        token_ids=[number, *(rng.randrange(1000) for _ in range(num_prompt_tokens - 1))],
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(max_tokens=rng.randint(20, 180)),
    )


def answer(plan: StepPlan) -> StepOutput:
    tokens = tuple(SampledToken(7, math.nan) if chunk.sample else None for chunk in plan.chunks)
    return StepOutput(tokens=tokens, duration_s=0.0)


@pytest.mark.parametrize("local_prefill", [False, True], ids=["pulled", "computed here"])
def test_held_slots_are_used(local_prefill: bool) -> None:
    """The engine's defaults, blocks of 16 tokens; each sequence that ends is followed by one."""
    rng = random.Random(2)
    config = SchedulerConfig(max_model_len=2048, max_batched_tokens=512, max_num_seqs=64)
    scheduler = Scheduler(config, BlockPool(4096, BLOCK_SIZE))
    live: list[Sequence] = []
    used = allocated = num_lengths = number = 0
    for step in range(NUM_STEPS):
        live = [seq for seq in live if seq.state is not SequenceState.FINISHED]
        while len(live) < NUM_SEQUENCES:
            number += 1
            seq = make_sequence(number, rng)
            scheduler.reserve(seq)
            if not local_prefill:
                scheduler.mark_proven(seq)
            scheduler.start(seq, [7], compute_missing=local_prefill)
            live.append(seq)
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan, answer(plan))
        if step >= NUM_STEPS // 5:  # all began together
            for seq, _ in scheduler.holders():  # a shared block counts for each of them
                used += seq.num_computed_tokens
                allocated += len(seq.block_table) * BLOCK_SIZE
            num_lengths += scheduler.num_running
    assert used / num_lengths >= MIN_MEAN_LENGTH
    assert used / allocated >= 0.95, used / allocated
