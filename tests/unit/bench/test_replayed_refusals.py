"""What refusing is worth, by what would have come of serving."""

from pathlib import Path

from diptych.simulation.settings import SimulationConfig
from diptych.simulation.workload import Shape
from tests.bench.replayed_refusals import Bench

CHAT, LONG, SHORT = Shape(0.0, 400, 60), Shape(0.0, 1000, 120), Shape(0.0, 600, 8)


def test_who_is_refused_would_have_cost_others_more() -> None:
    config = SimulationConfig(
        trace=Path("drawn"), workers="soft=2", rate=[4.0], duration_s=8.0, seed=2
    )
    bench = Bench(config, [CHAT, LONG, SHORT])
    ((*_, goal),) = [each for each in bench.goals() if each[:2] == (5.0, 1.5)]
    found = bench.replayed(goal)
    assert found.num_met + found.num_refused <= found.num_offered
    assert found.num_refused >= 5
    assert found.num_for_nothing <= found.num_made_it <= found.num_refused
    assert found.num_others_lost > found.num_made_it
