"""Sampling parameters as clients of other servers say them."""

import pytest

from diptych.errors import InvalidRequestError
from diptych.sampling_params import check_options
from router.frontend.http.sampling_fields import read_sampling


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (-1, None),  # as vLLM: any
        (0, 0),
        (2**64 - 1, 2**64 - 1),
        (-2, 2**64 - 2),
        (-(2**63), 2**63),
    ],
)
def test_a_seed_may_be_a_signed_number(said: int, expected: int | None) -> None:
    sampling = read_sampling({"seed": said})
    assert sampling.seed == expected
    check_options(sampling, "sampling")


@pytest.mark.parametrize("said", [-(2**63) - 1, 2**64])
def test_a_seed_of_more_bits_is_refused(said: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"^sampling\.seed"):
        check_options(read_sampling({"seed": said}), "sampling")
