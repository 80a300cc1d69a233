"""The step that needs most memory, to measure how much that is. Pure."""

from diptych.engine.scheduling.step import Chunk, SampleSpec, StepPlan
from diptych.sampling_params import SamplingParams

_SAMPLE = SampleSpec(params=SamplingParams(top_p=0.5, max_tokens=1), allow_stop=True)


def largest_step(
    *, max_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int
) -> StepPlan:
    """As many tokens and sequences as a step may have, each at the end of the longest context.

    The first sequences have as many of the tokens as they may. Every token draws, and all lie
    in the first block, over one another: what is computed means nothing.
    """
    table = (0,) * -(-max_model_len // block_size)
    num_left, chunks = max_batched_tokens, []
    for num_others in reversed(range(max_num_seqs)):
        num_tokens = min(max_model_len, num_left - num_others)
        num_left -= num_tokens
        chunks.append(
            Chunk(
                token_ids=(0,) * num_tokens,
                start=max_model_len - num_tokens,
                block_table=table,
                sample=_SAMPLE,
            )
        )
    return StepPlan(chunks=tuple(chunks))
