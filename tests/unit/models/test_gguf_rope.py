"""The scaling of Llama 3 is known again by what llama.cpp writes of it, and nothing else is it."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from diptych.errors import ConfigurationError
from diptych.models.gguf_import.rope import llama3_scaling

THETA = 500_000.0


def written(factor: float, head_dim: int = 64, original: int = 8192) -> NDArray[np.float32]:
    """As its converter of checkpoints makes the tensor, one wave after the other."""
    divisors = []
    for index in range(0, head_dim, 2):
        wave = 2 * math.pi * THETA ** (index / head_dim)
        if wave < original / 4:
            divisors.append(1.0)
        elif wave > original:
            divisors.append(factor)
        else:
            smooth = (original / wave - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64), (2.5, 64)])
def test_what_llama_cpp_writes_is_the_scaling_of_the_checkpoint(
    factor: float, head_dim: int
) -> None:
    divisors = written(factor, head_dim)
    assert 1.0 in divisors
    assert any(1.0 < each < factor for each in divisors)
    assert llama3_scaling(divisors, THETA) == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_divisors_are_refused() -> None:
    """As those of a context of another length, of another theta, or of longrope."""
    damaged = written(32.0)
    damaged[-1] *= 1.001
    for divisors, theta in (
        (written(32.0, original=4096), THETA),
        (written(32.0), 10_000.0),
        (np.linspace(1.0, 32.0, 32, dtype=np.float32), THETA),
        (np.full(32, math.nan, np.float32), THETA),
        (damaged, THETA),
    ):
        with pytest.raises(ConfigurationError, match=r"rope_freqs\.weight"):
            llama3_scaling(divisors, theta)
