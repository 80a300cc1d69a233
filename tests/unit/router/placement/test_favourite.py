"""Who waits again, and for how long all others are barred for it. Pure."""

from tests.unit.router.placement.room_world import Waiter, World, pass_it, returned


def test_a_large_request_that_was_refused_is_not_passed_for_ever() -> None:
    world = World(capacity=1, max_waiting=99, max_placed=99)

    class Large(Waiter):
        """Takes what is there only where nobody else was placed since its last offer."""

        def offer(self, *, room_made: bool) -> None:
            self.told.append(room_made)
            if len(self.world.order) == self.num_seen:
                super().offer(room_made=room_made)
            self.num_seen = len(self.world.order)

        num_seen = 0

    large = Large(world, world.room)
    world.room.enter(large, front=False)
    world.run_scheduled()
    returned(world, large)
    for _ in range(40):
        world.capacity = 1
        small = world.waiter()
        world.run_scheduled()
        world.room.leave(small)
    assert world.order.count(large) == 2
    assert world.order[1:].index(large) <= 17, "as many may pass it"


class Never(Waiter):
    """No worker takes it any more."""

    def offer(self, *, room_made: bool) -> None:
        if not self.was_placed:
            super().offer(room_made=room_made)


def bars_in_vain(capacity: int) -> World:
    """A room with one that waits again for what never comes, and room for others."""
    world = World(capacity=1, max_waiting=99, max_placed=99)
    never = Never(world, world.room)
    world.room.enter(never, front=False)
    world.run_scheduled()
    returned(world, never)
    world.capacity = capacity
    return world


def test_one_that_can_never_be_placed_bars_the_others_for_a_while_only() -> None:
    world = bars_in_vain(40)
    others = [world.waiter() for _ in range(20)]
    world.run_scheduled()
    others += [world.waiter() for _ in range(20)]
    for _ in range(200):  # nothing else happens: what is still to be done was scheduled
        world.now_s += 0.05
        world.run_scheduled()
    assert all(other.is_placed for other in others)
    assert not world.scheduled


def test_one_that_can_never_be_placed_bars_the_others_less_and_less() -> None:
    """A hundred come in a second: those of thirty seconds would be barred in all but three."""
    world, num_barred = bars_in_vain(10_000), 0
    for _ in range(300):
        world.now_s += 0.1
        ten = [world.waiter() for _ in range(10)]
        world.run_scheduled()
        num_barred += not ten[0].is_placed
        for one in world.order[1:]:
            world.room.leave(one)
    assert 60 < num_barred < 160, "tenths of a second"


def test_one_that_nobody_who_is_there_could_take_bars_nobody() -> None:
    """As where the only worker that is long enough is away: it is waited for, by that one alone."""
    world = bars_in_vain(10_000)
    (never,) = world.order
    never.is_awaited = False
    for _ in range(100):
        world.now_s += 0.1
        ten = [world.waiter() for _ in range(10)]
        world.run_scheduled()
        assert all(one.is_placed for one in ten)
        for one in ten:
            world.room.leave(one)
    never.is_awaited = True
    late = world.waiter()
    world.run_scheduled()
    assert not late.is_placed, "it may come now, and enough have passed it"


def test_one_that_was_hopeless_for_a_while_bars_others_anew() -> None:
    world = bars_in_vain(10_000)
    (never,) = world.order
    pass_it(world)
    late = world.waiter()
    world.run_scheduled()
    assert not late.is_placed
    never.is_awaited = False
    world.room.pump()
    assert late.is_placed
    never.is_awaited = True
    world.now_s += 10.0
    later = world.waiter()
    world.run_scheduled()
    assert not later.is_placed, "its two seconds begin now"


def test_behind_one_that_bars_nobody_the_next_may() -> None:
    world = World(capacity=2, max_waiting=99, max_placed=99)
    hopeless = Never(world, world.room)
    world.room.enter(hopeless, front=False)
    large = world.waiter()
    world.run_scheduled()
    hopeless.is_awaited = False
    returned(world, hopeless)
    returned(world, large)
    pass_it(world)
    late = world.waiter()
    world.run_scheduled()
    assert large.told, "it is asked"
    assert not late.told, "it is barred"
    world.capacity = 2
    world.room.pump()
    assert large.is_placed
    world.room.settled(large)
    world.run_scheduled()
    assert late.is_placed


def passed() -> tuple[World, Waiter]:
    """A room with one that waits again, and that others have passed too often."""
    world = World(capacity=1, max_waiting=99, max_placed=99)
    large = world.waiter()
    world.run_scheduled()
    returned(world, large)
    pass_it(world)
    return world, large


def test_one_that_bars_others_and_gives_up_bars_nobody() -> None:
    world, large = passed()
    late = world.waiter()
    world.run_scheduled()
    assert not late.told, "it is barred"
    world.room.leave(large)
    world.capacity = 1
    world.run_scheduled()
    assert late.is_placed


def test_one_that_was_passed_bars_others_until_workers_granted_it_all() -> None:
    """Placed is not granted: who came meanwhile would have what it asks for."""
    world, large = passed()
    late = world.waiter()
    world.capacity = 3
    world.run_scheduled()
    assert large.is_placed
    world.run_scheduled()
    assert not late.is_placed, "the large one may be refused yet"
    returned(world, large)
    world.run_scheduled()
    assert large.is_placed
    assert not late.is_placed
    world.room.settled(large)
    world.run_scheduled()
    assert late.is_placed
