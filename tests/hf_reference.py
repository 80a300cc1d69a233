"""What Hugging Face transformers says: logits and greedy tokens of a model folder."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch


class GreedyRun(NamedTuple):
    token_ids: list[int]
    margins: list[float]  # of each token's logit to the runner-up's


@cache
def load(folder: Path) -> Any:
    """The transformers model of ``folder`` in float32, for inference."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.inference_mode()
def logits(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits after each token. Returns [num_tokens, vocab_size] float32."""
    result: torch.Tensor = load(folder)(torch.tensor([list(token_ids)])).logits[0]
    return result


@torch.inference_mode()
def greedy(folder: Path, token_ids: Sequence[int], num_tokens: int) -> GreedyRun:
    """The next ``num_tokens`` most likely tokens, end-of-sequence ignored."""
    model = load(folder)
    ids, cache_ = torch.tensor([list(token_ids)]), None
    run = GreedyRun([], [])
    for _ in range(num_tokens):
        output = model(ids, past_key_values=cache_, use_cache=True)
        top = torch.topk(output.logits[0, -1], 2)
        run.token_ids.append(int(top.indices[0]))
        run.margins.append(float(top.values[0] - top.values[1]))
        ids, cache_ = top.indices[:1].view(1, 1), output.past_key_values
    return run
