"""Which requests come: as a trace's came, drawn, scaled."""

import random
from itertools import pairwise

import pytest

from diptych.simulation.workload import (
    Lengths,
    Shape,
    Swing,
    drawn,
    prompt_ids,
    replayed,
    scaled,
)


def test_equal_blocks_are_equal_tokens_and_nothing_else_is() -> None:
    one, other = Shape(0.0, 700, 5, (0, 1)), Shape(2.5, 600, 7, (0, 2))
    first, second = prompt_ids(one, 1, 1.0), prompt_ids(other, 2, 1.0)
    assert (len(first), len(second)) == (700, 600)
    assert first[:512] == second[:512]
    assert not set(first[512:]) & set(second[512:])
    assert len(set(prompt_ids(one._replace(num_prompt_tokens=150), 3, 4.0)[:128])) == 1
    assert prompt_ids(Shape(0.0, 3, 1), 9, 1.0) == [9, 9, 9]
    few = Shape(0.0, 5, 1, (3,) * 10**5)
    assert prompt_ids(few, 9, 1e-9) == prompt_ids(few, 9, 1.0), "without those that it has not"


@pytest.mark.parametrize("divide", [1.0, 4.0, 10.0, 64.0])
def test_of_small_blocks_no_more_is_shared_than_in_the_trace(divide: float) -> None:
    """Two prompts of 800 tokens, of which the first 208 are the same, whatever they become."""
    one = Shape(0.0, round(800 / divide), 5, tuple(range(50)), num_block_tokens=16)
    other = one._replace(prefix=(*range(13), *range(100, 137)))
    first, second = prompt_ids(one, 1, divide), prompt_ids(other, 2, divide)
    num_equal = sum(a == b for a, b in zip(first, second, strict=True))
    assert num_equal == int(208 / divide)
    assert first[:num_equal] == second[:num_equal]


def test_a_trace_is_replayed_faster_and_from_its_beginning() -> None:
    shapes = [Shape(0.0, 1, 2, (0,)), Shape(4.0, 1, 2, (5,))]
    again = list(replayed(shapes, speed=2.0, duration_s=5.0))
    assert [shape.at_s for shape in again] == [0.0, 2.0, 4.0]
    assert [shape.prefix for shape in again] == [(0,), (5,), (6,)], "nothing of the first round"


@pytest.mark.parametrize("num_requests", [2, 3, 60])
@pytest.mark.parametrize("first_s", [0.0, 5.0])
def test_a_trace_that_is_replayed_keeps_its_pace(num_requests: int, first_s: float) -> None:
    shapes = [Shape(first_s + 0.5 * index, 1, 2) for index in range(num_requests)]
    moments = [shape.at_s for shape in replayed(shapes, speed=1.0, duration_s=60.0)]
    assert moments == [first_s + 0.5 * index for index in range(round((60 - first_s) / 0.5))]


def test_what_comes_at_one_moment_comes_once() -> None:
    shapes = [Shape(0.0, 1, 2), Shape(0.0, 3, 4)]
    assert list(replayed(shapes, speed=1.0, duration_s=60.0)) == shapes


def test_arrivals_are_poisson_and_come_in_bursts() -> None:
    swing = Swing(period_s=20.0, burst_ratio=4.0)
    come = list(drawn([Shape(0.0, 10, 10)], 10.0, 2000.0, swing, random.Random(1)))
    first = sum(swing.is_first(shape.at_s) for shape in come)
    assert len(come) == pytest.approx(20_000, rel=0.03)
    assert first / (len(come) - first) == pytest.approx(4.0, rel=0.05)
    assert all(one.at_s <= other.at_s for one, other in pairwise(come))


def test_what_is_drawn_again_is_another_text() -> None:
    """Else prompts that no two requests of a trace have would be found in the prefix cache."""
    shapes = [Shape(0.0, 10, 10, (0, 1)), Shape(1.0, 10, 10, (0, 2)), Shape(2.0, 10, 10)]
    come = list(drawn(shapes, 10.0, 20.0, Swing(), random.Random(1)))
    prefixes = [shape.prefix for shape in come if shape.prefix]
    assert len(set(prefixes)) == len(prefixes) > 50
    assert {(0, 1), (0, 2)} < set(prefixes), "what two have in common they have, the first time"


def test_lengths_are_divided_clipped_and_drift() -> None:
    swing = Swing(period_s=10.0, drift_ratio=4.0)
    shapes = [Shape(1.0, 400, 100), Shape(6.0, 400, 100), Shape(6.0, 40_000, 0)]
    early, late, clipped = scaled(shapes, Lengths(2.0, 1000, 100), swing)
    ratios = [each.num_prompt_tokens / each.num_output_tokens for each in (early, late)]
    assert ratios == [4.0 * swing.drift_ratio, 4.0 / swing.drift_ratio], "of 4 in the trace"
    assert early[1:3] == (400, 25)
    assert late[1:3] == (100, 100)
    assert clipped[1:3] == (1000, 2)
