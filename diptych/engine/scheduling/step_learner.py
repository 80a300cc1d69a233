"""Learns how long this engine's steps take from those that ran. Pure."""

from diptych.engine.scheduling.step import StepPlan
from diptych.learned_cost import LearnedCost
from diptych.step_model import ROW_COUNTS, StepCost, StepModel, StepWork, num_pairs, rows_beyond


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


class StepLearner:
    """One engine's steps, each kind by itself. Owned by the engine."""

    def __init__(self) -> None:
        self._decode = LearnedCost(3 + len(ROW_COUNTS))
        self._prefill = LearnedCost(5)

    @property
    def model(self) -> StepModel:
        """As learned until now."""
        (fixed, row, context, *more_rows), upper_ratio, num_steps = self._decode.learned
        of_decode = StepCost(
            fixed, row, context, 0.0, 0.0, upper_ratio, num_steps, tuple(more_rows)
        )
        (fixed, row, context, token, pair), upper_ratio, num_steps = self._prefill.learned
        of_prefill = StepCost(fixed, row, context, token, pair, upper_ratio, num_steps)
        return StepModel(of_decode, of_prefill)

    def learn(self, work: StepWork, duration_s: float) -> None:
        """A step of such contents took so long."""
        features = (1.0, *map(float, work))
        if work.num_prefill_tokens:
            self._prefill.learn(features, duration_s)
        elif work.num_decode_rows:
            beyond = map(float, rows_beyond(work.num_decode_rows))
            self._decode.learn((*features[:3], *beyond), duration_s)
