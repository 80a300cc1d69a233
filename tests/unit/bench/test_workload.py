"""The offered load: by chance, or as a part of a trace came."""

import pytest

from diptych.errors import ConfigurationError
from tests.bench.slo import Lengths
from tests.bench.workload import Workload

LENGTHS = [Lengths(number, 2 * number) for number in range(1, 101)]
MOMENTS_S = [float(number * number) for number in range(100)]


def test_arrivals_by_chance_are_the_same_for_a_seed() -> None:
    work = Workload(LENGTHS, 1000)
    found = work.arrivals(2.0, 30.0, 5)
    assert found == work.arrivals(2.0, 30.0, 5) != work.arrivals(2.0, 30.0, 6)
    assert 30 < len(found) < 90
    assert all(0.0 < at_s < 30.0 for at_s, _ in found)


def test_a_part_of_a_trace_keeps_its_order_its_lengths_and_its_gaps() -> None:
    work = Workload(LENGTHS, 1000, MOMENTS_S)
    found = work.arrivals(2.0, 20.0, 5)
    assert found == work.arrivals(2.0, 20.0, 5) != work.arrivals(2.0, 20.0, 6)
    first = found[0][1].prompt - 1
    assert [lengths for _, lengths in found] == LENGTHS[first : first + 40]
    took_s = MOMENTS_S[first + 40] - MOMENTS_S[first]
    for index, (at_s, _) in enumerate(found):
        came_s = MOMENTS_S[first + index] - MOMENTS_S[first]
        assert at_s == pytest.approx(came_s / took_s * 20.0)


def test_lines_of_a_trace_may_be_in_any_order() -> None:
    mixed = sorted(range(100), key=lambda index: index * 37 % 100)
    lengths, moments_s = [LENGTHS[i] for i in mixed], [MOMENTS_S[i] for i in mixed]
    found = Workload(lengths, 1000, moments_s).arrivals(2.0, 20.0, 5)
    assert found == Workload(LENGTHS, 1000, MOMENTS_S).arrivals(2.0, 20.0, 5)


def test_a_trace_is_long_enough() -> None:
    with pytest.raises(ConfigurationError, match="--duration: the trace has 100 requests"):
        Workload(LENGTHS, 1000, MOMENTS_S).arrivals(2.0, 50.0, 5)
