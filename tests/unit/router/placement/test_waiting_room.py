"""Who waits for a placement, and in which order. Pure."""

from collections.abc import Callable, Iterable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diptych.errors import QueueFullError
from diptych.request_class import RequestClass
from router.placement.claim import Asked
from router.placement.departures import Departures
from router.placement.fair_queue import Turn
from router.placement.waiting_room import WaitingRoom
from tests.unit.router.placement.room_world import Waiter, World, returned


def test_first_come_first_served_and_bounded() -> None:
    world = World(max_waiting=2)
    waiters = [world.waiter() for _ in range(3)]
    world.run_scheduled()
    assert [waiter.refusal is None for waiter in waiters] == [True, True, False]
    assert isinstance(waiters[2].refusal, QueueFullError)
    assert waiters[2].refusal.retry_after_s is not None
    world.capacity = 1
    world.room.pump()
    assert world.order == waiters[:1]
    assert (world.room.num_waiting, world.room.num_placed) == (1, 1)


def test_nobody_is_called_but_by_a_pump_and_changes_join_into_one() -> None:
    world = World(capacity=2)
    first, second = world.waiter(), world.waiter()
    world.room.pump_soon()
    assert not first.told + second.told, "it was called while it entered"
    assert len(world.scheduled) == 1
    assert world.run_scheduled() == 1
    assert world.order == [first, second]
    assert not world.scheduled


def test_a_scheduled_pump_that_was_overtaken_does_nothing() -> None:
    world = World()
    waiter = world.waiter()
    world.room.pump()
    world.run_scheduled()
    assert len(waiter.told) == 1


def test_the_replaced_go_first() -> None:
    world = World(capacity=1)
    first, second = world.waiter(), world.waiter()
    world.run_scheduled()
    first.is_placed = False
    world.room.enter(first, front=True)
    world.capacity = 2
    late = world.waiter()
    world.run_scheduled()
    assert world.order == [first, first, second]
    assert not late.is_placed


def test_one_that_loses_its_placement_within_its_offer_waits_in_front() -> None:
    world = World(capacity=2)

    class Unlucky(Waiter):
        def offer(self, *, room_made: bool) -> None:
            super().offer(room_made=room_made)
            if len(self.told) == 1:  # the worker is gone
                self.is_placed = False
                self.room.enter(self, front=True)

    unlucky = Unlucky(world, world.room)
    world.room.enter(unlucky, front=False)
    other = world.waiter()
    world.run_scheduled()
    assert (world.room.num_waiting, world.room.num_placed) == (1, 2)
    world.capacity = 1
    assert world.run_scheduled() == 1, "its fall made a pump due"
    assert world.order == [unlucky, other, unlucky]
    assert world.room.num_waiting == 0


def test_one_that_leaves_makes_room_for_the_first_that_waits() -> None:
    world = World(capacity=1)
    placed, first, second = (world.waiter() for _ in range(3))
    world.run_scheduled()
    assert first.told == [False]
    world.room.leave(placed)
    assert world.run_scheduled() == 1
    world.room.pump()
    assert first.told[1:] == [True, False], "once"
    assert second.told[1:] == [False, False]


def test_no_more_placed_than_allowed() -> None:
    world = World(capacity=9, max_placed=1)
    first, second = world.waiter(), world.waiter()
    world.run_scheduled()
    assert world.order == [first]
    world.room.leave(first)
    world.run_scheduled()
    assert world.order == [first, second]


def test_queue_of_zero_still_places_at_once() -> None:
    world = World(capacity=1, max_waiting=0)
    placed, refused = world.waiter(), world.waiter()
    world.run_scheduled()
    assert placed.is_placed
    assert isinstance(refused.refusal, QueueFullError)
    assert world.room.num_waiting == 0


def test_one_that_was_placed_before_is_never_turned_away() -> None:
    world = World(capacity=1, max_waiting=0)
    waiter = world.waiter()
    world.run_scheduled()
    waiter.is_placed = False
    world.room.enter(waiter, front=True)
    world.run_scheduled()
    assert waiter.refusal is None
    assert world.room.num_waiting == 1


