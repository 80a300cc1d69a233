"""Prompts beside sequences that decode: a step has of them what the promised pace leaves."""

import math
from collections.abc import Sequence as Many

import pytest

from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.pacer import Pacer
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey
from diptych.engine.scheduling.step import SampledToken, StepOutput
from diptych.engine.scheduling.step_learner import work_of
from diptych.sampling_params import SamplingParams
from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel, StepWork

BUDGET, TPOT_S = 512, 0.1
MODEL = StepModel(
    StepCost(0.04, 0.002, 0.0, 0.0, 0.0, 1.0, NUM_KNOWN_STEPS),
    StepCost(0.06, 0.002, 0.0, 0.001, 0.0, 1.25, NUM_KNOWN_STEPS),
)
PROMPTS = StepWork(num_decode_rows=2, num_prefill_tokens=5000, num_attention_pairs=0)


def make_sequence(num_prompt_tokens: int, num_output_tokens: int = 400) -> Sequence:
    return Sequence(
        key=SequenceKey("router", num_prompt_tokens),
        token_ids=[1] * num_prompt_tokens,
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(max_tokens=num_output_tokens),
    )


def test_the_largest_part_that_nine_of_ten_times_leaves_the_first_who_owes_on_time() -> None:
    pacer, (first, second) = Pacer(TPOT_S, BUDGET), (make_sequence(9), make_sequence(10))
    both = [first, second]
    assert pacer.max_prompt_tokens(both, PROMPTS, MODEL, 0.0) == 0  # 0.16 s with 64 tokens
    first.token_ids += [1] * 8  # and owes the next at 0.9 s
    second.token_ids += [1] * 16
    sizes = [
        pacer.max_prompt_tokens(both, PROMPTS, MODEL, now_s) for now_s in (0.1, 0.4, 0.55, 0.7, 0.8)
    ]
    assert sizes == [512, 256, 128, 64, 0]


@pytest.mark.parametrize("tardy", [False, True])
def test_whoever_cannot_be_on_time_any_more_holds_nobody_up(tardy: bool) -> None:
    pacer, seq = Pacer(TPOT_S, BUDGET), make_sequence(9)
    pacer.max_prompt_tokens([seq], PROMPTS, MODEL, 0.0)
    now_s = 0.06 if tardy else 0.05  # it owes a token at 0.1 s; a step takes 0.044 s at the least
    expected = None if tardy else 0
    assert pacer.max_prompt_tokens([seq], PROMPTS, MODEL, now_s) == expected


def test_nothing_is_held_back_where_nobody_waits_or_nothing_is_known() -> None:
    pacer, seq = Pacer(TPOT_S, BUDGET), make_sequence(9)
    assert pacer.max_prompt_tokens([], PROMPTS, MODEL, 0.0) is None
    assert pacer.max_prompt_tokens([seq], StepWork(2, 20), MODEL, 0.0) is None
    cold = MODEL._replace(prefill=MODEL.prefill._replace(num_steps=1))
    assert pacer.max_prompt_tokens([seq], PROMPTS, cold, 0.0) is None


def test_prompts_are_not_held_back_for_ever() -> None:
    """Newcomers owe a token soon, one after the other."""
    pacer = Pacer(TPOT_S, BUDGET)
    sizes = []
    for number in range(70):
        decoding = [make_sequence(number + 1)]
        for _ in range(2):  # the first time nothing could run
            size = pacer.max_prompt_tokens(decoding, PROMPTS, MODEL, float(number))
        pacer.count_step()
        sizes.append(size)
    assert sizes.count(64) == 2
    assert sizes.count(0) == 68


class Run:
    """A scheduler whose steps take what the model says, by a clock that only they move."""

    def __init__(self, pacer: Pacer | None) -> None:
        config = SchedulerConfig(max_model_len=4096, max_batched_tokens=BUDGET, max_num_seqs=16)
        self.scheduler = Scheduler(config, BlockPool(1024, 16))
        self.pacer = pacer
        self.now_s = 0.0
        self.token_times: dict[Sequence, list[float]] = {}

    def start(self, seq: Sequence) -> Sequence:
        self.scheduler.reserve(seq)
        self.scheduler.start(seq, [], compute_missing=True)
        self.token_times[seq] = []
        return seq

    def step(self) -> None:
        scheduler, limit = self.scheduler, None
        if self.pacer is not None:
            limit = self.pacer.max_prompt_tokens(
                scheduler.decoding, scheduler.work, MODEL, self.now_s
            )
        plan = scheduler.schedule(limit)
        assert plan is not None
        if self.pacer is not None:
            self.pacer.count_step()
        work = work_of(plan)
        self.now_s += MODEL.cost_of(work).expected_s(work)
        tokens = tuple(SampledToken(7, math.nan) if chunk.sample else None for chunk in plan.chunks)
        for update in scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.0)):
            if update.token is not None:
                self.token_times[update.sequence].append(self.now_s)

    def latest_s(self, seqs: Many[Sequence]) -> float:
        """By how much the latest token of these came after it was due; less than 0: none did."""
        return max(
            at_s - (self.token_times[seq][0] + number * TPOT_S)
            for seq in seqs
            for number, at_s in enumerate(self.token_times[seq])
        )


@pytest.mark.parametrize("paced", [False, True])
def test_long_prompts_beside_decodes_break_no_promise(paced: bool) -> None:
    """Three prompts of 3,000 tokens come while four sequences run; unpaced they stop these."""
    run = Run(Pacer(TPOT_S, BUDGET) if paced else None)
    running = [run.start(make_sequence(20 + number)) for number in range(4)]
    for _ in range(6):
        run.step()
    prompts = [run.start(make_sequence(3000 + number, 4)) for number in range(3)]
    while not all(len(run.token_times[seq]) == 4 for seq in prompts):
        run.step()
    late_s = run.latest_s(running)
    assert (late_s <= 1e-9) is paced
    if not paced:
        assert late_s > 1.0
