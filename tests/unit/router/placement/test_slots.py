"""A choice of a request waits for a slot of the router, where all others have theirs. Pure."""

from tests.unit.router.placement.room_world import Waiter, World

NUM_SLOTS = 60


class Taking(Waiter):
    """Takes whatever it is offered, or nothing."""

    takes = True
    placed_s = 0.0

    def offer(self, *, room_made: bool) -> None:
        self.told.append(room_made)
        if self.takes:
            self.is_placed, self.placed_s = True, self.world.now_s
            self.room.take(self)


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
