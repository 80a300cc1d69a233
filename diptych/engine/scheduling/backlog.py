"""What is left to compute of sequences that are in the batch or want to be. Pure."""

from collections.abc import Iterable

from diptych.engine.scheduling.sequence import Sequence
from diptych.step_model import StepWork, num_pairs


def work(runnable: Iterable[Sequence]) -> StepWork:
    """One token of each sequence that decodes, and what prompts lack."""
    num_rows = num_context = num_tokens = num_attention_pairs = 0
    for seq in runnable:
        if seq.is_decoding:
            num_rows += 1
            num_context += seq.num_tokens
        else:
            num_tokens += seq.num_pending_tokens
            num_attention_pairs += num_pairs(seq.num_computed_tokens, seq.num_tokens)
    return StepWork(num_rows, num_context, num_tokens, num_attention_pairs)
