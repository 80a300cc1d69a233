"""Recognising Llama 3's rope scaling, which GGUF stores as a tensor of divisors.

A checkpoint names four numbers; llama.cpp stores what they come to for each
frequency. The numbers are recovered by trying those that Meta's models use.
"""

import math

import numpy as np
from numpy.typing import NDArray

from diptych.errors import ConfigurationError

DIVISORS_TENSOR = "rope_freqs.weight"

_LOW, _HIGH = 1.0, 4.0  # frequency factors of all Llama 3.x models
_ORIGINAL_CONTEXT = 8192
_TOLERANCE_RATIO = 1e-4


def llama3_scaling(divisors: NDArray[np.float32], theta: float) -> dict[str, float | int | str]:
    """The ``rope_scaling`` of config.json that gives ``divisors``, one per frequency.

    divisors: [head_dim / 2]. Raises ConfigurationError if there is none.
    """
    factor = float(divisors.max())
    exponents = np.arange(len(divisors)) / len(divisors)
    expected = llama3_divisors(theta**-exponents, factor)
    if not np.allclose(divisors, expected, rtol=_TOLERANCE_RATIO, atol=0):
        raise ConfigurationError(f"tensor {DIVISORS_TENSOR!r} is not Llama 3's rope scaling")
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL_CONTEXT,
    }


def llama3_divisors(frequencies: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """What each rotary frequency (radians per position) is divided by.

    High frequencies stay, low ones shrink by ``factor``, and those between are
    blended by how often they turn within the original context.
    """
    turns = _ORIGINAL_CONTEXT * frequencies / (2 * math.pi)
    share_kept = np.clip((turns - _LOW) / (_HIGH - _LOW), 0, 1)
    blended: NDArray[np.float64] = 1 / ((1 - share_kept) / factor + share_kept)
    return blended
