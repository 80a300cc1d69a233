"""How much may wait on a prefill worker, at every edge."""

import pytest

from router.placement.runway import Runway

RUNWAY = Runway(1000, 2.0)


@pytest.mark.parametrize(
    ("tokens_per_s", "most"),
    [
        (0.0, 999),  # tokens, while the rate is not known
        (100.0, 200),  # else seconds
        (20_000.0, 40_000),  # of a fast worker as well
    ],
)
def test_it_is_a_time_once_the_rate_is_known(tokens_per_s: float, most: int) -> None:
    assert RUNWAY.is_open(0, tokens_per_s)
    assert RUNWAY.is_open(most, tokens_per_s)
    assert not RUNWAY.is_open(most + 1, tokens_per_s)


@pytest.mark.parametrize(("tokens_per_s", "most"), [(0.0, 1999), (100.0, 400), (20_000.0, 80_000)])
def test_as_much_again_is_open_to_others(tokens_per_s: float, most: int) -> None:
    assert RUNWAY.is_open_beyond(most, tokens_per_s)
    assert not RUNWAY.is_open_beyond(most + 1, tokens_per_s)
