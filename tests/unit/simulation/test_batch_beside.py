"""What requests lose beside a batch, which leaves them room."""

import random
from collections.abc import Iterator

import pytest

from diptych.simulation import journey
from diptych.simulation.cluster import Split, Workers
from diptych.simulation.router import Wires
from diptych.simulation.simulation import BatchLoad, Placing, Run, Setup, Simulation
from diptych.simulation.workload import Shape
from diptych.step_model import StepCost, StepModel
from tests.unit.simulation.small import SMALL

STEPS = StepModel(
    StepCost(0.03, 0.001, 0.0, 0.0, 0.0, 1.2, 100), StepCost(0.06, 0.001, 0.0, 1e-3, 0.0, 1.2, 100)
)
LONG_S = 100.0
MOST_RATIO = 1.1
LINES = BatchLoad(num_at_once=16, num_prompt_tokens=200, num_output_tokens=20)
NONE = BatchLoad()


def requests(rate: float, length_s: float) -> Iterator[Shape]:
    rng, at_s = random.Random(2), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < length_s:
        yield Shape(at_s, rng.randrange(200, 400), rng.randrange(10, 30), ())


def run_of(
    batch: BatchLoad,
    *,
    rate: float = 1.0,
    placement: str = "least-loaded",
    length_s: float = LONG_S,
) -> Run:
    limits = SMALL._replace(
        max_num_seqs=32, max_batched_tokens=512, max_model_len=1024, num_blocks=2048
    )
    setup = Setup(
        Split(4, 4),
        Workers(limits, limits, STEPS),
        Wires(kv_bytes_per_token=100.0),
        placing=Placing(placement),
        seed=3,
        batch=batch,
    )
    return Simulation(setup, requests(rate, length_s)).run(length_s, 20.0)


def p95_s(run: Run) -> float:
    ttft = sorted(each.ttft_s for each in run.outcomes if each.ttft_s is not None)
    assert len(ttft) == len(run.outcomes)
    return ttft[int(0.95 * len(ttft))]


@pytest.mark.parametrize("placement", ["least-loaded", "predicted"])
def test_first_tokens_come_as_soon_beside_a_batch(placement: str) -> None:
    alone = run_of(NONE, placement=placement)
    beside = run_of(LINES, placement=placement)
    assert alone.num_lines == 0
    assert beside.num_lines > 700
    assert p95_s(beside) <= MOST_RATIO * p95_s(alone)


def test_beside_one_that_takes_what_there_is_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journey, "BATCH_YIELDS_S", 0.0)
    assert p95_s(run_of(LINES, length_s=40.0)) > 1.5 * p95_s(run_of(NONE, length_s=40.0))


def test_a_batch_gets_on_where_others_leave_no_room() -> None:
    assert run_of(LINES, rate=14.0, length_s=25.0).num_lines > 0
