"""Runs the trials of :mod:`diptych.engine.scheduling.step_trials` on a worker's own device."""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from diptych.engine.launched_step import LaunchedStep
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import Chunk, SampleSpec, StepPlan
from diptych.engine.scheduling.step_trials import (
    MAX_CONTEXT,
    MeasuredStep,
    StepTrial,
    decode_trials,
    prompt_trials,
)
from diptych.sampling_params import SamplingParams

_MOST_S: Final = 2.0  # of either kind; then a model is so slow that none more are tried
IN_A_ROW: Final = 4  # of a trial, where a device has several steps at a time


class StepTrials:
    """One worker's, before any sequence owns a block. Model thread."""

    def __init__(self, runner: Runner, *, max_batched_tokens: int, max_num_seqs: int) -> None:
        """Take the runner, which has been warmed up: nothing is compiled any more."""
        self._runner = runner
        cache = runner.kv_cache
        most = min(MAX_CONTEXT, runner.model.config.max_position)
        self._num_blocks = max(1, min(cache.num_blocks, most // cache.block_size))
        max_context = min(most, self._num_blocks * cache.block_size)
        # Parts of prompts first: they write what single tokens read.
        self._kinds = (
            prompt_trials(max_context=max_context, max_batched_tokens=max_batched_tokens),
            decode_trials(max_context=max_context, max_num_seqs=max_num_seqs),
        )

    def run(
        self,
        progress: Callable[[float], None] = lambda ratio: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> list[MeasuredStep]:
        """What each trial took, in the order in which they ran.

        Uses the cache's first blocks and leaves them zero. Fewer than there are to try where they
        take long. Raises as steps do.
        """
        measured: list[MeasuredStep] = []
        num_done, num_all = 0, sum(map(len, self._kinds))
        for trials in self._kinds:
            until_s = clock() + _MOST_S
            for number, trial in enumerate(trials):
                if clock() >= until_s:
                    break
                measured.append(MeasuredStep(trial.work, self._duration_s(trial)))
                progress((num_done + number + 1) / num_all)
            num_done += len(trials)
        self._runner.clear(self._num_blocks)
        progress(1.0)
        return measured

    def _duration_s(self, trial: StepTrial) -> float:
        """As engines run them: where the device has several at a time, one is launched and then
        the oldest is waited for, so that launching counts if it takes longer than the step.
        """
        plan, most = StepPlan(chunks=tuple(self._chunks(trial))), self._runner.steps_in_flight
        steps, duration_s = deque[LaunchedStep](), 0.0
        for _ in range(IN_A_ROW if most > 1 else 1):
            steps.append(self._runner.launch(plan))
            if len(steps) == most:
                duration_s = steps.popleft().wait().duration_s
        for step in steps:
            step.wait()
        return duration_s

    def _chunks(self, trial: StepTrial) -> list[Chunk]:
        chunks = [self._chunk(row, trial.context_len - 1, 1) for row in range(trial.num_rows)]
        if trial.num_prompt_tokens:
            chunks.append(self._chunk(0, trial.prompt_start, trial.num_prompt_tokens))
        return chunks

    def _chunk(self, place: int, start: int, num_tokens: int) -> Chunk:
        """Each place has other blocks first: what one has read is not at hand for all."""
        num = -(-(start + num_tokens) // self._runner.kv_cache.block_size)
        first = place * num
        return Chunk(
            token_ids=(1,) * num_tokens,
            start=start,
            block_table=[(first + each) % self._num_blocks for each in range(num)],
            sample=_GREEDY,
        )


_GREEDY: Final = SampleSpec(params=SamplingParams(max_tokens=1), allow_stop=True)
