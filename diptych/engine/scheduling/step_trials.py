"""Steps that are run before the first real one, to learn what a worker's steps take. Pure.

Without them a router knows nothing of a worker until requests have run there, and then of steps
with as many rows as there were at a time alone. So the trials have what real steps have: single
tokens of one sequence to as many as a step may have, with short contexts and long ones; parts of
prompts, from a few tokens to all that a step may have, at their beginning and behind others, by
themselves and beside sequences that decode.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from diptych.step_model import StepWork, num_pairs

NUM_PASSES: Final = 2  # over all trials of a kind
_CONTEXT: Final = 1024  # tokens, before parts of prompts; half of it before single tokens
_ROWS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_PROMPTS: Final = (4, 16, 64)  # tokens of each part, and ...
_MOST_PROMPT: Final = 2048  # ... as many as a step may have, up to that, and a fourth of those
_ROWS_BESIDE: Final = 4


class StepTrial(NamedTuple):
    """What one such step has."""

    num_rows: int  # sequences that get one token
    context_len: int  # that each of those attends to, itself included
    num_prompt_tokens: int = 0
    prompt_start: int = 0  # tokens before those

    @property
    def is_long(self) -> bool:
        """Whether there are several trials with shorter prompts that say about what it takes."""
        return self.num_prompt_tokens > _PROMPTS[-1]

    @property
    def work(self) -> StepWork:
        """As a scheduler counts it."""
        end = self.prompt_start + self.num_prompt_tokens
        return StepWork(
            self.num_rows,
            self.num_rows * self.context_len,
            self.num_prompt_tokens,
            num_pairs(self.prompt_start, end),
        )


def prompt_trials(
    *, max_context: int, max_batched_tokens: int, max_num_seqs: int
) -> list[StepTrial]:
    """Of parts of prompts, the shortest first; each of two tokens and more.

    max_context: tokens of one sequence for which there is room.
    """
    most = min(max_context, max_batched_tokens)
    found = []
    for length in (each for each in _PROMPTS if each <= most):
        num_rows = min(_ROWS_BESIDE, max_num_seqs - 1, max_batched_tokens - length)
        for start in sorted({0, min(max_context, _CONTEXT) - length}):
            found.append(StepTrial(0, 0, length, start))
            if num_rows > 0:
                context_len = max(1, min(max_context, _CONTEXT) // 4)
                found.append(StepTrial(num_rows, context_len, length, start))
    longest = min(most, _MOST_PROMPT)
    long = {longest // 4, longest} if longest > _PROMPTS[-1] else {longest}
    found += (StepTrial(0, 0, each) for each in sorted(long - {0, 1, *_PROMPTS}))
    return found


def decode_trials(*, max_context: int, max_num_seqs: int) -> list[StepTrial]:
    """Of single tokens, the fewest first. max_context: as above."""
    contexts = sorted({min(16, max_context), max(1, min(max_context, _CONTEXT) // 2)})
    nums_rows = [num for num in _ROWS if num <= max_num_seqs]
    return [StepTrial(num, each) for num in nums_rows for each in contexts]


def looks_s(num_tokens: int, took_s: Mapping[int, float]) -> float:
    """About what a trial takes with a longer prompt than those that took so long, two at the least.

    By a line through the two longest, no steeper than one from nothing.
    """
    longest, shorter, *_ = sorted(took_s, reverse=True)
    slope_s = (took_s[longest] - took_s[shorter]) / (longest - shorter)
    slope_s = min(max(0.0, slope_s), took_s[longest] / longest)
    return took_s[longest] + slope_s * (num_tokens - longest)
