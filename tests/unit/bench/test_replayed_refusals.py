"""What refusing is worth, by what would have come of serving."""

import statistics
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from diptych.simulation.outcome import Objective
from diptych.simulation.settings import SimulationConfig
from diptych.simulation.workload import Shape
from tests.bench.replayed_refusals import Bench, Replayed, is_sure

CHAT, LONG, SHORT = Shape(0.0, 400, 60), Shape(0.0, 1000, 120), Shape(0.0, 600, 8)


SEEDS = 1, 2, 3, 4, 5  # together: of one no more than thirty are refused


def made(seed: int = 1) -> tuple[Bench, Objective]:
    config = SimulationConfig(
        trace=Path("drawn"), workers="soft=2", rate=[4.0], duration_s=8.0, seed=seed
    )
    bench = Bench(config, [CHAT, LONG, SHORT])
    ((*_, goal),) = [each for each in bench.goals() if each[:2] == (5.0, 1.5)]
    return bench, goal


@cache
def replayed(seed: int) -> Replayed:
    bench, goal = made(seed)
    return bench.replayed(goal)


def test_who_is_refused_would_have_cost_others_more() -> None:
    num_made_it = num_others_lost = 0
    for seed in SEEDS:
        found = replayed(seed)
        assert found.num_met + found.num_refused <= found.num_offered
        assert found.num_refused >= 5
        assert found.num_for_nothing <= found.num_made_it <= found.num_refused
        num_made_it += found.num_made_it
        num_others_lost += found.num_others_lost
    assert num_others_lost > num_made_it


@pytest.mark.timeout(600)  # more than a hundred simulations: on a slow machine they take minutes
def test_with_other_noise_refusing_was_right_as_well() -> None:
    bench, goal = made()
    found = list(bench.gains(goal, 1.0, 2))
    assert len(found) == replayed(SEEDS[0]).num_refused
    assert len({tuple(gains) for gains in found}) > 1
    assert any(len(set(gains)) > 1 for gains in found), "the noise is another one each time"
    others = (gains for bench, goal in map(made, SEEDS[1:]) for gains in bench.gains(goal, 1.0, 1))
    assert statistics.mean(map(statistics.mean, [*found, *others])) < 0.0
    assert found[:2] == list(islice(bench.gains(goal, 1.0, 2), 2)), "the same again"
    assert 0 < len(list(bench.gains(goal, 0.2, 1))) < len(found) / 2


def test_what_is_no_chance() -> None:
    assert is_sure([1, 1, 0, 2, 1, 1, 0, 2])
    assert not is_sure([1, -1, 0, 2, -1, 1, 0, 2])
    assert not is_sure([-1, -1, -2, -1])
    assert not is_sure([1]), "nobody knows"
