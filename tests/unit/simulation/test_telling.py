"""Simulated workers tell how they are as often as real ones do."""

from itertools import pairwise

from diptych.simulation.cluster import Split
from diptych.simulation.seen import Told
from diptych.simulation.simulation import Simulation
from diptych.simulation.workload import Shape
from tests.unit.simulation.small import ROUND, setup


def test_a_worker_tells_again_while_it_computes_and_until_its_prompts_are_forgotten() -> None:
    """An answer of 100 tokens takes a second, in which nothing begins and nothing ends."""
    shapes = iter([Shape(0.5, 40, 100), Shape(200.0, 40, 2)])
    simulation = Simulation(setup(Split(num_soft=1), model=ROUND), shapes)
    (host,) = simulation.cluster.hosts
    told: list[Told] = []
    host.watch(told.append)
    simulation.run(100.0, 0.0)
    (request,) = simulation.journeys
    assert request.outcome.num_tokens == 100
    busy = [each for each in told if each.work.num_decode_rows]
    assert len(busy) >= 4
    assert max(its.at_s - one.at_s for one, its in pairwise(busy)) <= 0.251
    contexts = [each.work.num_context_tokens for each in busy]
    assert all(one < its for one, its in pairwise(contexts)), "how far its answer is"
    rest = told[told.index(busy[-1]) + 1 :]
    gaps_s = [its.at_s - one.at_s for one, its in pairwise(rest)]
    assert len(gaps_s) > 10
    assert max(gaps_s) <= 1.001
    ratios = [each.prefill_time_ratio for each in rest]
    assert all(one > its for one, its in pairwise(ratios)), "what prompts took of late fades"
    assert ratios[-1] < 0.001
    assert told[-1].at_s < 60.0, "who is at rest and has nothing to tell is silent"
