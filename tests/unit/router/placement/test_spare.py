"""Where a batch goes: nowhere that others would have to wait for it. Pure."""

import dataclasses

import pytest

from diptych.step_model import StepCost, StepModel, StepWork
from router.placement.cache_index import CacheIndex
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import DecodeOnly, Paired, Placement, Why
from router.placement.query import Query
from router.placement.spare import seen_by, will_yield
from router.placement.views import EngineView, Snapshot, WorkerId
from tests.unit.router.placement.test_least_loaded import D1, P1, view_d, view_p

QUERY = Query(num_tokens=130, num_max_tokens=200)
BATCH = QUERY._replace(is_batch=True, takes_spare_only=True)
NUM_NEEDED = 9  # blocks of 16 tokens for these and one more


def policy(local_below_tokens: int = 0) -> LeastLoaded:
    return LeastLoaded(
        CacheIndex(1000),
        local_below_tokens=local_below_tokens,
        allow_local=True,
        allow_recompute=True,
    )


def placed(snapshot: Snapshot, *, local_below_tokens: int = 0) -> Placement | None:
    return policy(local_below_tokens).place(BATCH, seen_by(BATCH, snapshot))


@pytest.mark.parametrize(
    ("num_pending", "tokens_per_s", "is_placed"),
    [(0, 0.0, True), (1, 0.0, False), (20, 1000.0, True), (21, 1000.0, False), (400, 2e4, True)],
)
def test_no_prompt_of_a_batch_goes_where_others_wait(
    num_pending: int, tokens_per_s: float, is_placed: bool
) -> None:
    busy = view_p(P1, num_pending, tokens_per_s=tokens_per_s)
    found = placed(Snapshot((busy,), (view_d(D1),)))
    assert found == (Paired(P1, D1) if is_placed else None)


@pytest.mark.parametrize(("num_busy", "is_placed"), [(0, True), (1, True), (2, False), (4, False)])
def test_half_of_the_idle_workers_are_left_to_others(num_busy: int, is_placed: bool) -> None:
    """Two that come together find one each."""
    names = [WorkerId(f"p{n}:1", f"p{n}") for n in range(4)]
    prefills = tuple(view_p(name, 100 * (n < num_busy)) for n, name in enumerate(names))
    decode = view_d(D1, proven=frozenset(name.incarnation for name in names))
    assert (placed(Snapshot(prefills, (decode,))) is not None) == is_placed
    decodes = tuple(
        view_d(name, num_pending_tokens=100 * (n < num_busy)) for n, name in enumerate(names)
    )
    alone = Snapshot((), decodes, has_prefill_pool=False)
    assert (placed(alone) is not None) == is_placed


@pytest.mark.parametrize(
    ("num_sequences", "most", "is_placed"),
    [(5, 8, True), (6, 8, False), (0, 1, True), (2, 3, True), (3, 4, False), (99, None, True)],
)
def test_a_quarter_of_the_places_to_decode_is_left_to_others(
    num_sequences: int, most: int | None, is_placed: bool
) -> None:
    decode = view_d(D1, num_sequences, max_num_seqs=most)
    assert (placed(Snapshot((view_p(P1),), (decode,))) is not None) == is_placed


@pytest.mark.parametrize("most", [8, None])
@pytest.mark.parametrize(("num_available", "is_placed"), [(NUM_NEEDED, False), (None, True)])
def test_a_quarter_of_the_blocks_too(
    most: int | None, num_available: int | None, is_placed: bool
) -> None:
    decode = view_d(D1, max_num_seqs=most, num_available_blocks=num_available, num_blocks=100)
    assert (placed(Snapshot((view_p(P1),), (decode,))) is not None) == is_placed
    enough = dataclasses.replace(decode, num_available_blocks=NUM_NEEDED + 25)
    assert placed(Snapshot((view_p(P1),), (enough,))) is not None


@pytest.mark.parametrize(
    ("is_batch", "takes_spare_only", "is_placed"),
    [(False, False, True), (True, False, False), (True, True, False)],
)
def test_sequences_of_a_batch_leave_for_those_of_no_batch(
    is_batch: bool, takes_spare_only: bool, is_placed: bool
) -> None:
    full = view_d(D1, 8, max_num_seqs=8, num_giving_way=3)
    query = QUERY._replace(is_batch=is_batch, takes_spare_only=takes_spare_only)
    snapshot = Snapshot((view_p(P1),), (full,))
    found = policy().place(query, seen_by(query, snapshot))
    assert found == (Paired(P1, D1) if is_placed else None)


