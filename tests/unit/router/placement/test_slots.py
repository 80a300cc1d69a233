"""A choice of a request waits for a slot of the router, where all others have theirs. Pure."""

import pytest

from tests.unit.router.placement.room_world import Waiter, World

NUM_SLOTS = 60


class Taking(Waiter):
    """Takes whatever it is offered, or nothing."""

    takes = True
    is_granted = False  # at once, all that it asks workers for
    placed_s = 0.0

    def offer(self, *, room_made: bool) -> None:
        self.told.append(room_made)
        if self.takes:
            self.is_placed, self.placed_s = True, self.world.now_s
            self.room.take(self)
            if self.is_granted:
                self.room.settled(self)


def all_placed(world: World, num: int) -> list[Taking]:
    """So many, who take all slots; and behind them another choice of one, which has none."""
    waiters = [Taking(world, world.room) for _ in range(num)]
    for waiter in waiters:
        world.room.enter(waiter, front=False)
    for _ in range(num):
        world.run_scheduled()
    assert world.room.num_placed == num
    world.room.enter(Taking(world, world.room), front=True)
    world.room.pump()
    return waiters


def test_it_bars_nobody_who_has_one() -> None:
    """Of those nobody takes what it waits for."""
    world = World(max_waiting=99, max_placed=NUM_SLOTS)
    waits_s = []
    for waiter in all_placed(world, NUM_SLOTS):  # each loses its worker, and takes another
        waiter.is_placed, returned_s = False, world.now_s
        world.room.enter(waiter, front=True)
        for _ in range(300):
            if not waiter.is_placed:
                world.now_s += 0.01
                world.room.pump()
                world.scheduled.clear()
        assert waiter.is_placed
        waits_s.append(waiter.placed_s - returned_s)
        world.room.settled(waiter)
    assert max(waits_s) < 0.1


def test_it_hides_nobody_behind_it() -> None:
    """Of those that lost their workers the first take nothing that is there now."""
    world = World(max_waiting=99, max_placed=10)
    waiters = all_placed(world, 10)
    for waiter in waiters:
        waiter.takes = waiter in waiters[8:]
        waiter.is_placed = False
        world.room.enter(waiter, front=True)
    for _ in range(100):
        world.now_s += 0.05
        world.room.pump()
        world.scheduled.clear()
    assert all(waiter.is_placed for waiter in waiters[8:])


def test_it_is_placed_once_there_is_one() -> None:
    world = World(max_waiting=99, max_placed=10)
    first, *_ = all_placed(world, 10)
    assert world.room.num_waiting == 1
    world.room.leave(first)
    world.run_scheduled()
    assert world.room.num_waiting == 0
    assert world.room.num_placed == 10


@pytest.mark.parametrize("may_come", [True, False])
def test_those_whom_no_worker_could_take_leave_their_slots_to_others(may_come: bool) -> None:
    """What they wait for may be away for long. Who was only refused keeps its own."""
    world = World(max_waiting=99, max_placed=10)
    waiters = all_placed(world, 10)
    for waiter in waiters:
        waiter.takes = waiter.is_placed = False
        waiter.is_awaited = may_come
        world.room.enter(waiter, front=True)
    others = [Taking(world, world.room) for _ in range(20)]
    for other in others:
        world.room.enter(other, front=False)
    for _ in range(100):
        world.now_s += 0.05
        world.room.pump()
    num_placed = sum(other.is_placed for other in others)
    assert num_placed == (0 if may_come else 9), "the choice that waited has one, too"
    assert world.room.num_placed == 10
    for waiter in waiters:
        waiter.takes = True
    world.room.pump()
    assert all(waiter.is_placed for waiter in waiters[:8]), "at once, whoever has their slots"


class Counted(Taking):
    """Knows how often anybody of its kind is looked for."""

    num_looks = 0

    def __hash__(self) -> int:
        Counted.num_looks += 1
        return id(self)


def test_thousands_of_them_cost_a_pump_no_more_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Taking, "is_granted", True)
    looks = []
    for num_choices in (200, 10_000):
        world = World(max_waiting=99, max_placed=NUM_SLOTS)
        waiters = all_placed(world, NUM_SLOTS)
        choices = [Counted(world, world.room) for _ in range(num_choices)]
        for choice in choices:
            world.room.enter(choice, front=True)
        Counted.num_looks = 0
        for _ in range(20):
            world.room.pump()  # nobody can be placed
        for gone in choices[50:70]:
            world.room.stop_waiting(gone)
        for waiter in waiters[:20]:
            world.room.leave(waiter)
            world.room.pump()
        looks.append(Counted.num_looks)
        assert [choice.is_placed for choice in choices[:20]] == [True] * 19 + [False]
        assert not any(choice.is_placed for choice in choices[20:])
    few, many = looks
    assert many < 1.1 * few
