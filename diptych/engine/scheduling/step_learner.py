"""Learns how long this engine's steps take from those that ran. Pure."""

from collections.abc import Iterable

from diptych.engine.scheduling.report import LogprobsPart
from diptych.engine.scheduling.step import StepPlan
from diptych.learned_cost import LearnedCost, MachinePace
from diptych.step_model import ROW_COUNTS, MeasuredStep, StepCost, StepModel, StepWork, num_pairs

_TELLING = 1.5  # times a count, the rows of a step that says what those beyond it cost
_NUM_DOUBTED = 8  # such steps of which half is believed
_TELLS_MUCH_RATIO = 1 / 16  # of a step's tokens; all of them make it half as long again
_TRIAL_COUNTS = 8  # as so many of them: nothing but its rows made it what it was


def work_of(plan: StepPlan) -> StepWork:
    """What a step computes."""
    num_rows = num_context = num_tokens = num_attention_pairs = 0
    for chunk in plan.chunks:
        if len(chunk.token_ids) == 1:
            num_rows += 1
            num_context += chunk.end
        else:
            num_tokens += len(chunk.token_ids)
            num_attention_pairs += num_pairs(chunk.start, chunk.end)
    return StepWork(num_rows, num_context, num_tokens, num_attention_pairs)


def tells_much(plan: StepPlan) -> bool:
    """Whether the log probabilities that it tells of prompts make it clearly longer than another
    of the same contents. Hidden states are summed up in no time.
    """
    return num_told(plan) > _TELLS_MUCH_RATIO * plan.num_tokens


def num_told(plan: StepPlan) -> int:
    """Tokens of prompts of which it tells log probabilities."""
    parts = (chunk.report for chunk in plan.chunks)
    return sum(part.num_rows for part in parts if isinstance(part, LogprobsPart))


class StepLearner:
    """One engine's steps, each kind by itself but for the machine's pace. Owned by the engine.

    What rows beyond a count cost more is told once there were steps with half as many again, as
    few say little of many; of few such steps a part: a single slow one, which may be the last with
    so many rows, is not taken for what they take.
    """

    def __init__(self, trials: Iterable[MeasuredStep] = ()) -> None:
        """Learn from those first, which were run to be learned from, while others may have been
        starting beside.
        """
        self._decode = LearnedCost(3 + len(ROW_COUNTS))
        self._prefill = LearnedCost(5)
        self._num_beyond = [0] * len(ROW_COUNTS)  # steps with so many rows that they say something
        for work, duration_s in trials:
            self.learn(work, duration_s)
        self._num_beyond = [_TRIAL_COUNTS * num for num in self._num_beyond]
        machine = MachinePace()
        for cost in (self._decode, self._prefill):
            cost.doubt()
            cost.join(machine)
        self._num_trials = self._decode.num_samples, self._prefill.num_samples
        self._model: StepModel | None = None  # as learned until now; None: not asked for since

    @property
    def model(self) -> StepModel:
        """As learned until now. Each step asks, when it is decided and when it is booked."""
        if self._model is None:
            self._model = self._learned()
        return self._model

    def _learned(self) -> StepModel:
        (fixed, row, context, *more_rows), upper_ratio, num_steps = self._decode.learned
        told = tuple(
            more * num / (num + _NUM_DOUBTED)
            for more, num in zip(more_rows, self._num_beyond, strict=True)
        )
        of_decode = StepCost(
            fixed, row, context, 0.0, 0.0, upper_ratio, num_steps, told, self._num_trials[0]
        )
        (fixed, row, context, token, pair), upper_ratio, num_steps = self._prefill.learned
        of_prefill = StepCost(
            fixed, row, context, token, pair, upper_ratio, num_steps, (), self._num_trials[1]
        )
        return StepModel(of_decode, of_prefill)

    def learn(self, work: StepWork, duration_s: float) -> None:
        """A step of such contents took so long."""
        self._model = None
        features = (1.0, *map(float, work))
        if work.num_prefill_tokens:
            self._prefill.learn(features, duration_s)
        elif work.num_decode_rows:
            num_rows = work.num_decode_rows
            beyond = (float(max(0, num_rows - count)) for count in ROW_COUNTS)
            self._decode.learn((*features[:3], *beyond), duration_s)
            for place, count in enumerate(ROW_COUNTS):
                self._num_beyond[place] += num_rows >= _TELLING * count