@pytest.mark.parametrize(
    ("is_batch", "takes_spare_only", "others_wait", "leaves"),
    [
        (False, False, False, False),
        (True, True, True, True),  # it waits for room that nobody wants
        (True, False, False, True),
        (True, False, True, False),  # its share
    ],
)
def test_a_batch_keeps_what_it_takes_in_its_turn(
    is_batch: bool, takes_spare_only: bool, others_wait: bool, leaves: bool
) -> None:
    query = QUERY._replace(is_batch=is_batch, takes_spare_only=takes_spare_only)
    assert will_yield(query, others_wait=others_wait) == leaves


def test_blocks_of_who_gives_way_count_for_those_of_no_batch() -> None:
    other = WorkerId("d2:1", "d2")
    small = {"num_available_blocks": NUM_NEEDED - 1, "num_blocks": 100}
    leaving = view_d(D1, 2, num_giving_way=1, num_giving_way_blocks=1, **small)
    snapshot = Snapshot((view_p(P1),), (leaving, view_d(other, 0, **small)))
    assert policy().place(QUERY, seen_by(QUERY, snapshot)) == Paired(P1, D1)
    query = QUERY._replace(is_batch=True)
    assert policy().place(query, seen_by(query, snapshot)) == Paired(P1, other)


def engine(num_departed: int, prompt_token_s: float) -> EngineView:
    model = StepModel(prefill=StepCost(prefill_token_s=prompt_token_s))
    return EngineView(
        model=model, max_batched_tokens=512, work=StepWork(), num_departed_tokens=num_departed
    )


def since(num_departed: int, prompt_token_s: float) -> dict[str, object]:
    """So much was sent since it told, when nothing waited there."""
    view = engine(num_departed, prompt_token_s)
    return {"num_pending_tokens": num_departed, "engine": view}


@pytest.mark.parametrize(
    ("changes", "is_placed"),
    [
        ({}, True),
        ({"num_pending_tokens": 1}, False),
        (since(0, 0.0), True),
        (since(1, 0.0), False),  # nobody knows how fast it is
        (since(20, 0.001), True),
        (since(21, 0.001), False),
        (since(20, 0.001) | {"num_pending_tokens": 21}, False),
    ],
)
def test_nor_is_it_computed_where_others_wait_that_are_decoded_there(
    changes: dict[str, object], is_placed: bool
) -> None:
    decode = dataclasses.replace(view_d(D1), **changes)  # type: ignore[arg-type]
    found = placed(Snapshot((), (decode,), has_prefill_pool=False))
    assert found == (DecodeOnly(D1, Why.CHOICE) if is_placed else None)


@pytest.mark.parametrize(
    ("token_s", "is_placed"), [(None, True), (0.1 / QUERY.num_tokens, True), (0.001, False)]
)
def test_a_short_prompt_stays_with_a_decode_worker_where_others_have_prefill_workers(
    token_s: float | None, is_placed: bool
) -> None:
    """None of theirs waits there, and it would else go where they do."""
    view = None if token_s is None else engine(0, token_s)
    decode = view_d(D1, num_pending_tokens=100, engine=view)
    found = placed(Snapshot((view_p(P1, 5),), (decode,)), local_below_tokens=1000)
    assert found == (DecodeOnly(D1, Why.CHOICE) if is_placed else None)


def test_a_pool_that_is_busy_is_there_all_the_same() -> None:
    """Else a decode worker would compute what is too long for it, as if nobody else could."""
    assert placed(Snapshot((view_p(P1, 5),), (view_d(D1),))) is None


def test_no_batch_goes_beyond_a_runway_while_it_leaves_room() -> None:
    beyond = view_p(P1, 5, has_runway=False, is_open_beyond=True, num_own_tokens=5)
    snapshot = Snapshot((beyond,), (view_d(D1),))
    assert policy().place(QUERY, seen_by(QUERY, snapshot)) == Paired(P1, D1)
    assert placed(snapshot) is None
