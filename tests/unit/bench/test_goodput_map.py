"""The map of measured goodput: pairs of the same requests, the better of the fixed regimes."""

from pathlib import Path
from typing import Any

import pytest

from diptych.simulation.outcome import Objective, Outcome
from tests.bench.goodput import Deployment
from tests.bench.goodput_map import account_table, accounts, draw, squares, table
from tests.bench.goodput_runs import APART, BOTH, STATIC, TOGETHER

UNIT = Objective(0.1, 0.01)
IN_TIME, LATE, NONE = Outcome(0.2, 0.01), Outcome(0.4, 0.01), Outcome(None, None)
NUM = 40


def row(
    kind: str, num_in_time: int, *, rate: float = 2.0, ttft: float = 3.0, seed: int = 11
) -> dict[str, Any]:
    late = [LATE] * (NUM // 2 - num_in_time // 2)
    outcomes = [IN_TIME] * num_in_time + late
    return {
        "deployment": Deployment(kind, 512).name,
        "rate": rate,
        "seed": seed,
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


def test_of_several_seeds_each_request_is_held_against_itself() -> None:
    """In whatever order they were run; static batches, of one seed only, do not count."""
    again = [row(kind, num, seed=12) for kind, num in ((BOTH, 10), (APART, 5), (TOGETHER, 40))]
    (found,) = squares([*again, *ROWS, row(STATIC, 40)], UNIT, duration_s=10.0)
    assert (found.num_offered, found.soft, found.fixed) == (2 * NUM, 2.0, 3.0)
    assert found.regime == "colocated"
    (swapped,) = squares([*ROWS, *again], UNIT, duration_s=10.0)
    assert swapped.ratio == found.ratio


def test_the_picture_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    draw(squares(ROWS, UNIT, duration_s=10.0), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def ended(deployment: dict[str, Any], p99_s: float, **ends: int) -> dict[str, Any]:
    """The same run, which tells how its requests ended."""
    return {
        **deployment,
        "placement": "predicted",
        "ended": ends,
        "itl_s": {"p50": 0.01, "p99": p99_s},
    }


def test_what_became_of_the_requests_of_a_deployment() -> None:
    in_all = row(BOTH, 20)
    in_all["outcomes"][:4] = [Outcome(0.1, 0.025, 6)] * 4  # too slow, and ended as if in time
    rows = [
        ended(in_all, 0.3, FINISHED=30, DEADLINE_UNREACHABLE=10),
        ended(row(BOTH, 20, ttft=5.0), 0.5, FINISHED=40),
        ended(row(BOTH, 20, ttft=10.0), 0.4, FINISHED=40),
        row(TOGETHER, 20),
    ]
    (found,) = accounts(rows, UNIT, duration_s=10.0)
    assert (found.deployment, found.rate, found.num_offered) == ("soft budget 512", 2.0, 3 * NUM)
    num_met = (20 - 4) + (20 + 10) + (20 + 10)  # 0.4 s is within 0.5 and 1 s
    assert found.met == num_met / 30.0
    assert found.in_time == (num_met + 4) / 30.0
    assert found.refused_ratio == 10 / (3 * NUM)
    assert found.kept_ratio == num_met / (3 * NUM - 10)
    assert found.p99_gap_s == 0.4
    assert "soft budget 512, predicted" in account_table([found])


def test_runs_that_said_nothing_are_held_against_all_objectives() -> None:
    plain = ended(row(TOGETHER, 20), 0.2, FINISHED=NUM)
    del plain["multiples"]
    (found,) = accounts([plain], UNIT, duration_s=10.0)
    assert found.num_offered == NUM
    assert found.met == (20 * 9 + 10 * 6) / 90.0


def test_static_batches_are_a_fixed_regime_too() -> None:
    static = {**row(STATIC, 24), "deployment": Deployment(STATIC, 8).name}
    (found,) = squares([*ROWS, static], UNIT, duration_s=10.0)
    assert (found.fixed, found.regime) == (2.4, "static")
