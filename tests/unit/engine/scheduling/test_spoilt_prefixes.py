"""Steps whose numbers go bad: at most one more request per prompt meets what they left behind.

A slot without numbers makes every later slot of its sequence one, and its logits, as in a
model. Whatever sequences shared, ran and went meanwhile, the second request for any prompt
after the last fault is answered.
"""

import math
from collections.abc import Sequence as Table

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey
from diptych.engine.scheduling.step import Chunk, SampledToken, SequenceUpdate, StepOutput
from diptych.errors import BlocksExhaustedError, LogitsError
from diptych.sampling_params import SamplingParams

BLOCK_SIZE, NUM_BLOCKS = 2, 40


class Numbers:
    """Which slots hold numbers, and a runner on them."""

    def __init__(self) -> None:
        self.bad: set[tuple[int, int]] = set()

    def run(self, chunk: Chunk, *, goes_bad: bool) -> SampledToken | LogitsError | None:
        is_bad = goes_bad or any(
            self._slot(chunk.block_table, position) in self.bad for position in range(chunk.start)
        )
        slots = {self._slot(chunk.block_table, at) for at in range(chunk.start, chunk.end)}
        self.bad = self.bad | slots if is_bad else self.bad - slots
        if chunk.sample is None:
            return None
        return LogitsError("not numbers") if is_bad else SampledToken(1, math.nan)

    def _slot(self, table: Table[int], position: int) -> tuple[int, int]:
        index, offset = divmod(position, BLOCK_SIZE)
        return table[index], offset


class SpoiltMachine(RuleBasedStateMachine):
    """Requests that share prefixes; now and then a chunk goes bad."""

    def __init__(self) -> None:
        super().__init__()
        config = SchedulerConfig(max_num_seqs=4, max_batched_tokens=6, max_model_len=32)
        self.scheduler = Scheduler(config, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
        self.numbers = Numbers()
        self.live: list[Sequence] = []
        self.prompts: list[list[int]] = []

    def add(self, prompt: list[int], *, prefill_only: bool) -> Sequence:
        seq = Sequence(
            key=SequenceKey("router", len(self.prompts)),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=3),
            prefill_only=prefill_only,
        )
        if prefill_only:
            self.scheduler.add_prefill(seq)
        else:
            self.scheduler.reserve(seq)
            self.scheduler.start(seq, [], compute_missing=True)
        self.live.append(seq)
        return seq

    def step(self, bad_chunk: int | None) -> list[SequenceUpdate]:
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        tokens = tuple(
            self.numbers.run(chunk, goes_bad=index == bad_chunk)
            for index, chunk in enumerate(plan.chunks)
        )
        updates = self.scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.0))
        for update in updates:
            if update.finish_reason is not None or update.error is not None:
                self.scheduler.release(update.sequence)
                self.live.remove(update.sequence)
        return updates

    @rule(shared=st.integers(0, 8), own=st.integers(0, 2), prefill_only=st.booleans())
    def ask(self, shared: int, own: int, prefill_only: bool) -> None:
        prompt = [0] * shared + [1] + [own] * 4
        try:
            self.add(prompt, prefill_only=prefill_only)
        except BlocksExhaustedError:
            return
        self.prompts.append(prompt)

    @rule(bad_chunk=st.sampled_from([None, None, 0, 1]))
    def run_a_step(self, bad_chunk: int | None) -> None:
        self.step(bad_chunk)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.scheduler.release(seq)

    def teardown(self) -> None:
        for seq in self.live:
            self.scheduler.release(seq)
        for prompt in self.prompts:
            errors = [self.error_of(prompt) for _ in range(2)]
            assert errors[1] is None, "what was spoilt is still shared"

    def error_of(self, prompt: list[int]) -> Exception | None:
        seq = self.add(prompt, prefill_only=True)
        while True:
            for update in self.step(None):
                if update.token is not None or update.error is not None:
                    self.scheduler.release(seq)
                    return update.error


TestSpoilt = SpoiltMachine.TestCase
TestSpoilt.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
