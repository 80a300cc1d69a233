"""What a step of an engine computes, and how long steps take. Pure.

Learned by a worker from its own steps (:mod:`diptych.engine.scheduling.step_learner`), told on
Watch, and used by routers to look ahead.
"""

import math
from typing import Final, NamedTuple

from diptych.v1 import worker_pb2

ROW_COUNTS: Final = (2, 8, 32, 128)  # beyond each of which a step's rows may cost more
NUM_KNOWN_STEPS = 24  # fewer of a kind say too little of it
ENOUGH_FIXED: Final = (
    4.0  # times what a step costs by itself, that tokens cost which may do for one
)
NINE_OF_TEN: Final = 1.2816  # standard deviations that so many do not exceed
_NUM_DOUBTED = 8  # steps of requests; fewer do not set right what trials had wrong
MOST_S = 100.0  # that a worker may say of any part of a step; and the most of an upper ratio


class StepWork(NamedTuple):
    """The contents of one step, or of several together."""

    num_decode_rows: int = 0  # sequences that get one token
    num_context_tokens: int = 0  # that those attend to, themselves included
    num_prefill_tokens: int = 0  # of prompts, in chunks of two and more
    num_attention_pairs: int = 0  # of those tokens: each one with each that it attends to

    @classmethod
    def of_prompt(cls, num_tokens: int, num_cached_tokens: int) -> "StepWork":
        """What is left to compute of a prompt of which the first tokens are there."""
        return cls(
            num_prefill_tokens=num_tokens - num_cached_tokens,
            num_attention_pairs=num_pairs(num_cached_tokens, num_tokens),
        )

    @property
    def without_prompts(self) -> "StepWork":
        """What decodes alone."""
        return self._replace(num_prefill_tokens=0, num_attention_pairs=0)

    def plus(self, other: "StepWork") -> "StepWork":
        """Both together."""
        if not any(other):
            return self
        return StepWork(
            self.num_decode_rows + other.num_decode_rows,
            self.num_context_tokens + other.num_context_tokens,
            self.num_prefill_tokens + other.num_prefill_tokens,
            self.num_attention_pairs + other.num_attention_pairs,
        )


class MeasuredStep(NamedTuple):
    """What a step computed and how long it took, s."""

    work: StepWork
    duration_s: float


class StepCost(NamedTuple):
    """Seconds of one kind of step: so many for itself, and so many for each part of its work.

    The first rows wait for the bytes of the weights and are nearly free, later ones compute: each
    beyond one of ``ROW_COUNTS`` costs ``more_row_s`` in addition; where there are none, nothing.
    Nine of ten steps took at most ``upper_ratio`` times that.
    """

    fixed_s: float = 0.0
    row_s: float = 0.0
    context_token_s: float = 0.0
    prefill_token_s: float = 0.0
    attention_pair_s: float = 0.0
    upper_ratio: float = 1.0
    num_steps: int = 0  # it was learned from
    more_row_s: tuple[float, ...] = ()
    num_trials: int = 0  # of those steps: before the first request

    @property
    def is_known(self) -> bool:
        """Whether enough steps ran to rely on it, and took any time."""
        return self.num_steps >= NUM_KNOWN_STEPS and (self.fixed_s > 0.0 or any(self[:5]))

    def expected_s(self, work: StepWork, num_steps: int = 1) -> float:
        """Of ``work``, done in so many steps that have as many rows each."""
        return (
            num_steps * self.fixed_s
            + self.rows_s(work.num_decode_rows, num_steps)
            + work.num_context_tokens * self.context_token_s
            + work.num_prefill_tokens * self.prefill_token_s
            + work.num_attention_pairs * self.attention_pair_s
        )

    def decoding_s(self, num_rows: int, num_context_tokens: int) -> float:
        """Of one step without prompts."""
        rows_s = self.rows_s(num_rows)
        return self.fixed_s + rows_s + num_context_tokens * self.context_token_s

    def rows_s(self, num_rows: float, num_steps: int = 1) -> float:
        """Of what :meth:`expected_s` is, the part of so many rows without their context."""
        rows_s = num_rows * self.row_s
        if not self.more_row_s:
            return rows_s
        for count, more_s in zip(ROW_COUNTS, self.more_row_s, strict=False):
            num_beyond = num_rows - num_steps * count
            if num_beyond <= 0:
                break
            rows_s += num_beyond * more_s
        return rows_s

    def more_rows(self, left_s: float, num_there: int, num_context_tokens: float) -> float:
        """So many rows, each with so many tokens of context, a step can have beside those that are
        there, in ``left_s``; a part of one counts. inf: they cost nothing.
        """
        if left_s < 0.0:
            return 0.0
        row_s, num = self.row_s + num_context_tokens * self.context_token_s, float(num_there)
        for count, more_s in zip(ROW_COUNTS, self.more_row_s, strict=False):
            if count > num:
                until_s = (count - num) * row_s
                if left_s < until_s:
                    break
                left_s, num = left_s - until_s, float(count)
            row_s += more_s
        return num - num_there + (left_s / row_s if row_s > 0.0 else math.inf)


