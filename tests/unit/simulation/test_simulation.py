"""What holds for every run: nothing is lost or held for ever, and the same gives the same."""

import math
import tracemalloc
from collections.abc import Callable
from itertools import pairwise

import pytest

from diptych.engine.scheduling.block_pool import BlockPool
from diptych.request_class import RequestClass
from diptych.simulation.agenda import Agenda
from diptych.simulation.cluster import Split
from diptych.simulation.engine import EngineLimits, SimulatedEngine
from diptych.simulation.journey import Journey
from diptych.simulation.noise import Noise
from diptych.simulation.router import RouterLimits
from diptych.simulation.simulation import BatchLoad, Placing, Run, Simulation
from diptych.simulation.workload import Shape
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import Placement
from router.placement.predicted import Predicted
from router.placement.query import Objectives, Query
from router.placement.views import Snapshot
from router.request.request_state import RequestState
from tests.unit.simulation.small import ROUND, SMALL, VARIED, setup, some

SPLITS = (Split(1, 1), Split(0, 2), Split(2, 3))


def run(simulation: Simulation, duration_s: float = 30.0, drain_s: float = 600.0) -> Run:
    return simulation.run(duration_s, drain_s)


def test_a_request_waits_by_its_objectives_as_in_the_router() -> None:
    """A batch beside it has none, and is not placed before one that is held for its pace."""
    placing = Placing("predicted", Objectives(1.5, 0.08))
    simulation = Simulation(
        setup(Split(1, 1))._replace(placing=placing, batch=BatchLoad(1)), iter([Shape(0.5, 40, 8)])
    )
    simulation.agenda.run(0.5)
    (request,), (line, *_) = simulation.journeys, simulation._lines
    assert (request._turn().due_s, request._turn().tpot_s) == (2.0, 0.08)
    assert (line._turn().due_s, line._turn().tpot_s) == (None, math.inf)


@pytest.mark.parametrize("may_leap", [True, False])
def test_how_long_a_hand_off_took_is_told_of_each_that_was_foretold(
    monkeypatch: pytest.MonkeyPatch, may_leap: bool
) -> None:
    """Of one alone: 4 ms for 40 tokens, 4 to begin, prove and start, and a step. Of who has one
    token nothing moves.
    """
    told: list[float] = []
    monkeypatch.setattr(Predicted, "went_on", lambda self, forecast, gap_s: told.append(gap_s))
    shapes = iter([Shape(0.5, 40, 8), Shape(1.5, 40, 1), Shape(2.5, 40, 2)])
    limits = SMALL._replace(local_prefill=False)
    parted = setup(
        Split(1, 1), model=ROUND, limits=limits, placement="predicted", may_leap=may_leap
    )
    assert len(run(Simulation(parted, shapes)).outcomes) == 3
    assert told == [pytest.approx(0.018)] * 2


