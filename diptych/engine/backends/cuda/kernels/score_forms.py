"""Scores with the logarithm of e to base 2; and those that a cap holds, as Gemma 2 has them."""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit  # type: ignore[untyped-decorator]
def capped(scores: tl.tensor, cap: tl.constexpr) -> tl.tensor:
    """cap * tanh(scores / cap), of and in scores with the logarithm of e to base 2."""
    return (cap * LOG2_E) * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / cap)) + 1.0))