class StepModel(NamedTuple):
    """The two kinds of step: those without parts of prompts, and those with.

    They are learned apart: of the second kind even the constant part is another, and a worker
    that runs but one of them does not forget what it knew of the other.
    """

    decode: StepCost = StepCost()
    prefill: StepCost = StepCost()

    @property
    def is_doubted(self) -> bool:
        """Whether hardly any step of a request ran yet: trials may all have been slowed."""
        num_trials = self.decode.num_trials + self.prefill.num_trials
        num_steps = self.decode.num_steps + self.prefill.num_steps
        return 0 < num_trials > num_steps - _NUM_DOUBTED

    def of_prompts_s(self, work: StepWork, took_s: float) -> float:
        """Of what a step took, what it would not have without its parts of prompts."""
        if not work.num_decode_rows:
            return took_s
        return max(0.0, took_s - self.decode.expected_s(work.without_prompts))

    def cost_of(self, work: StepWork) -> StepCost:
        """Of the kind that such a step is of."""
        return self.prefill if work.num_prefill_tokens else self.decode

    def to_proto(self) -> worker_pb2.StepModel:
        return worker_pb2.StepModel(
            decode=worker_pb2.StepCost(**self.decode._asdict()),
            prefill=worker_pb2.StepCost(**self.prefill._asdict()),
        )

    @classmethod
    def from_proto(cls, told: worker_pb2.StepModel) -> "StepModel":
        """What a worker says; of one that says nothing nothing is known.

        Nor is anything of a kind of step of which what it is for takes no time at all.
        """
        decode, prefill = _cost(told.decode), _cost(told.prefill)._replace(more_row_s=())
        takes_time = prefill.fixed_s or prefill.prefill_token_s or prefill.attention_pair_s
        return cls(
            decode if decode.fixed_s or decode.row_s else StepCost(),
            prefill if takes_time else StepCost(),
        )


def num_pairs(start: int, end: int) -> int:
    """Pairs of the tokens from ``start`` on with all up to themselves."""
    return (end * (end + 1) - start * (start + 1)) // 2


def _cost(told: worker_pb2.StepCost) -> StepCost:
    """What is no time at all is not known. Nine of ten steps take no less than expected.

    A newer worker may tell of larger counts of rows.
    """
    told_s = (told.fixed_s, told.row_s, told.context_token_s, told.prefill_token_s)
    more_row_s = tuple(told.more_row_s[: len(ROW_COUNTS)])
    cost = StepCost(*told_s, told.attention_pair_s, told.upper_ratio, told.num_steps, more_row_s)
    cost = cost._replace(num_trials=min(told.num_trials, told.num_steps))
    parts = (*cost[:5], cost.upper_ratio, *more_row_s)
    if not all(0.0 <= each <= MOST_S for each in parts):  # nor is what is not a number
        return StepCost()
    return cost._replace(upper_ratio=max(1.0, cost.upper_ratio))
