"""The map of measured goodput: pairs of the same requests, the better of the fixed regimes."""

from pathlib import Path
from typing import Any

import pytest

from diptych.simulation.outcome import Objective, Outcome
from tests.bench.goodput import APART, BOTH, TOGETHER, Deployment
from tests.bench.goodput_map import draw, squares, table

UNIT = Objective(0.1, 0.01)
IN_TIME, LATE, NONE = Outcome(0.2, 0.01), Outcome(0.4, 0.01), Outcome(None, None)
NUM = 40


def row(kind: str, num_in_time: int, *, rate: float = 2.0, ttft: float = 3.0) -> dict[str, Any]:
    late = [LATE] * (NUM // 2 - num_in_time // 2)
    outcomes = [IN_TIME] * num_in_time + late
    return {
        "deployment": Deployment(kind, 512).name,
        "rate": rate,
        "multiples": (ttft, 2.0),
        "outcomes": outcomes + [NONE] * (NUM - len(outcomes)),
    }


ROWS = [row(TOGETHER, 20), row(APART, 10), row(BOTH, 30)]


def test_both_roles_stand_beside_the_better_fixed_regime() -> None:
    (found,) = squares(ROWS, UNIT, duration_s=10.0)
    assert (found.multiples, found.num_offered) == ((3.0, 2.0), NUM)
    assert (found.soft, found.fixed, found.regime) == (3.0, 2.0, "colocated")
    assert found.ratio.value == 1.5
    assert 1.0 < found.ratio.low < 1.5 < found.ratio.high
    assert "1.50" in table([found])


def test_several_runs_of_a_rate_are_one_longer_run() -> None:
    (found,) = squares([*ROWS, *ROWS], UNIT, duration_s=10.0)
    (once,) = squares(ROWS, UNIT, duration_s=10.0)
    assert (found.num_offered, found.soft, found.fixed) == (2 * NUM, 3.0, 2.0)
    assert found.ratio.high - found.ratio.low < once.ratio.high - once.ratio.low


@pytest.mark.parametrize("left_out", range(3))
def test_nothing_is_said_where_one_of_the_three_was_not_run(left_out: int) -> None:
    rows = ROWS[:left_out] + ROWS[left_out + 1 :]
    other = row((TOGETHER, APART, BOTH)[left_out], 5, ttft=5.0)
    assert squares([*rows, other], UNIT, duration_s=10.0) == []


def test_only_the_same_requests_are_compared() -> None:
    at_twice = row(TOGETHER, 40, rate=4.0)
    assert squares([*ROWS, at_twice], UNIT, duration_s=10.0) == []
    (found,) = squares([*ROWS, at_twice, row(BOTH, 38, rate=4.0)], UNIT, duration_s=10.0)
    assert (found.soft, found.fixed) == (3.8, 4.0)


def test_the_picture_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    draw(squares(ROWS, UNIT, duration_s=10.0), path)
    assert path.read_bytes().startswith(b"\x89PNG")
