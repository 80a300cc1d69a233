"""How long a step should take at the most, by all that is known. Pure.

For those who end a worker whose step never ends: a legitimate step must not look like one.
"""

from typing import Final

from diptych.engine.scheduling.step_timing import StepTiming
from diptych.step_model import StepModel, StepWork

# A token of a prompt that attends to so many takes about twice as long as one that attends to
# none, where attention is dear: small models on CPUs. It is cheaper in larger ones.
_DOUBLING_CONTEXT: Final = 4096  # tokens


def forecast_s(work: StepWork, model: StepModel, timing: StepTiming) -> float:
    """What nine of ten such steps do not exceed; 0 until anything is known.

    By ``model`` once it knows such steps, before that by ``timing``. Neither may have seen a
    context as long as this: it counts as above, or as was learned where that is more.
    """
    cost = model.cost_of(work)
    num_tokens = work.num_prefill_tokens + work.num_decode_rows
    if cost.is_known:
        learned_s = cost.expected_s(work) * cost.upper_ratio
        alone_s = cost.expected_s(work._replace(num_attention_pairs=0)) * cost.upper_ratio
    elif work.num_prefill_tokens:
        learned_s = alone_s = timing.predict_prefill_s(num_tokens)
    else:
        learned_s = alone_s = timing.predict_s(num_tokens)
    mean_context = work.num_attention_pairs / max(1, num_tokens)
    return max(learned_s, alone_s * (1.0 + mean_context / _DOUBLING_CONTEXT))
