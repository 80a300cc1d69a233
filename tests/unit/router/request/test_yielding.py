"""For how long a request leaves to others the room that they may want: while it is new."""

from collections.abc import Sequence

import pytest

from router.placement.placement import Placement
from router.placement.query import Query
from router.request import events
from tests.unit.router.request.world import World

YIELDS_S = 10.0


class Asked:
    """Remembers what placement was asked, and has no room for whoever yields."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queries: list[Query] = []
        self._place = world.place
        self.has_spare = False
        monkeypatch.setattr(world, "place", self)

    def __call__(self, query: Query) -> Placement | None:
        self.queries.append(query)
        return None if query.takes_spare_only and not self.has_spare else self._place(query)


def begun(
    monkeypatch: pytest.MonkeyPatch,
    spare_only_s: float,
    resumed: Sequence[int] = (),
    **begin: bool,
) -> tuple[World, Asked]:
    world = World(spare_only_s=spare_only_s, resumed=resumed)
    asked = Asked(world, monkeypatch)
    world.on(events.Begin(**begin))
    return world, asked


def test_who_yields_waits_for_room_that_nobody_wants_and_then_takes_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, asked = begun(monkeypatch, YIELDS_S)
    assert world.queued
    assert asked.queries[-1].takes_spare_only
    assert world.machine.wake_at_s == world.now + YIELDS_S, "it asks again when it no longer does"
    world.now += YIELDS_S
    world.on(events.Tick())
    assert not asked.queries[-1].takes_spare_only
    assert world.leases


def test_it_yields_from_when_it_came_whenever_its_turn_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind others nobody asked it until then."""
    world = World(spare_only_s=YIELDS_S)
    asked = Asked(world, monkeypatch)
    world.machine.handle(events.Begin())
    assert not asked.queries
    world.queued = True
    world.now += YIELDS_S + 0.1
    world.on(events.Offered(room_made=True))
    assert [query.takes_spare_only for query in asked.queries] == [False]
    assert world.leases


def test_it_is_placed_at_once_where_there_is_such_room(monkeypatch: pytest.MonkeyPatch) -> None:
    world, asked = begun(monkeypatch, YIELDS_S)
    asked.has_spare = True
    world.on(events.Offered(room_made=True))
    assert world.leases


def test_so_does_one_that_goes_on_from_tokens_which_its_client_sent_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No worker had it here: a token that anybody can send is worth no place before others."""
    world, asked = begun(monkeypatch, YIELDS_S, resumed=(20,))
    assert [query.takes_spare_only for query in asked.queries] == [True]
    assert world.queued


def test_all_others_take_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    world, asked = begun(monkeypatch, 0.0)
    assert [query.takes_spare_only for query in asked.queries] == [False]
    assert world.leases


def test_nor_does_one_yield_of_which_another_choice_was_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, asked = begun(monkeypatch, YIELDS_S, front=True)
    assert [query.takes_spare_only for query in asked.queries] == [False]
    assert world.leases