@pytest.mark.parametrize(
    ("split", "placement"),
    [
        (Split(1, 1), "least-loaded"),
        (Split(0, 2), "least-loaded"),
        (Split(2, 3), "predicted"),
        (Split(num_soft=2), "least-loaded"),
        (Split(1, num_soft=2), "predicted"),
    ],
)
@pytest.mark.parametrize("num_routers", [1, 3])
def test_every_request_ends_once_and_every_block_comes_back(
    split: Split, placement: str, num_routers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    end = Journey._end

    def counted(self: Journey, failure: str) -> None:
        ended.append(self.request.number)
        end(self, failure)

    monkeypatch.setattr(Journey, "_end", counted)
    tight = SMALL._replace(num_blocks=17, max_num_seqs=4)
    made = setup(split, limits=tight, placement=placement, router=RouterLimits(max_queue=20))
    simulation = Simulation(made._replace(num_routers=num_routers), some(100, seed=7))
    done = run(simulation)
    assert sorted(ended) == list(range(100)), "each ends once"
    assert all(journey.state is RequestState.DONE for journey in simulation.journeys)
    assert simulation.num_open == 0
    num_answered = sum(outcome.ttft_s is not None for outcome in done.outcomes)
    assert num_answered + sum(done.refusals.values()) == 100
    assert set(done.refusals) <= {"QUEUE_FULL", "QUEUE_TIMEOUT", "KV_BLOCKS_EXHAUSTED"}
    assert num_answered > 40
    assert_idle(simulation)


def assert_idle(simulation: Simulation) -> None:
    for host in simulation.cluster.hosts:
        counts = host.engine.pool.counts()
        assert counts.free + counts.cached == counts.total, host.worker
        assert host.engine.mismatch() is None
        assert not host.engine.num_listeners
        assert not host.engine.scheduler.has_work
    for router in simulation.cluster.routers:
        assert router.room.num_placed == router.room.num_waiting == 0
        assert all(not seat.seen.num_own_tokens for seat in router.prefill.values())
        assert all(not seat.seen.num_own_sequences for seat in router.decode.values())


def test_what_is_cut_off_holds_nothing() -> None:
    simulation = Simulation(setup(Split(1, 2)), some(60, seed=2, rate=20.0))
    done = simulation.run(duration_s=1.5, drain_s=0.5)
    assert done.refusals["UNFINISHED"] > 5
    simulation.agenda.run(60.0)  # those that came too late for the run are none of it
    for journey in simulation.journeys:
        journey.cut_off()
    simulation.agenda.run(61.0)
    assert_idle(simulation)


@pytest.mark.parametrize("placement", ["least-loaded", "predicted"])
def test_prompts_are_kept_no_longer_than_their_requests(placement: str) -> None:
    """A million of them would be all the memory there is."""
    shapes = list(some(60, seed=2, rate=20.0))
    simulation = Simulation(setup(Split(1, 2), placement=placement), iter(shapes))
    simulation.run(duration_s=4.0, drain_s=2.0)
    come = simulation.journeys
    assert {bool(journey.failure) for journey in come} == {True, False}
    assert not any(each.request.prompt_ids or each.request.block_keys for each in come)
    assert [each.num_prompt_tokens for each in come] == [
        shape.num_prompt_tokens for shape in shapes[: len(come)]
    ]


def test_time_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[float] = []
    at = Agenda.at

    def watched(self: Agenda, at_s: float, happening: Callable[[], None]) -> None:
        def then() -> None:
            moments.append(self.now_s)
            happening()

        at(self, at_s, then)

    monkeypatch.setattr(Agenda, "at", watched)
    run(Simulation(setup(Split(1, 2)), some(40, seed=5)))
    assert len(moments) > 500
    assert all(before_s <= after_s for before_s, after_s in pairwise(moments))


@pytest.mark.parametrize("placement", ["least-loaded", "predicted"])
def test_the_same_seed_gives_the_same(placement: str) -> None:
    def made() -> Run:
        return run(Simulation(setup(Split(2, 3), placement=placement), some(80, seed=11)))

    one, other = made(), made()
    assert one.outcomes == other.outcomes
    assert (one.pools, one.num_events, one.refusals) == (
        other.pools,
        other.num_events,
        other.refusals,
    )


@pytest.mark.parametrize("more_row_s", [(), (0.004, 0.001)])
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_steps_that_are_taken_together_are_as_single_ones(
    split: Split, more_row_s: tuple[float, ...]
) -> None:
    """Also where blocks run out, so that sequences are preempted."""
    tight = SMALL._replace(num_blocks=17, max_num_seqs=6)
    model = VARIED._replace(decode=VARIED.decode._replace(more_row_s=more_row_s))

    def made(*, may_leap: bool) -> Run:
        with_model = setup(split, model=model, limits=tight, may_leap=may_leap)
        return run(Simulation(with_model, some(70, 4, rate=3.0)))

    one, other = made(may_leap=True), made(may_leap=False)
    assert one.outcomes == other.outcomes
    assert one.refusals == other.refusals
    assert one.num_steps == other.num_steps
    assert one.gaps.quantile(0.9) == pytest.approx(other.gaps.quantile(0.9), rel=0.02)
    for role, use in one.pools.items():
        assert use.busy_ratio == pytest.approx(other.pools[role].busy_ratio)
        assert use.num_preemptions == other.pools[role].num_preemptions


@pytest.mark.parametrize("may_leap", [True, False])
@pytest.mark.parametrize(
    ("duration_s", "drain_s", "busy_s", "length_s"),
    [
        (0.05, 0.0, 0.05 - 0.003, 0.05),  # amid the prompt's step
        (0.1, 0.012, 0.112 - 0.003, 0.112),  # amid the third token's
        (0.1, 30.0, 0.174, 0.178),
        (10.0, 10.0, 0.174, 10.0),
    ],
)
def test_workers_are_busy_for_as_long_as_their_steps_take(
    may_leap: bool, duration_s: float, drain_s: float, busy_s: float, length_s: float
) -> None:
    """One request: three messages, a step of 84 ms, nine of 10 ms, and its end's message. It has
    five blocks from the first message until its last step.
    """
    alone = setup(Split(0, 1), model=ROUND, may_leap=may_leap)
    done = Simulation(alone, iter([Shape(0.0, 64, 10)])).run(duration_s, drain_s)
    use, held_s = done.pools["decode"], min(length_s, 0.177)
    assert use.busy_ratio == pytest.approx(busy_s / length_s)
    assert use.kv_ratio == pytest.approx(5 / SMALL.num_blocks * held_s / length_s)


def test_so_they_are_where_tenants_take_turns() -> None:
    """Tokens of an answer are none that a payer was given of prompts."""
    assert_as_single_ones(
        [shape._replace(tenant="ab"[at % 2]) for at, shape in enumerate(some(40, 2, rate=4.0))]
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_so_they_are_beside_a_batch(seed: int) -> None:
    """Steps without it pay for those with it."""
    classes = (RequestClass.STANDARD, RequestClass.BATCH)
    assert_as_single_ones(
        [
            shape._replace(request_class=classes[at % 2])
            for at, shape in enumerate(some(40, seed, rate=4.0))
        ]
    )


def assert_as_single_ones(shapes: list[Shape]) -> None:
    one, other = (
        run(Simulation(setup(Split(0, 1), may_leap=may_leap), iter(shapes)))
        for may_leap in (True, False)
    )
    assert one.outcomes == other.outcomes
    assert one.num_steps == other.num_steps


def test_steps_that_only_decode_are_few_events() -> None:
    def num_events(*, may_leap: bool) -> int:
        made = setup(Split(1, 1), may_leap=may_leap)
        return run(Simulation(made, iter([Shape(0.0, 20, 150)]))).num_events

    assert num_events(may_leap=False) - num_events(may_leap=True) > 50


def test_by_hand() -> None:
    """32 tokens of prompt, 3 of output; messages of 1 ms, 3.2 ms of transfer and 2 ms around it.

    1 ms to the prefill worker, 20 + 32 ms for the prompt, 1 ms for its token: 54 ms. The blocks
    are there and proven 5.2 ms after the step, told 1 ms later, and the sequence starts 1 ms
    after that: at 60.2 ms. Two steps more, and a message: 81.2 ms.
    """
    made = setup(Split(1, 1), model=ROUND)
    done = run(Simulation(made, iter([Shape(0.0, 32, 3)])))
    (outcome,) = done.outcomes
    assert outcome.ttft_s == pytest.approx(0.054)
    assert outcome.tpot_s == pytest.approx((0.0812 - 0.054) / 2)
    assert done.num_steps == 3


def test_by_hand_where_one_engine_does_both() -> None:
    """Asked, answered and told to start, in three messages; then the prompt, and its token."""
    done = run(Simulation(setup(Split(0, 1), model=ROUND), iter([Shape(0.0, 32, 3)])))
    (outcome,) = done.outcomes
    assert outcome.ttft_s == pytest.approx(0.003 + 0.052 + 0.001)
    assert outcome.tpot_s == pytest.approx(0.010)


@pytest.mark.parametrize("placement", ["least-loaded", "predicted"])
@pytest.mark.parametrize("local_prefill", [True, False])
def test_a_decode_worker_computes_prompts_where_it_may(placement: str, local_prefill: bool) -> None:
    limits = SMALL._replace(num_blocks=256, local_prefill=local_prefill)  # nobody is preempted
    made = setup(Split(1, 1), limits=limits, placement=placement)
    made = made._replace(
        placing=made.placing._replace(local_below_tokens=16),
    )
    simulation = Simulation(made, some(80, 7))
    assert run(simulation).refusals == {}
    (decode,) = simulation.cluster.decode
    assert (decode.engine.prefill_time_ratio > 0.0) is local_prefill


def test_shared_prefixes_are_found_again() -> None:
    """The real prefix cache: the second prompt lacks only what is its own."""
    shapes = [Shape(0.0, 100, 4, (1,)), Shape(5.0, 100, 4, (1,)), Shape(10.0, 100, 4, (2,))]
    done = run(Simulation(setup(Split(0, 1), model=ROUND), iter(shapes)))
    first, again, other = done.outcomes
    assert first.ttft_s is not None
    assert again.ttft_s is not None
    assert again.ttft_s < first.ttft_s / 2
    assert other.ttft_s == pytest.approx(first.ttft_s)
    assert done.pools["decode"].hit_ratio == pytest.approx(96 / 300)


PACED = EngineLimits(max_num_seqs=8, max_batched_tokens=256, max_model_len=1024, num_blocks=256)


def test_who_has_nothing_to_spare_yet_is_not_kept_waiting_for_long() -> None:
    """The real pacer: prompts that come at its beginning are computed in small parts."""

    def longest_gap(tpot_s: float | None) -> float:
        limits = PACED._replace(tpot_s=tpot_s)
        shapes = [Shape(0.0, 16, 60), *(Shape(0.05 + 0.3 * i, 512, 2) for i in range(3))]
        done = run(Simulation(setup(Split(0, 1), model=ROUND, limits=limits), iter(shapes)))
        gap = done.gaps.quantile(0.99)
        assert gap is not None
        return gap

    assert longest_gap(0.08) < longest_gap(None) / 1.5


@pytest.mark.parametrize("by", ["the worker", "the request"])
def test_an_engine_with_a_promise_paces_prompts(by: str) -> None:
    """The real pacer: who decodes gets tokens as often as promised while prompts are computed."""

    def tpot_s(promised_s: float | None) -> float:
        limits = PACED._replace(tpot_s=promised_s if by == "the worker" else None)
        shapes = [Shape(0.0, 16, 60), *(Shape(0.2 + 0.3 * i, 512, 2) for i in range(3))]
        placing = Placing()
        if by == "the request":
            placing = Placing(objectives=Objectives(60.0, promised_s))  # prompts can wait
        made = setup(Split(0, 1), model=ROUND, limits=limits)._replace(placing=placing)
        first_s = run(Simulation(made, iter(shapes))).outcomes[0].tpot_s
        assert first_s is not None
        return first_s

    unpaced_s = tpot_s(None)
    assert tpot_s(unpaced_s / 1.2) <= unpaced_s / 1.2


def test_answers_are_expected_to_be_as_long_as_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the real router expects them: what a request allows says no more than the most."""
    expected, place = [], LeastLoaded.place

    def noted(policy: LeastLoaded, query: Query, snapshot: Snapshot) -> Placement | None:
        expected.append(query.num_output_tokens)
        return place(policy, query, snapshot)

    monkeypatch.setattr(LeastLoaded, "place", noted)
    shapes = [Shape(5.0 * i, 20, 10) for i in range(8)] + [Shape(50.0, 20, 200), Shape(99.0, 20, 4)]
    run(Simulation(setup(Split(0, 1), model=ROUND), iter(shapes)))
    assert expected == [10] * 9 + [4]


def test_an_engine_with_nothing_to_do_books_nothing() -> None:
    agenda = Agenda()
    engine = SimulatedEngine(SMALL, ROUND, agenda, Noise(0, is_on=False))
    assert not agenda.run(10.0)
    assert engine.num_steps == 0
    assert isinstance(engine.pool, BlockPool)


def test_whoever_had_to_wait_again_says_when_workers_granted_it_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else others would be held back for it until it has ended."""
    favoured: list[bool] = []
    drew = Journey.drew_first

    def noted(self: Journey) -> None:
        favoured.append(self._router.room._favourite.one is self)
        drew(self)

    monkeypatch.setattr(Journey, "drew_first", noted)
    tight = setup(Split(1, 1), limits=SMALL._replace(num_blocks=17, max_num_seqs=4))
    simulation = Simulation(tight, some(60, seed=7))
    run(simulation)
    assert len(favoured) > 20
    assert not any(favoured)


def test_of_a_prompt_that_workers_do_not_take_no_more_is_kept_than_they_take() -> None:
    length = 10**7
    simulation = Simulation(setup(Split(0, 1)), iter([Shape(0.0, length, 2)]))
    tracemalloc.start()
    try:
        simulation.run(1.0, 0.0)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < length, "8 bytes each they would be"
