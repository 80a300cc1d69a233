"""How many tokens of prompts a step may have, so that tokens come as often as promised. Pure.

A sequence that decodes owes its next token when so many promised intervals have passed since it
began to decode as it has drawn tokens: whoever was faster before has time to spare. The largest
of a few sizes is taken with which nine of ten steps are over before the first of these moments;
few large parts of a prompt cost less than many small ones, as each step has a constant. With none
of them, prompts wait for a step: sequences alone gain on what they owe. Whoever cannot be on
time any more, even alone, holds nobody up.

What a worker promises to all is kept whatever waits. What a request asked for itself is an average,
so that most of what it will gain by tokens still expected is spent in advance; and it gives way
where a prompt would have its first token later than that was wanted, or has waited for as long as
it could. A prompt waits for half of what it can, as others will come; and, where nobody said when
it is wanted or it is late already, for a step no longer than that takes. Prompts of batches have a
share of their own, see beside_others.py, and are not held up. What a step tells of prompts is a
part of what it takes, see telling_time.py.

Idea: the slack of Niyama's and Kairos's schedules.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, NamedTuple

from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.engine.scheduling.telling_time import TellingTime, most_told
from diptych.paced import Paced
from diptych.step_model import StepModel, StepWork

LENT: Final = 0.75  # of what a sequence will gain, as answers may end sooner than expected
_NUM_SIZES = 4  # the budget of a step, its half, and so on
_MOST_HELD = 32  # steps without prompts in a row; then they get the least size all the same
_LEAST_STEPS = 2  # without prompts, that one has to be able to wait for
_WAITED = 0.5  # of the time that a prompt could wait


class _Began(NamedTuple):
    """Since when a sequence decodes, and how long it was then."""

    at_s: float
    num_tokens: int


class _Owing(NamedTuple):
    """A sequence that decodes and asked for a pace."""

    left_s: float  # until its next token is due, with what it lends
    gain_s: float  # by each token that comes in a step without prompts
    num_more: float  # tokens that it expects; inf: it is not known, and nothing lent

    def wait_s(self, step_s: float, alone_s: float) -> float:
        """In steps without prompts, before one may take so long: or it has ended."""
        missing_s, gain_s = step_s - self.left_s, self.gain_s
        if missing_s <= 0.0:
            return 0.0
        if math.isfinite(self.num_more):  # the rest of its gain was lent
            gain_s *= 1.0 - LENT
        if gain_s <= 0.0 or missing_s >= gain_s * self.num_more:
            return self.num_more * alone_s
        return missing_s / gain_s * alone_s


class Pacer:
    """The promises of one engine. Asked before each step is decided, and told if there was one."""

    def __init__(
        self,
        tpot_s: float | None,
        max_batched_tokens: int,
        telling_time: TellingTime | None = None,
    ) -> None:
        """``tpot_s``: the time between tokens, on average, that is promised to all.
        ``telling_time``: the engine's; without it nothing is known of that.
        """
        self._tpot_s = tpot_s
        self._telling_time = telling_time or TellingTime()
        self._sizes = [max(1, max_batched_tokens >> halved) for halved in range(_NUM_SIZES)]
        self._began: dict[Sequence, _Began] = {}  # of those that decode and are promised any
        self._holds = False  # by the last answer
        self._num_held = 0  # steps in a row in which prompts had to wait
        self._held_since_s: float | None = None  # the first of those
        self._asked_s = 0.0  # the last time

    def note(self, decoding: Iterable[Sequence], now_s: float) -> None:
        """These get a token with the step that is decided now; nothing is promised to batches."""
        began = self._began
        self._began = {
            seq: began.get(seq) or _begins(seq, now_s)
            for seq in decoding
            if (seq.tpot_s or self._tpot_s) and not seq.yields
        }

    def max_prompt_tokens(
        self,
        decoding: Iterable[Sequence],
        runnable: Iterable[Sequence],
        work: StepWork,
        model: StepModel,
        now_s: float,
    ) -> int | None:
        """Of the step that is decided now; None: no matter how many. Asking alone counts nothing.

        ``decoding`` get a token with it, and all that are ``runnable`` want to be in it, of which
        those may that are prepared; ``work`` is all that is to be computed.
        """
        self._asked_s = now_s
        self.note(decoding, now_s)
        if not self._began or not work.num_prefill_tokens or not model.prefill.is_known:
            return self._answer(None)
        seqs = [seq for seq in runnable if seq.is_prepared]
        upper_s = partial(self._upper_s, seqs, work, model)
        alone_s = model.decode.expected_s(work.without_prompts)
        firm_s = min(self._firm(now_s, alone_s), default=math.inf)
        asked = list(self._asked_for(now_s, alone_s))
        size = self._fitting(upper_s, _soonest_s(firm_s, asked))
        if asked and size != self._sizes[0]:
            step_s = upper_s(min(self._sizes[0], work.num_prefill_tokens))
            held_s = 0.0 if self._held_since_s is None else now_s - self._held_since_s
            can_wait_s = self._can_wait_s(seqs, work, model, now_s, step_s - held_s)
            if can_wait_s < _LEAST_STEPS * alone_s:
                asked = []
            kept = [each for each in asked if each.wait_s(step_s, alone_s) <= can_wait_s]
            size = self._fitting(upper_s, _soonest_s(firm_s, kept))
        if size == 0 and self._num_held >= _MOST_HELD:
            size = self._sizes[-1]
        return self._answer(size)

    def paced(self, now_s: float) -> list[Paced]:
        """How far those are that decode and asked for a pace."""
        return [
            Paced.expected(
                seq.tpot_s,
                max(0.0, now_s - began.at_s),
                max(0, seq.num_tokens - began.num_tokens),
                seq.num_expected_tokens - seq.num_output_tokens,
                *seq.key,
            )
            for seq, began in self._began.items()
            if seq.tpot_s and seq.state is not SequenceState.FINISHED
        ]

    def count_step(self) -> None:
        """A step was decided by the last answer."""
        if not self._holds:
            self._num_held, self._held_since_s = 0, None
            return
        self._num_held += 1
        if self._held_since_s is None:
            self._held_since_s = self._asked_s

    def _firm(self, now_s: float, alone_s: float) -> Iterator[float]:
        """How long it is until each one's next token is due, of what is promised to all.

        Without those whom not even a step without prompts brings in time.
        """
        if self._tpot_s is None:
            return
        for seq, began in self._began.items():
            left_s = _left_s(seq, began, self._tpot_s, now_s)
            if left_s >= alone_s:
                yield left_s

    def _asked_for(self, now_s: float, alone_s: float) -> Iterator[_Owing]:
        """Likewise, of what each brought; with what it lends."""
        for seq, began in self._began.items():
            if not seq.tpot_s:
                continue
            num_answer = seq.num_planned_tokens - seq.num_prompt_tokens
            num_more = max(0, seq.num_expected_tokens - num_answer)
            lent_s = LENT * max(0, num_more - 1) * max(0.0, seq.tpot_s - alone_s)
            left_s = _left_s(seq, began, seq.tpot_s, now_s) + lent_s
            if left_s >= alone_s:
                yield _Owing(left_s, seq.tpot_s - alone_s, num_more or math.inf)

    def _upper_s(
        self, runnable: list[Sequence], work: StepWork, model: StepModel, num_tokens: int
    ) -> float:
        """What nine of ten steps with so many tokens of prompts do not exceed."""
        cost = model.prefill
        pairs = round(num_tokens * work.num_attention_pairs / work.num_prefill_tokens)
        step = work._replace(num_prefill_tokens=num_tokens, num_attention_pairs=pairs)
        others = (seq for seq in runnable if not seq.gives_way)  # see beside_others.py
        num_told = most_told(others, num_tokens)
        telling_s = self._telling_time.expected_s(num_told, cost.prefill_token_s)
        return (cost.expected_s(step) + telling_s) * cost.upper_ratio

    def _fitting(self, upper_s: Callable[[int], float], left_s: float) -> int | None:
        """The largest size with which nine of ten steps take no longer; 0: none of them."""
        if math.isinf(left_s):
            return None
        fitting = (size for size in self._sizes if upper_s(size) <= left_s)
        return next(fitting, 0)

    def _can_wait_s(
        self,
        runnable: Iterable[Sequence],
        work: StepWork,
        model: StepModel,
        now_s: float,
        undue_s: float,
    ) -> float:
        """For how long prompts may wait, so that nine of ten first tokens come when they are
        wanted; less than 0 where only prompts of batches wait.

        ``undue_s``: for how long those may of which nobody said when, or that are late.
        """
        cost, beside = model.prefill, work.without_prompts
        budget = max(1, self._sizes[0] - work.num_decode_rows)
        queued, least_s = StepWork(), math.inf
        for seq in runnable:
            if seq.decodes_next or seq.gives_way:
                continue
            start, end = seq.num_planned_computed_tokens, seq.num_planned_tokens
            queued = queued.plus(StepWork.of_prompt(end, start))
            num_steps = math.ceil(queued.num_prefill_tokens / budget)
            step_s = cost.expected_s(beside)  # what it takes whatever it has of prompts
            takes_s = cost.expected_s(queued, 0) + num_steps * step_s
            left_s = seq.due_s - now_s - takes_s
            if seq.num_output_tokens or math.isinf(left_s) or left_s < 0.0:
                left_s = undue_s
            else:
                left_s = _WAITED * (left_s - (cost.upper_ratio - 1.0) * takes_s)
            least_s = min(least_s, left_s)
            if least_s <= 0.0:
                break
        return least_s if queued.num_prefill_tokens else -1.0

    def _answer(self, num_tokens: int | None) -> int | None:
        self._holds = num_tokens == 0
        return num_tokens


def _begins(seq: Sequence, now_s: float) -> _Began:
    """Who was handed over has waited since its first token; who begins anew has not."""
    at_s = now_s if seq.emitted_s is None else min(now_s, seq.emitted_s)
    seq.emitted_s = None
    return _Began(at_s, seq.num_planned_tokens)


def _soonest_s(firm_s: float, asked: Iterable[_Owing]) -> float:
    return min((firm_s, *(each.left_s for each in asked)))


def _left_s(seq: Sequence, began: _Began, tpot_s: float, now_s: float) -> float:
    """Until its next token is due."""
    num_drawn = seq.num_planned_tokens - began.num_tokens
    return began.at_s + tpot_s * (num_drawn + 1) - now_s
