"""Executes step plans: inputs, forward pass, sampling. Signatures first."""

from collections.abc import Callable

from torch import Tensor

from diptych.engine.kv_cache import KVCache
from diptych.engine.model import Decoder
from diptych.engine.step import StepOutput, StepPlan


class Runner:
    """Runs steps of one model on one KV cache; only ever on the model thread."""

    def __init__(self, model: Decoder, kv_cache: KVCache) -> None: ...

    def warm_up(self, progress: Callable[[float], None] = lambda ratio: None) -> None:
        """Compile and touch everything before the first real step. Ratio 0 to 1."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Write the KV of the plan's tokens and draw the tokens it asks for."""
        raise NotImplementedError

    def logits(self, plan: StepPlan) -> Tensor:
        """Like execute, but the logits after every token: [num_tokens, vocab_size] float32."""
        raise NotImplementedError
