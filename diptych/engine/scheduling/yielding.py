"""How long a sequence that yields lets others go first, and how small its steps are. Pure.

A sequence of a batch yields: steps compute parts of its prompt only where they compute none of
others', and one that decodes leaves where others lack its place or its blocks. It goes like any
other, for good, once steps have passed it by for ten seconds on end, as it does in a router's
queue, or it has lost its blocks three times: so it ends, whatever else comes.

A step cannot be broken off, and who comes meanwhile waits for its end. So where others came of
late, a step with prompts that yield is a short one, but not so short that more than a tenth of it
is spent on what each step costs. Where none came for a while, nobody is waited for: then it is as
large as any.
"""

import math
from collections.abc import Container, Iterable
from typing import Final

from diptych.engine.scheduling.sequence import Sequence
from diptych.step_model import StepModel, StepWork

MOST_PASSED_S: Final = 10.0  # as router.placement.spare.BATCH_SPARE_ONLY_S
MOST_PREEMPTIONS: Final = 3
QUIET_S: Final = 30.0  # without others, after which steps are as large as any
_MOST_S: Final = 0.05  # that a step takes beside which others may come
_MOST_CONSTANT: Final = 0.1  # of its time, that may go into what each step costs: then it is longer
_UNKNOWN_RATIO: Final = 0.25  # of the largest step, as long as nobody knows how long steps take


def note_passed(runnable: Iterable[Sequence], served: Container[Sequence], now_s: float) -> None:
    """A step was planned that has tokens of ``served``: the others are passed by, and age."""
    for seq in runnable:
        if not seq.yields or seq.has_aged:
            continue
        if seq.num_preemptions >= MOST_PREEMPTIONS:
            seq.has_aged = True
        elif seq in served or seq.num_in_flight_tokens:
            seq.passed_since_s = None
        elif seq.passed_since_s is None:
            seq.passed_since_s = now_s
        else:
            seq.has_aged = now_s - seq.passed_since_s >= MOST_PASSED_S


def without_sitting_out(decoding: Iterable[Sequence], max_rows: int) -> list[Sequence]:
    """In their order; of those that give way so many, whom steps passed by for longest."""
    seqs = list(decoding)
    by_turn = sorted((seq for seq in seqs if seq.gives_way), key=_passed_since)
    sitting_out = set(by_turn[max_rows:])
    return [seq for seq in seqs if seq not in sitting_out]


def _passed_since(seq: Sequence) -> float:
    return math.inf if seq.passed_since_s is None else seq.passed_since_s


class ShortSteps:
    """How many tokens of prompts that yield the steps of one engine have. Owned by the engine."""

    def __init__(self, max_batched_tokens: int) -> None:
        self._max_batched_tokens = max_batched_tokens
        self._others_came_s: float | None = None

    def admitted(self, seq: Sequence, now_s: float) -> None:
        """A new sequence has its blocks."""
        if not seq.yields:
            self._others_came_s = now_s

    def max_tokens(self, work: StepWork, model: StepModel, now_s: float) -> int | None:
        """Of the step that is decided now; None: no matter how many.

        ``work`` is all that is to be computed.
        """
        came_s = self._others_came_s
        if came_s is None or now_s - came_s >= QUIET_S or not work.num_prefill_tokens:
            return None
        cost, most = model.prefill, self._max_batched_tokens
        if not cost.is_known:
            return max(1, int(most * _UNKNOWN_RATIO))
        constant_s = cost.expected_s(work.without_prompts)
        tokens_s = cost.expected_s(work) - constant_s
        left_s = max(_MOST_S, constant_s / _MOST_CONSTANT) - constant_s
        if tokens_s <= left_s:
            return None
        return min(most, max(1, int(work.num_prefill_tokens * left_s / tokens_s)))
