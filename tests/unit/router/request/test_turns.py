"""What a request waits by: whether a decode worker may compute its prompt."""

from dataclasses import replace

import pytest

from diptych.block_hash import block_keys
from router.placement.claim import Claim
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import DecodeOnly
from router.placement.query import Query
from router.placement.views import Snapshot
from tests.unit.router.placement.predicted_world import view_d, view_p
from tests.unit.router.request.dispatch_world import (
    DECODE,
    PREFILL,
    PROMPT,
    World,
    opened,
    resolved,
)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return opened(monkeypatch)


async def test_the_turn_says_whether_a_decode_worker_may_compute_the_prompt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Query] = []

    def told(query: Query, snapshot: Snapshot) -> bool:
        asked.append(query)
        return len(asked) > 1

    monkeypatch.setattr(world.services.policy, "may_be_local", told)
    request = world.dispatch(resolved(claim=Claim(tpot_s=0.05), max_tokens=50))
    assert [request.turn().asked.may_be_local for _ in range(2)] == [False, True]
    monkeypatch.setattr(world.services.policy, "may_be_local", lambda query, snapshot: False)
    assert not request.turn().may_be_local
    monkeypatch.setattr(request, "_beside", DECODE)
    assert request.turn().may_be_local, "another choice has it there"
    assert asked[0].num_tokens == len(PROMPT)
    assert asked[0].block_keys
    assert asked[0].objectives.tpot_s == 0.05


@pytest.mark.parametrize("block_size", [8, 16, 64])
async def test_what_a_decode_worker_has_cached_it_may_compute_the_rest_of(
    world: World, monkeypatch: pytest.MonkeyPatch, block_size: int
) -> None:
    """Whatever the size of its blocks, and also where it is cached only later."""
    policy = LeastLoaded(world.cache, local_below_tokens=64, allow_local=True, allow_recompute=True)
    world.services = replace(world.services, policy=policy)
    monkeypatch.setattr(world.cluster, "_block_size", block_size)
    busy = replace(view_p(PREFILL), has_runway=False)
    there = Snapshot((busy,), (view_d(DECODE),))
    monkeypatch.setattr(world.cluster, "snapshot", lambda: there)
    prompt = tuple(range(1000, 1512))
    request = world.dispatch(resolved(prompt, max_tokens=4))
    turn = request.turn()
    assert not turn.may_be_local
    assert not there.has_room_for([turn.asked])
    world.tells(DECODE, list(block_keys(prompt, block_size, b"")))
    assert request.may_be_local()
    assert request.turn().may_be_local
    assert isinstance(request.place(Query(num_tokens=512, num_max_tokens=516)), DecodeOnly)


async def test_what_goes_on_from_many_tokens_is_no_short_prompt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While prefill workers take none it would be offered a place again and again, in vain."""
    policy = LeastLoaded(world.cache, local_below_tokens=64, allow_local=True, allow_recompute=True)
    world.services = replace(world.services, policy=policy)
    busy = replace(view_p(PREFILL), has_runway=False)
    there = Snapshot((busy,), (view_d(DECODE),))
    monkeypatch.setattr(world.cluster, "snapshot", lambda: there)
    assert world.dispatch(resolved(max_tokens=2000)).turn().may_be_local
    long = replace(resolved(max_tokens=2000), emitted_token_ids=(7,) * 1000)
    request = world.dispatch(long)
    num_tokens = len(PROMPT) + 1000
    assert request.place(Query(num_tokens=num_tokens, num_max_tokens=len(PROMPT) + 2000)) is None
    assert not there.has_room_for([request.turn().asked])
