"""Attention whose scores come no further from zero than a cap: torch's own kernel has none."""

import torch
from torch import Tensor


def cap_scores(scores: Tensor, cap: float) -> Tensor:
    """In place."""
    return scores.div_(cap).tanh_().mul_(cap)


def capped_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, cap: float
) -> Tensor:
    """As torch's kernel of scaled dot products, with scores in float32, and written to memory.

    q: [..., num_queries, head_dim]; keys, values: [..., num_keys, head_dim]; mask: [num_queries,
    num_keys], added to capped scores.
    """
    scores = torch.matmul(q.float(), keys.float().transpose(-1, -2)).mul_(scale)
    weights = torch.softmax(cap_scores(scores, cap).add_(mask), -1)
    return torch.matmul(weights.to(values.dtype), values)
