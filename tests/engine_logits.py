"""The engine's own logits for a text, computed step by step over its paged cache."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import Chunk, StepPlan


def chunk_logits(
    runner: Runner, token_ids: Sequence[int], chunks: Sequence[int], block_table: Sequence[int]
) -> Iterator[Tensor]:
    """After each token of a step, for steps of so many tokens: [num_tokens, vocab_size] float32.

    ``block_table``: blocks of the runner's cache, enough for all tokens.
    """
    assert sum(chunks) == len(token_ids)
    start = 0
    for size in chunks:
        chunk = Chunk(
            token_ids=tuple(token_ids[start : start + size]),
            start=start,
            block_table=tuple(block_table),
            sample=None,
        )
        yield runner.logits(StepPlan(chunks=(chunk,)))
        start += size


def perplexity(logits: Tensor, token_ids: Sequence[int]) -> float:
    """Of each token after the first, given those before it.

    logits: [num_tokens, vocab_size], after each token.
    """
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:]))
    return math.exp(float(loss))
