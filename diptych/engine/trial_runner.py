"""Runs the trials of :mod:`diptych.engine.scheduling.step_trials` on a worker's own device."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from diptych.engine.launched_step import LaunchedStep
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import Chunk, SampleSpec, StepPlan
from diptych.engine.scheduling.step_trials import (
    NUM_PASSES,
    StepTrial,
    decode_trials,
    prompt_trials,
)
from diptych.sampling_params import SamplingParams
from diptych.step_model import NUM_KNOWN_STEPS, MeasuredStep

IN_A_ROW: Final = 4  # of a trial, where a device has several steps at a time
_MOST_S: Final = 3.0  # of either kind, and as much again where too few of it ran
_MOST_TOKENS: Final = 4096  # of KV that all trials write and read
_GREEDY: Final = SampleSpec(params=SamplingParams(max_tokens=1), allow_stop=True)


class TrialRunner:
    """One worker's, before any sequence owns a block. Model thread."""

    def __init__(self, runner: Runner, *, max_batched_tokens: int, max_num_seqs: int) -> None:
        """Take the runner, which has been warmed up: nothing is compiled any more."""
        self._runner = runner
        cache = runner.kv_cache
        self._num_blocks = min(cache.num_blocks, max(1, _MOST_TOKENS // cache.block_size))
        max_context = min(self._num_blocks * cache.block_size, runner.model.config.max_position)
        self._kinds = (
            prompt_trials(
                max_context=max_context,
                max_batched_tokens=max_batched_tokens,
                max_num_seqs=max_num_seqs,
            ),
            decode_trials(max_context=max_context, max_num_seqs=max_num_seqs),
        )

    def run(
        self,
        progress: Callable[[float], None] = lambda ratio: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> list[MeasuredStep]:
        """What the trials took, each as often as it ran.

        A neighbour that comes or goes meanwhile must not look like what many rows cost: the
        second pass is in the opposite order, and the lesser of both counts.
        Uses the cache's first blocks and leaves them zero. Where they take long the longest are
        left out. Raises as steps do.
        """
        prompts, decodes = self._kinds
        measured = self._timed(prompts, clock, lambda ratio: progress(ratio / 2))
        measured += self._timed(decodes, clock, lambda ratio: progress((1 + ratio) / 2))
        self._runner.clear(self._num_blocks)
        progress(1.0)
        return measured

    def _timed(
        self,
        trials: list[StepTrial],
        clock: Callable[[], float],
        progress: Callable[[float], None],
    ) -> list[MeasuredStep]:
        """All of one kind in two passes, each of which has half of the time.

        What would probably end behind that is not begun. The shortest ones are repeated where
        otherwise too few ran for anything to be relied on.
        """
        begin_s = clock()
        ran: list[StepTrial] = []
        least_s: dict[StepTrial, float] = {}

        def run(trial: StepTrial) -> float:
            """Seconds that each of its tokens took."""
            duration_s = self._duration_s(trial)
            least_s[trial] = min(duration_s, least_s.get(trial, math.inf))
            ran.append(trial)
            progress(min(1.0, len(ran) / max(NUM_KNOWN_STEPS, NUM_PASSES * len(trials))))
            return duration_s / trial.num_tokens

        token_s = 0.0
        for trial in trials:
            if clock() + token_s * trial.num_tokens > begin_s + _MOST_S / NUM_PASSES:
                break
            token_s = run(trial)
        shortest_first = tuple(ran)
        for trial in reversed(shortest_first):
            if clock() > begin_s + _MOST_S:
                break
            run(trial)
        for trial in itertools.cycle(shortest_first):
            if len(ran) >= NUM_KNOWN_STEPS or clock() > begin_s + 2 * _MOST_S:
                break
            run(trial)
        return [MeasuredStep(trial.work, least_s[trial]) for trial in ran]

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
        """As many places as there are blocks for have blocks of their own."""
        num = -(-(start + num_tokens) // self._runner.kv_cache.block_size)
        first = place * num
        return Chunk(
            token_ids=(1,) * num_tokens,
            start=start,
            block_table=[(first + each) % self._num_blocks for each in range(num)],
            sample=_GREEDY,
        )