def test_those_who_wait_again_keep_the_order_in_which_they_came() -> None:
    world = World(capacity=3)
    waiters = [world.waiter() for _ in range(3)]
    world.run_scheduled()
    for waiter in (waiters[2], waiters[0], waiters[1]):
        returned(world, waiter)
    world.capacity = 3
    world.run_scheduled()
    assert world.order[3:] == waiters


@pytest.mark.parametrize("has_room", [True, False])
def test_a_pump_under_saturation_asks_few_or_nobody(has_room: bool) -> None:
    """256 that wait cost no more than a few offers for each pump, in turn; without room, none."""
    later: list[Callable[[], None]] = []
    room_asked = 0

    def answer(those: Iterable[Asked]) -> bool:
        nonlocal room_asked
        room_asked += 1
        return has_room

    room = WaitingRoom(
        max_waiting=256,
        max_placed=256,
        schedule=lambda pump: None,
        schedule_rest=lambda after_s, pump: later.append(pump),
        has_room=answer,
    )
    world = World()
    waiters = [Waiter(world, room) for _ in range(256)]
    for waiter in waiters:
        room.enter(waiter, front=False)
    room.pump()
    before = sum(len(waiter.told) for waiter in waiters)
    room_asked = 0
    room.pump()
    offers = sum(len(waiter.told) for waiter in waiters) - before
    assert offers == (16 if has_room else 0)
    assert room_asked <= offers + 4
    assert bool(later) is has_room, "the rest is asked after a pause"
    for _ in range(256 // 8):
        room.pump()
    assert all(waiter.told for waiter in waiters) is has_room, "each had its turn"


def test_of_those_behind_one_is_placed_with_each_pump() -> None:
    """However many the first in line bars: what is fair is not undone by who came first."""
    world = World(max_waiting=99, max_placed=99)

    class Stuck(Waiter):
        def offer(self, *, room_made: bool) -> None:
            self.told.append(room_made)

    for _ in range(8):
        world.room.enter(Stuck(world, world.room), front=False)
    world.run_scheduled()
    behind = [world.waiter() for _ in range(20)]
    world.run_scheduled()
    world.capacity = 20
    world.room.pump()
    assert sum(waiter.is_placed for waiter in behind) == 1
    for _ in range(20):
        world.room.pump()
    assert all(waiter.is_placed for waiter in behind)


def test_a_light_tenant_beside_a_flooder_goes_soon_and_is_not_turned_away() -> None:
    world = World(max_waiting=20, max_placed=99)
    flood = [world.waiter(turn=Turn(tenant="flooder")) for _ in range(20)]
    world.run_scheduled()
    light = world.waiter(turn=Turn(tenant="light"))
    flood.append(world.waiter(turn=Turn(tenant="flooder")))
    world.run_scheduled()
    assert light.refusal is None
    assert [waiter for waiter in flood if waiter.refusal is not None] == flood[-2:]
    assert world.room.num_waiting == 20
    world.capacity = 2
    world.room.pump()
    assert world.order == [flood[0], light]


def test_who_was_charged_more_than_he_used_gets_it_back() -> None:
    world = World(capacity=2, max_waiting=99, max_placed=99)
    turns = [Turn(RequestClass.BATCH, tenant, 10.0) for tenant in ("a", "b")]
    first = [world.waiter(turn=turn) for turn in turns]
    world.run_scheduled()
    second = [world.waiter(turn=turn) for turn in turns]
    world.room.leave(first[0])
    world.room.leave(first[1], 2.0)
    world.room.leave(first[1], 5.0)
    assert world.used == [(RequestClass.BATCH, 10.0), (RequestClass.BATCH, 2.0)]
    world.capacity = 1
    world.room.pump()
    assert world.order[2:] == [second[1]]


def test_another_choice_is_charged_and_one_that_is_placed_again_is_not() -> None:
    world = World(capacity=2, max_waiting=99, max_placed=99)
    twice = [world.waiter(turn=Turn(tenant="a", cost_s=3.0), front=f) for f in (False, True)]
    world.run_scheduled()
    returned(world, twice[0])
    world.capacity = 1
    world.run_scheduled()
    for waiter in twice:
        world.room.leave(waiter)
    assert [used_s for _, used_s in world.used] == [3.0, 3.0]


def test_those_that_wait_are_counted_by_class() -> None:
    world = World(capacity=1, max_waiting=99)
    batch = world.waiter(turn=Turn(RequestClass.BATCH))
    world.run_scheduled()
    world.waiter(turn=Turn(RequestClass.REALTIME))
    world.waiter(turn=Turn(RequestClass.BATCH))
    assert [world.room.num_waiting_of(each) for each in RequestClass] == [1, 0, 1]
    world.room.enter(batch, front=True, turn=Turn(RequestClass.BATCH))
    assert [world.room.num_waiting_of(each) for each in RequestClass] == [1, 0, 2]


def test_others_than_a_class_are_known_to_wait() -> None:
    world = World(capacity=1, max_waiting=99)
    world.waiter(turn=Turn(RequestClass.BATCH))
    assert not world.room.has_others_than(RequestClass.BATCH)
    world.waiter(turn=Turn(RequestClass.STANDARD))
    assert all(world.room.has_others_than(each) for each in RequestClass)


def test_who_is_turned_away_is_told_when_to_come_back() -> None:
    now, chance = 0.0, 0.5
    departures = Departures(lambda: now, lambda: chance)
    assert departures.retry_after_s(4) == 4.0, "nothing is known"
    for _ in range(100):
        now += 0.2
        departures.left(others_wait=True)
    assert departures.retry_after_s(10) == pytest.approx(2.0)
    chance = 0.0
    assert departures.retry_after_s(10) == pytest.approx(1.0), "jittered"
    chance = 0.999
    assert departures.retry_after_s(10) == pytest.approx(3.0, abs=0.01)
    chance = 0.5
    assert (departures.retry_after_s(0), departures.retry_after_s(10**6)) == (0.25, 30.0)


def test_time_in_which_nobody_waited_says_nothing_of_when_to_come_back() -> None:
    now = 0.0
    departures = Departures(lambda: now, lambda: 0.5)
    departures.left(others_wait=False)
    now = 3600.0
    for _ in range(3):
        departures.left(others_wait=True)
        now += 0.2
    assert departures.retry_after_s(10) == pytest.approx(2.0)


class RoomMachine(RuleBasedStateMachine):
    """Requests come, are placed, fall back, leave."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(capacity=2, max_waiting=3, max_placed=4)
        self.room = self.world.room
        self.inside: list[Waiter] = []

    @rule()
    def enter(self) -> None:
        self.inside.append(self.world.waiter())

    @rule()
    def scheduled_pumps_run(self) -> None:
        self.world.run_scheduled()
        turned_away = [waiter for waiter in self.inside if waiter.refusal is not None]
        assert not turned_away or self.room.num_waiting >= 3
        self.inside = [waiter for waiter in self.inside if waiter.refusal is None]

    @rule(data=st.data())
    def fall_back(self, data: st.DataObject) -> None:
        placed = [waiter for waiter in self.inside if waiter.is_placed]
        if placed:
            waiter = data.draw(st.sampled_from(placed))
            waiter.is_placed = False
            self.room.enter(waiter, front=True)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.inside:
            waiter = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
            if waiter.is_placed:
                self.world.capacity += 1
            self.room.leave(waiter)
            self.room.leave(waiter)

    @rule(more=st.integers(0, 2))
    def pump(self, more: int) -> None:
        self.world.capacity += more
        self.room.pump_soon()
        self.scheduled_pumps_run()

    @invariant()
    def everybody_is_somewhere(self) -> None:
        waiting = [waiter for waiter in self.inside if not waiter.is_placed]
        assert self.room.num_waiting == len(waiting)
        assert self.room.num_placed == sum(waiter.was_placed for waiter in self.inside)
        assert self.room.num_placed <= 4


TestRoom = RoomMachine.TestCase
