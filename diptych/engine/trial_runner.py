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
    looks_s,
    prompt_trials,
)
from diptych.sampling_params import SamplingParams
from diptych.step_model import NUM_KNOWN_STEPS, MeasuredStep

IN_A_ROW: Final = 4  # of a trial, where a device has several steps at a time
_MOST_S: Final = 3.0
_MOST_OF_ONE: Final = 0.25  # of that, so that a long one leaves time for all others, twice
_MOST_TOKENS: Final = 4096  # of KV that all trials write and read
_GREEDY: Final = SampleSpec(params=SamplingParams(max_tokens=1), allow_stop=True)


class TrialRunner:
    """One worker's, before any sequence owns a block. Model thread."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_batched_tokens: int,
        max_num_seqs: int,
        most_s: float = _MOST_S,
    ) -> None:
        """Take the runner, which has been warmed up: nothing is compiled any more.

        ``most_s`` is the time of either kind, and as much again where too few of it ran.
        """
        self._runner = runner
        self._most_s = most_s
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
        """All of one kind in two passes, but long prompts that look too long.

        Where the time is over before anything could be relied on there is as much again. Where
        there are few to try they are repeated until enough ran.
        """
        until_s, most_of_one_s = clock() + self._most_s, _MOST_OF_ONE * self._most_s
        ran: list[StepTrial] = []
        least_s: dict[StepTrial, float] = {}
        took_s: dict[int, float] = {}  # at the least, with so long a prompt, waiting included

        def run(trial: StepTrial) -> None:
            begun_s = clock()
            least_s[trial] = min(self._duration_s(trial), least_s.get(trial, math.inf))
            length = trial.num_prompt_tokens
            took_s[length] = min(clock() - begun_s, took_s.get(length, math.inf))
            ran.append(trial)
            progress(min(1.0, len(ran) / max(NUM_KNOWN_STEPS, NUM_PASSES * len(trials))))

        def is_over() -> bool:
            return clock() > until_s + self._most_s * (len(ran) < NUM_KNOWN_STEPS)

        for trial in trials:
            if clock() > until_s:
                break
            if not trial.is_long or looks_s(trial.num_prompt_tokens, took_s) < most_of_one_s:
                run(trial)
        shortest_first, are_all = tuple(ran), clock() <= until_s
        if are_all or NUM_PASSES * len(ran) >= NUM_KNOWN_STEPS:
            for trial in reversed(shortest_first):
                if is_over():
                    break
                run(trial)
        for trial in itertools.cycle(shortest_first if are_all else ()):
            if len(ran) >= NUM_KNOWN_STEPS or is_over():
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
