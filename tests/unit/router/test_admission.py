"""The waiting room and the answer's buffer."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diptych.errors import QueueFullError
from router.placement.queue import WaitingRoom


class Waiter:
    """Takes a placement when told that there is one."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.is_placed = False
        self.was_placed = False
        self.told: list[bool] = []  # room_made, each time

    def try_place(self, *, room_made: bool) -> bool:
        assert not self.is_placed
        self.told.append(room_made)
        if self.world.capacity <= 0:
            return False
        self.world.capacity -= 1
        self.is_placed = self.was_placed = True
        self.world.order.append(self)
        return True


class World:
    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.order: list[Waiter] = []


def test_first_come_first_served_and_bounded() -> None:
    world, room = World(), WaitingRoom(max_waiting=2, max_placed=10)
    waiters = [Waiter(world) for _ in range(3)]
    room.enter(waiters[0], front=False)
    room.enter(waiters[1], front=False)
    with pytest.raises(QueueFullError) as caught:
        room.enter(waiters[2], front=False)
    assert caught.value.retry_after_s is not None
    world.capacity = 1
    room.pump()
    assert world.order == waiters[:1]
    assert (room.num_waiting, room.num_placed) == (1, 1)


def test_nobody_overtakes_and_the_replaced_go_first() -> None:
    world, room = World(), WaitingRoom(max_waiting=9, max_placed=9)
    first, second = Waiter(world), Waiter(world)
    world.capacity = 1
    room.enter(first, front=False)
    room.enter(second, front=False)
    first.is_placed = False
    room.enter(first, front=True)
    world.capacity = 2
    late = Waiter(world)
    room.enter(late, front=False)
    assert world.order == [first], "somebody was before it"
    room.pump()
    assert world.order == [first, first, second]


def test_one_that_leaves_makes_room_for_the_first_that_waits() -> None:
    world, room = World(capacity=1), WaitingRoom(max_waiting=9, max_placed=9)
    placed, first, second = Waiter(world), Waiter(world), Waiter(world)
    for waiter in (placed, first, second):
        room.enter(waiter, front=False)
    room.pump()
    assert first.told == [False, False]
    room.leave(placed)
    room.pump()
    room.pump()
    assert first.told[2:] == [True, False], "once"
    assert second.told[1:] == [False, False]


def test_no_more_placed_than_allowed() -> None:
    world, room = World(capacity=9), WaitingRoom(max_waiting=9, max_placed=1)
    first, second = Waiter(world), Waiter(world)
    room.enter(first, front=False)
    room.enter(second, front=False)
    assert world.order == [first]
    room.leave(first)
    room.pump()
    assert world.order == [first, second]


def test_queue_of_zero_still_places_at_once() -> None:
    world, room = World(capacity=1), WaitingRoom(max_waiting=0, max_placed=9)
    room.enter(Waiter(world), front=False)
    with pytest.raises(QueueFullError):
        room.enter(Waiter(world), front=False)


class RoomMachine(RuleBasedStateMachine):
    """Requests come, are placed, fall back, leave."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(capacity=2)
        self.room = WaitingRoom(max_waiting=3, max_placed=4)
        self.inside: list[Waiter] = []

    @rule()
    def enter(self) -> None:
        waiter = Waiter(self.world)
        try:
            self.room.enter(waiter, front=False)
        except QueueFullError:
            assert self.room.num_waiting >= 3
        else:
            self.inside.append(waiter)

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
        self.room.pump()

    @invariant()
    def everybody_is_somewhere(self) -> None:
        waiting = [waiter for waiter in self.inside if not waiter.is_placed]
        assert self.room.num_waiting == len(waiting)
        assert self.room.num_placed == sum(waiter.was_placed for waiter in self.inside)
        assert self.room.num_placed <= 4


TestRoom = RoomMachine.TestCase
