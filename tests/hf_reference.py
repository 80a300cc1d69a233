"""What Hugging Face transformers says: logits and greedy tokens of a model folder."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch


class GreedyRun(NamedTuple):
    token_ids: list[int]
    margins: list[float]  # of each token's logit to the runner-up's


@cache
def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model of ``folder``, for inference."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@cache
def load_int8(folder: Path) -> Any:
    """The same in float32, but all that enters a linear layer is rounded as for int8.

    Written out naively: each row of a weight, and each 64 inputs of a row, become -127
    to 127 times a scale of their own, and are multiplied in float32.
    """
    model = load.__wrapped__(folder)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert model.lm_head in linears
    for linear in linears:  # a tied head gets a weight of its own, the embedding stays
        linear.weight = torch.nn.Parameter(_rounded(linear.weight.detach()), requires_grad=False)
        linear.register_forward_pre_hook(
            lambda module, inputs: (_rounded(inputs[0].unflatten(-1, (-1, 64))).flatten(-2),)
        )
    return model


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (rows / scale).round() * scale


@torch.inference_mode()
def logits(
    folder: Path, token_ids: Sequence[int], load_model: Callable[[Path], Any] = load
) -> torch.Tensor:
    """Logits after each token. Returns [num_tokens, vocab_size] float32."""
    model = load_model(folder)
    result: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0].float()
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
