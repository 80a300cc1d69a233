"""Who comes new is judged by those that wait before it. No sockets."""

from collections.abc import Iterable
from typing import Any

import pytest

from router.placement.claim import Asked, Claim
from router.placement.fair_queue import Turn
from router.placement.placement import Unreachable
from router.placement.query import Query
from router.placement.views import Snapshot
from router.request.terms import Terms
from tests.unit.router.placement.predicted_world import view_d, view_p
from tests.unit.router.request.dispatch_world import DECODE, PREFILL, PROMPT, World, opened
from tests.unit.router.request.test_dispatch import made

LOST = Unreachable("too late", 2.0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return opened(monkeypatch)


async def test_one_that_comes_is_judged_by_those_that_wait_before_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is room the pump does that, soon: others that came may be placed by then."""
    told: list[float] = []

    def foresee(query: Query, snapshot: Snapshot, wait_s: float) -> Unreachable | None:
        told.append(wait_s)
        return LOST

    monkeypatch.setattr(world.services.policy, "foresee", foresee)
    query = Query(num_tokens=len(PROMPT), num_max_tokens=len(PROMPT) + 50)
    request = made(world, Claim(tenant="alice", first_token_due_s=7.0))
    monkeypatch.setattr(Snapshot, "has_room_for", lambda self, those: True)
    assert request.foresee(query, True) is None, "nobody is before it: it is asked at once"
    assert told == []
    assert request.foresee(query, False) == LOST
    waiting: Any = object()
    turn = Turn(tenant="alice", cost_s=8.0, prompt_s=3.0)
    world.services.room.enter(waiting, front=False, turn=turn)
    assert request.foresee(query, True) is None, "and so are those that came with it"
    assert told == [0.0]
    monkeypatch.setattr(Snapshot, "has_room_for", lambda self, those: False)
    assert request.foresee(query, True) == LOST
    world.services.room.stop_waiting(waiting)
    assert request.foresee(query, True) == LOST
    assert told == [0.0, 3.0 / max(1, len(world.cluster.snapshot().prefill)), 0.0], "prompts only"


async def test_where_there_is_room_its_turn_is_worked_out_once_it_enters_the_queue(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = made(world, Claim(tenant="alice", first_token_due_s=7.0))
    query = Query(num_tokens=len(PROMPT), num_max_tokens=len(PROMPT) + 50)
    asked: list[Asked] = []
    turns: list[Turn] = []

    def has_room_for(snapshot: Snapshot, those: Iterable[Asked]) -> bool:
        asked.extend(those)
        return True

    def turn(terms: Terms, num_cached: int = 0) -> Turn:
        turns.append(Turn(tenant="alice"))
        return turns[-1]

    monkeypatch.setattr(Snapshot, "has_room_for", has_room_for)
    monkeypatch.setattr(Terms, "turn", turn)
    assert request.foresee(query, True) is None
    assert turns == []
    assert asked == [request.turn().asked], "that is what room is looked for by"


async def test_where_as_many_are_placed_as_may_be_one_is_judged_by_when_they_leave(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have room, but this router asks them for nobody else."""
    told: list[float] = []
    room = world.services.room
    monkeypatch.setattr(
        world.services.policy, "foresee", lambda query, snapshot, wait_s: told.append(wait_s)
    )
    monkeypatch.setattr(Snapshot, "has_room_for", lambda self, those: True)
    monkeypatch.setattr(room._departures, "_interval_s", 0.25)
    monkeypatch.setattr(room, "_max_placed", 0)
    request = made(world, Claim(tenant="alice", first_token_due_s=7.0))
    query = Query(num_tokens=len(PROMPT), num_max_tokens=len(PROMPT) + 50)
    request.foresee(query, True)
    assert told == [0.25], "one has to leave"
    for _ in range(3):
        waiting: Any = object()
        room.enter(waiting, front=False, turn=Turn(tenant="alice", cost_s=0.8, prompt_s=0.01))
    request.foresee(query, True)
    assert told[1:] == [1.0]
    monkeypatch.setattr(room, "_max_placed", 1)
    request.foresee(query, True)
    assert len(told) == 2


@pytest.mark.parametrize(("num_prefill", "num_decode", "engines"), [(3, 1, 3), (0, 2, 2)])
async def test_what_waits_before_one_is_shared_by_all_that_compute_prompts(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    num_prefill: int,
    num_decode: int,
    engines: int,
) -> None:
    told: list[float] = []
    policy = world.services.policy
    many = Snapshot((view_p(PREFILL),) * num_prefill, (view_d(DECODE),) * num_decode)
    monkeypatch.setattr(world.cluster, "snapshot", lambda: many)
    monkeypatch.setattr(Snapshot, "has_room_for", lambda self, those: False)
    monkeypatch.setattr(policy, "foresee", lambda query, snapshot, wait_s: told.append(wait_s))
    waiting: Any = object()
    turn = Turn(tenant="alice", cost_s=8.0, prompt_s=6.0)
    world.services.room.enter(waiting, front=False, turn=turn)
    query = Query(num_tokens=len(PROMPT), num_max_tokens=len(PROMPT) + 50)
    made(world, Claim(tenant="alice", first_token_due_s=7.0)).foresee(query, True)
    assert told == [6.0 / engines]
