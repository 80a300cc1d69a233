"""Rotary frequencies: how fast each pair of dimensions turns, and how a context is stretched."""

import math

import torch
from torch import Tensor

from diptych.engine.model.layer_config import RopeConfig, RopeType


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / rope.theta**exponents
    if rope.rope_type is RopeType.DEFAULT:
        return frequencies
    stretched = frequencies / rope.factor
    if rope.rope_type is RopeType.LINEAR:
        return stretched
    if rope.rope_type is RopeType.LLAMA3:
        kept = _llama3_kept(rope, frequencies)
    else:
        kept = _yarn_kept(rope, head_dim)
    return frequencies * kept + stretched * (1 - kept)


def _llama3_kept(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Share of each frequency that is kept: [head_dim / 2], 0 to 1 (Llama 3.1's rule).

    Long waves are stretched by the factor, short ones kept, those between blended.
    """
    turns = rope.original_max_position * frequencies / (2 * torch.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    return ((turns - rope.low_freq_factor) / span).clamp(0, 1)


def _yarn_kept(rope: RopeConfig, head_dim: int) -> Tensor:
    """The same by YaRN (Peng et al., 2023): a ramp over dimensions, not over frequencies."""

    def dimension(num_turns: float) -> float:
        """Where a wave turns so often in the original context; not a whole number."""
        wave = rope.original_max_position / (num_turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step
    dimensions = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1 - ((dimensions - first) / (last - first)).clamp(0, 1)
