"""Memory of a step's operations on the CPU, kept from one step to the next."""

import pytest
import torch

from diptych.engine.backends.cpu.workspace import StepMemory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_same_from_step_to_step(dtype: torch.dtype) -> None:
    memory = StepMemory(dtype)
    first = memory.take("q", 5, 64).fill_(3)
    assert (first.shape, first.dtype, first.is_contiguous()) == ((5, 64), dtype, True)
    other = memory.take("kv", 5, 64).fill_(4)
    assert (first == 3).all()
    assert (other == 4).all()
    fewer = memory.take("q", 2, 64)
    assert fewer.data_ptr() == first.data_ptr()
    assert (fewer == 3).all()


def test_grows_to_the_largest_step() -> None:
    memory = StepMemory(torch.float32)
    small, other = memory.take("q", 1, 16).fill_(1), memory.take("kv", 1, 16).fill_(2)
    large = memory.take("q", 1000, 16).fill_(3)
    assert large.shape == (1000, 16)
    assert (small == 1).all()
    assert (other == 2).all()
    assert memory.take("q", 1, 16).data_ptr() == large.data_ptr()
