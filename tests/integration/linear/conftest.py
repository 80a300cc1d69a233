"""What the tests of linear layers share."""

from collections.abc import Iterator

import pytest
import torch

from diptych.engine.backends.cpu import linear


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """What torch and our own kernels compute on."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def fresh_proofs() -> Iterator[None]:
    """Which kernels work is found out anew, and again afterwards."""
    proofs = (linear.thin_works, linear.split_works, linear.wide_works, linear.packing_works)
    for proof in proofs:
        proof.cache_clear()
    yield
    for proof in proofs:
        proof.cache_clear()
