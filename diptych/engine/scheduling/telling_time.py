"""How much longer steps take for the log probabilities that they tell of prompts. Pure.

No other steps are foretold by it: they tell nothing. But whoever ends a worker whose step never
ends has to wait for those that tell, and of a small model with many tokens these take several
times as long. So does who decodes beside them, and was promised a pace.
"""

from collections.abc import Iterable
from typing import Final

from diptych.engine.scheduling.sequence import Sequence

_DECAY: Final = 0.95  # weight of the past against one more step
# Tokens that each one told of takes as long as, until one was. A model of 6 layers, 640 wide, with
# 262,144 tokens takes 7.
_UNKNOWN_TOKENS: Final = 16
_MOST_ABOVE: Final = 2.0  # a step counts as so many times the expected at the most; see LearnedCost


def most_told(prompts: Iterable[Sequence], num_tokens: int) -> int:
    """Tokens that a step with so many of these may have to tell of, whosever they are."""
    num_told = 0
    for seq in prompts:
        if seq.report is not None:
            start = seq.num_planned_computed_tokens
            num_told += seq.report.num_told(start, min(start + num_tokens, seq.num_tokens))
    return min(num_told, num_tokens)


class TellingTime:
    """Of one engine; owned by it."""

    def __init__(self) -> None:
        self._num_told = self._told_s = 0.0  # faded

    def add(self, num_told: int, took_s: float, token_s: float) -> None:
        """A step told of so many tokens, and took so much longer for it; ``token_s`` as below."""
        expected_s = max(num_told * token_s, self.expected_s(num_told, token_s))
        counted_s = min(max(0.0, took_s), _MOST_ABOVE * expected_s)
        self._num_told = self._num_told * _DECAY + num_told
        self._told_s = self._told_s * _DECAY + counted_s

    def expected_s(self, num_told: int, token_s: float) -> float:
        """Beside what else a step does, of which a token takes ``token_s``."""
        if not self._num_told:
            return num_told * _UNKNOWN_TOKENS * token_s
        return num_told * self._told_s / self._num_told
