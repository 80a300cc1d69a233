"""Steps that are run before the first real one, to learn what a worker's steps take. Pure.

Without them a router knows nothing of a worker until requests have run there, and then of steps
with as many rows as there were at a time alone. So the trials have what real steps have: single
tokens of one sequence to as many as a step may have, with short contexts and long ones; parts of
prompts, at their beginning and behind others, by themselves and beside sequences that decode.
"""

from typing import Final, NamedTuple

from diptych.step_model import NUM_KNOWN_STEPS, StepWork, num_pairs

MAX_CONTEXT: Final = 1024  # tokens; what they take beyond is on the same line
_ROWS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_PROMPTS: Final = (4, 16, 64, 128)  # tokens of each part
_ROWS_BESIDE: Final = 4


class StepTrial(NamedTuple):
    """What one such step has."""

    num_rows: int  # sequences that get one token
    context_len: int  # that each of those attends to, itself included
    num_prompt_tokens: int = 0
    prompt_start: int = 0  # tokens before those

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


class MeasuredStep(NamedTuple):
    """What a step computed and how long it took."""

    work: StepWork
    duration_s: float


def prompt_trials(*, max_context: int, max_batched_tokens: int) -> list[StepTrial]:
    """Of parts of prompts, the shortest first; each of two tokens and more.

    max_context: tokens of one sequence for which there is room.
    """
    context_len = min(MAX_CONTEXT, max_context)
    lengths = [length for length in _PROMPTS if length <= min(context_len, max_batched_tokens)]
    found = []
    for length in lengths:
        last = context_len - length
        for start in sorted({0, last // 3, last}):
            found.append(StepTrial(0, 0, length, start))
            if start != last // 3 and length + _ROWS_BESIDE <= max_batched_tokens:
                found.append(StepTrial(_ROWS_BESIDE, max(1, context_len // 4), length, start))
    return _enough(found)


def decode_trials(*, max_context: int, max_num_seqs: int) -> list[StepTrial]:
    """Of single tokens, the fewest first. max_context: as above."""
    context_len = min(MAX_CONTEXT, max_context)
    contexts = sorted({min(16, context_len), max(1, context_len // 2)})
    nums_rows = [num for num in _ROWS if num <= max_num_seqs]
    return _enough([StepTrial(num, each) for num in nums_rows for each in contexts])


def _enough(trials: list[StepTrial]) -> list[StepTrial]:
    """The first ones once more, and again, until there are so many as to be relied on."""
    if not trials:
        return []
    num_lacking = max(0, NUM_KNOWN_STEPS - len(trials))
    return trials + [trials[number % len(trials)] for number in range(num_lacking)]
