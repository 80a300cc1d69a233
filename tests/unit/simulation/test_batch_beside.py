"""What requests lose beside a batch, which leaves them room."""

import random
from collections.abc import Iterator
from statistics import fmean

import pytest

from diptych.engine.scheduling.beside_others import BesideOthers
from diptych.engine.scheduling.sequence import Sequence
from diptych.errors import DiptychError
from diptych.request_class import RequestClass
from diptych.simulation import journey
from diptych.simulation.attempt import Attempt
from diptych.simulation.cluster import Split, Workers
from diptych.simulation.router import Wires
from diptych.simulation.simulation import BatchLoad, Placing, Run, Setup, Simulation
from diptych.simulation.workload import Shape
from diptych.step_model import StepCost, StepModel
from router.placement.query import Query
from router.placement.spare import seen_by
from router.placement.views import Snapshot
from tests.unit.simulation.small import SMALL, setup

STEPS = StepModel(
    StepCost(0.03, 0.001, 0.0, 0.0, 0.0, 1.2, 100), StepCost(0.06, 0.001, 0.0, 1e-3, 0.0, 1.2, 100)
)
LONG_S = 50.0
SEEDS = (2, 3, 4)
MOST_RATIO = 1.1
LINES = BatchLoad(num_at_once=16, num_prompt_tokens=200, num_output_tokens=20)
NONE = BatchLoad()


def requests(rate: float, length_s: float, seed: int) -> Iterator[Shape]:
    rng, at_s = random.Random(seed), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < length_s:
        yield Shape(at_s, rng.randrange(200, 400), rng.randrange(10, 30), ())


def run_of(
    batch: BatchLoad,
    *,
    rate: float = 1.0,
    placement: str = "least-loaded",
    length_s: float = LONG_S,
    seed: int = 2,
    num_each: int = 4,  # prefill and decode workers
    steps: StepModel = STEPS,
) -> Run:
    limits = SMALL._replace(
        max_num_seqs=32, max_batched_tokens=512, max_model_len=1024, num_blocks=2048
    )
    setup = Setup(
        Split(num_each, num_each),
        Workers(limits, limits, steps),
        Wires(kv_bytes_per_token=100.0),
        placing=Placing(placement),
        seed=3,
        batch=batch,
    )
    return Simulation(setup, requests(rate, length_s, seed)).run(length_s, 20.0)


def p95_s(*runs: Run) -> float:
    outcomes = [each for run in runs for each in run.outcomes]
    ttft = sorted(each.ttft_s for each in outcomes if each.ttft_s is not None)
    assert len(ttft) == len(outcomes)
    return ttft[int(0.95 * len(ttft))]


@pytest.mark.parametrize("placement", ["least-loaded", "predicted"])
def test_first_tokens_come_as_soon_beside_a_batch(placement: str) -> None:
    alone = [run_of(NONE, placement=placement, seed=seed) for seed in SEEDS]
    beside = [run_of(LINES, placement=placement, seed=seed) for seed in SEEDS]
    assert sum(run.num_lines for run in alone) == 0
    assert sum(run.num_lines for run in beside) > 1050
    assert p95_s(*beside) <= MOST_RATIO * p95_s(*alone)


def test_beside_one_that_takes_what_there_is_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journey, "BATCH_SPARE_ONLY_S", 0.0)
    lines = LINES._replace(num_prompt_tokens=400)
    alone_s = p95_s(run_of(NONE, length_s=40.0))
    passed_s = p95_s(run_of(lines, length_s=40.0))
    monkeypatch.setattr(Sequence, "gives_way", False)
    together_s = p95_s(run_of(lines, length_s=40.0))
    assert together_s > 1.5 * alone_s
    assert passed_s < 0.9 * together_s, "workers let others pass"


def test_who_finds_the_blocks_of_a_batch_has_them_when_its_step_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a real worker, which then answers: it is not refused."""
    refused: list[DiptychError] = []
    monkeypatch.setattr(Attempt, "_refused", lambda self, worker, error: refused.append(error))
    shapes = [
        Shape(0.0, 150, 59, (), request_class=RequestClass.BATCH),
        Shape(1.0, 140, 5, ()),
    ]
    made = setup(Split(0, 1), limits=SMALL._replace(num_blocks=17))
    run = Simulation(made, iter(shapes)).run(20.0, 5.0)
    assert not refused
    assert run.pools["decode"].num_preemptions == 1
    assert all(each.ttft_s is not None for each in run.outcomes)


def pace_s(run: Run) -> float:
    return fmean(each.tpot_s for each in run.outcomes if each.tpot_s is not None)


def test_where_there_is_one_decode_worker_its_tokens_come_nearly_as_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costly = STEPS._replace(decode=STEPS.decode._replace(row_s=0.008))

    def run(batch: BatchLoad) -> Run:
        return run_of(batch, length_s=40.0, num_each=1, steps=costly)

    lines = LINES._replace(num_prompt_tokens=100, num_output_tokens=100)
    alone_s, beside = pace_s(run(NONE)), run(lines)
    assert pace_s(beside) <= 1.4 * alone_s
    monkeypatch.setattr(BesideOthers, "allowed", lambda *asked: None)
    unbound = run(lines)
    assert pace_s(unbound) > 3 * alone_s
    assert beside.num_lines > 0.6 * unbound.num_lines


def all_as_a_batch(query: Query, snapshot: Snapshot) -> Snapshot:
    return seen_by(query._replace(is_batch=True), snapshot)


def test_a_full_decode_worker_is_not_full_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch has waited for long and taken every place; its sequences leave theirs."""
    monkeypatch.setattr(journey, "BATCH_SPARE_ONLY_S", 0.0)
    lines = BatchLoad(num_at_once=48, num_prompt_tokens=60, num_output_tokens=120)
    alone_s = p95_s(run_of(NONE, length_s=40.0, num_each=1))
    beside_s = p95_s(run_of(lines, length_s=40.0, num_each=1))
    monkeypatch.setattr(journey, "seen_by", all_as_a_batch)
    waiting_s = p95_s(run_of(lines, length_s=40.0, num_each=1))
    assert beside_s <= MOST_RATIO * alone_s
    assert waiting_s > 3 * alone_s, "whoever keeps all places has others wait"


def test_a_batch_gets_on_where_others_leave_no_room() -> None:
    assert run_of(LINES, rate=14.0, length_s=25.0).num_lines > 0
