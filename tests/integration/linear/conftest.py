"""What the tests of linear layers share."""

from collections.abc import Iterator

import pytest

from diptych.engine.backends.cpu import linear
from tests.torch_threads import torch_threads


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """What torch and our own kernels compute on."""
    with torch_threads(request.param):
        yield request.param


@pytest.fixture
def fresh_proofs() -> Iterator[None]:
    """Which kernels work is found out anew, and again afterwards."""
    proofs = (
        linear.thin_works,
        linear.split_works,
        linear.wide_works,
        linear.compact_works,
        linear.packing_works,
    )
    for proof in proofs:
        proof.cache_clear()
    yield
    for proof in proofs:
        proof.cache_clear()
