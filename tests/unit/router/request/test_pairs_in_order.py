"""Of a pair that is asked in order, placement counts on the half that is not asked for yet."""

from typing import Any

import pytest

from diptych.v1 import common_pb2, worker_pb2
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import Paired
from router.placement.query import Query
from router.placement.views import Snapshot
from router.request import actions
from router.request.dispatch import Dispatch
from tests.unit.router.request.dispatch_world import (
    DECODE,
    PREFILL,
    PROMPT,
    Deaf,
    World,
    opened,
)

LEASE, RESERVE = actions.OpenLease(PREFILL, 1, 0), actions.Reserve(DECODE, 2, 0, to_pull=True)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    def place(self: LeastLoaded, query: Query, snapshot: Snapshot) -> Paired:
        return Paired(PREFILL, DECODE, in_order=True)

    monkeypatch.setattr(LeastLoaded, "place", place)
    world = opened(monkeypatch)
    told = {"layout": common_pb2.KVLayout(block_size=16, model_digest="m"), "max_model_len": 99}
    world.says(PREFILL, worker_pb2.WORKER_ROLE_PREFILL, **told)
    world.says(DECODE, worker_pb2.WORKER_ROLE_DECODE, **told)
    world.welcomes(DECODE)
    return world


def ask(request: Dispatch, half: Any) -> None:
    if isinstance(half, actions.OpenLease):
        assert request.open_lease(half, (), Deaf())
    else:
        assert request.reserve(half, (), Deaf())


def seen(world: World) -> tuple[int, int]:
    """Tokens of prompts, and sequences, that placement sees."""
    snapshot = world.cluster.snapshot()
    (prefill,), (decode,) = snapshot.prefill, snapshot.decode
    return prefill.num_pending_tokens, decode.num_sequences


@pytest.mark.parametrize("halves", [(LEASE, RESERVE), (RESERVE, LEASE)], ids=["lease", "sequence"])
async def test_both_halves_count_from_when_the_first_is_asked(
    world: World, halves: tuple[Any, Any]
) -> None:
    request = world.request()
    assert seen(world) == (0, 0)
    for half in halves:
        ask(request, half)
        assert seen(world) == (len(PROMPT), 1)
    request.close_all()
    assert seen(world) == (0, 0)


@pytest.mark.parametrize("half", [LEASE, RESERVE], ids=["lease", "sequence"])
async def test_one_that_will_not_be_asked_for_does_not_count(world: World, half: Any) -> None:
    request = world.request()
    ask(request, half)
    request.close_all()
    assert seen(world) == (0, 0)
    request.place(Query(num_tokens=40, num_max_tokens=44))
    ask(request, half)
    request.place(Query(num_tokens=40, num_max_tokens=44, on_decode=DECODE))
    assert sum(count > 0 for count in seen(world)) == 1, "what was asked for is there still"


@pytest.mark.parametrize("num_asked", [1, 2])
@pytest.mark.parametrize("halves", [(LEASE, RESERVE), (RESERVE, LEASE)], ids=["lease", "sequence"])
async def test_of_a_pair_that_is_placed_before_another_is_freed_both_count(
    world: World, halves: tuple[Any, Any], num_asked: int
) -> None:
    """As when one starts over: what it still holds is freed once it is placed anew."""
    request = world.request()
    for half in halves[:num_asked]:
        ask(request, half)
    request.place(Query(num_tokens=40, num_max_tokens=44))
    request.close_all()
    assert seen(world) == (0, 0)
    for half in halves:
        ask(request, half._replace(sequence_id=half.sequence_id + 2))
        assert seen(world) == (len(PROMPT), 1)
