"""How many tokens of prompts a step may have, so that tokens come as often as promised. Pure.

A sequence that decodes owes its next token when so many promised intervals have passed since it
began to decode as it has drawn tokens: whoever was faster before has time to spare. The largest
of a few sizes is taken with which nine of ten steps are over before the first of these moments;
few large parts of a prompt cost less than many small ones, as each step has a constant. With none
of them, prompts wait for a step: sequences alone gain on what they owe. Whoever cannot be on
time any more, even alone, holds nobody up.

Idea: the slack of Niyama's and Kairos's schedules.
"""

from collections.abc import Iterable
from typing import NamedTuple

from diptych.engine.scheduling.sequence import Sequence
from diptych.step_model import StepModel, StepWork

_NUM_SIZES = 4  # the budget of a step, its half, and so on
_MOST_HELD = 32  # steps without prompts in a row; then they get the least size all the same


class _Began(NamedTuple):
    """When a sequence was first seen to decode, and how long it was."""

    at_s: float
    num_tokens: int


class Pacer:
    """The promise of one engine. Asked before each step is decided, and told if there was one."""

    def __init__(self, tpot_s: float, max_batched_tokens: int) -> None:
        """``tpot_s``: the time between tokens, on average, that is promised."""
        self._tpot_s = tpot_s
        self._sizes = [max(1, max_batched_tokens >> halved) for halved in range(_NUM_SIZES)]
        self._began: dict[Sequence, _Began] = {}  # of those that decode
        self._holds = False  # by the last answer
        self._num_held = 0  # steps in a row in which prompts had to wait

    def max_prompt_tokens(
        self, decoding: Iterable[Sequence], work: StepWork, model: StepModel, now_s: float
    ) -> int | None:
        """Of the step that is decided now; None: no matter how many. Asking alone counts nothing.

        ``decoding`` get a token with it, and nothing is promised to those that yield; ``work`` is
        all that is to be computed.
        """
        self._began = {
            seq: self._began.get(seq) or _Began(now_s, seq.num_planned_tokens)
            for seq in decoding
            if not seq.yields
        }
        if not work.num_prefill_tokens or not model.prefill.is_known:
            return self._answer(None)
        beside = work._replace(num_prefill_tokens=0, num_attention_pairs=0)
        left_s = self._least_left_s(now_s, model.decode.expected_s(beside))
        if left_s is None:
            return self._answer(None)
        pairs_per_token = work.num_attention_pairs / work.num_prefill_tokens
        for size in self._sizes:
            pairs = round(size * pairs_per_token)
            step = beside._replace(num_prefill_tokens=size, num_attention_pairs=pairs)
            if model.prefill.expected_s(step) * model.prefill.upper_ratio <= left_s:
                return self._answer(size)
        return self._answer(self._sizes[-1] if self._num_held >= _MOST_HELD else 0)

    def count_step(self) -> None:
        """A step was decided by the last answer."""
        self._num_held = self._num_held + 1 if self._holds else 0

    def _least_left_s(self, now_s: float, alone_s: float) -> float | None:
        """Until the first token is due of those that a step without prompts brings in time."""
        left = (
            began.at_s + self._tpot_s * (seq.num_planned_tokens - began.num_tokens + 1) - now_s
            for seq, began in self._began.items()
        )
        return min((each_s for each_s in left if each_s >= alone_s), default=None)

    def _answer(self, num_tokens: int | None) -> int | None:
        self._holds = num_tokens == 0
        return num_tokens
