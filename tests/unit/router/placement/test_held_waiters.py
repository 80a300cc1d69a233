"""Who is held for better objectives: how often it is asked, and whom it holds back. Pure."""

import math
from collections import Counter
from collections.abc import Callable

import pytest

from diptych.request_class import RequestClass
from router.placement.fair_queue import Turn
from router.placement.waiting_room import WaitingRoom
from tests.unit.router.placement.room_world import Waiter, World


class Picky(Waiter):
    """There is room, but its objectives would be missed: it is held, or else refused."""

    is_refused = False

    def offer(self, *, room_made: bool) -> None:
        self.told.append(room_made)
        if self.is_refused:
            self.room.leave(self)
        else:
            self.room.hold(self)


class Refused(Picky):
    """As one whose objectives are lost."""

    is_refused = True


def test_who_is_held_for_objectives_is_not_asked_with_each_pump() -> None:
    """Two thousand pumps in two seconds ask forty that wait as often as ten pumps do."""
    now_s, world = 0.0, World()
    later: list[Callable[[], None]] = []
    room = WaitingRoom(
        max_waiting=99,
        max_placed=99,
        schedule=lambda pump: None,
        schedule_rest=lambda after_s, pump: later.append(pump),
        clock=lambda: now_s,
    )
    world.room = room
    waiters = [Picky(world, room) for _ in range(40)]
    for waiter in waiters:
        room.enter(waiter, front=False)
    offers = []
    for number in range(2000):
        now_s = number / 1000
        before = sum(len(waiter.told) for waiter in waiters)
        room.pump()
        offers.append(sum(len(waiter.told) for waiter in waiters) - before)
    assert max(offers) <= 24, "of one pump"
    assert sum(offers) - offers[0] <= 7 * 16, "and of both seconds"
    assert later, "they are asked again though nothing happens"
    assert all(len(waiter.told) > 1 for waiter in waiters), "each has its turn"
    num_told = len(waiters[0].told)
    room.take(other := Waiter(world, room))
    room.leave(other)
    room.pump()
    assert len(waiters[0].told) == num_told + 1, "at once where another one left"
    now_s = 3.0
    room.pump()
    num_told = len(waiters[0].told)
    for later_s, num_more in ((0.04, 0), (0.08, 1), (0.1, 1), (0.16, 2)):
        now_s = 3.0 + later_s
        room.reconsider()
        room.pump()
        assert len(waiters[0].told) == num_told + num_more, "soon where a prompt was computed"


def test_of_a_few_that_are_held_only_some_are_asked_at_a_time() -> None:
    """What bars one bars most of them; none waits for its turn for long."""
    now_s, world = 0.0, World()
    room = WaitingRoom(
        max_waiting=99, max_placed=99, schedule=lambda pump: None, clock=lambda: now_s
    )
    waiters = [Picky(world, room) for _ in range(8)]
    for waiter in waiters:
        room.enter(waiter, front=False)
    room.pump()
    assert [len(waiter.told) for waiter in waiters] == [1] * 8, "who came is asked"
    for number in range(1, 4):
        now_s = 0.31 * number
        room.pump()
        assert sum(len(waiter.told) for waiter in waiters) == 8 + 6 * number
    assert all(len(waiter.told) > 1 for waiter in waiters)


def test_while_all_are_held_no_pump_looks_at_anybody_before_they_are_asked_again() -> None:
    """Ten pumps in between cost nothing, and one timer is enough; a sooner one takes its place."""
    now_s, num_looks = 0.0, 0
    timers: list[tuple[float, Callable[[], None]]] = []

    def looks(payers: object) -> bool:
        nonlocal num_looks
        num_looks += 1
        return True

    room = WaitingRoom(
        max_waiting=99,
        max_placed=99,
        schedule=lambda pump: None,
        schedule_rest=lambda after_s, pump: timers.append((now_s + after_s, pump)),
        has_room=looks,
        clock=lambda: now_s,
    )
    waiters = [Picky(World(), room) for _ in range(3)]
    for waiter in waiters:
        waiter.room = room
        room.enter(waiter, front=False)
    room.pump()
    room.pump()
    num_looked = num_looks
    for number in range(10):
        now_s = number / 1000
        room.pump()
    assert num_looks == num_looked
    first, *others = timers
    assert not others
    assert 0.2 < first[0] < 0.4, "as long as they are held"
    room.reconsider()
    room.pump()
    sooner = timers[-1]
    assert sooner[0] < 0.1, "a prompt was computed"
    assert [len(waiter.told) for waiter in waiters] == [1, 1, 1]
    now_s, pump = sooner
    pump()
    assert [len(waiter.told) for waiter in waiters] == [2, 2, 2]
    num_looked, num_timers = num_looks, len(timers)
    now_s, pump = first
    pump()
    assert (num_looks, len(timers)) == (num_looked, num_timers), "its place was taken"
    room.pump()
    now_s, pump = timers[-1]
    pump()
    assert [len(waiter.told) for waiter in waiters] == [3, 3, 3]


def test_who_is_held_does_not_keep_others_from_their_turn() -> None:
    world = World(max_waiting=99, max_placed=99)
    for _ in range(20):
        picky = Picky(world, world.room)
        world.room.enter(picky, front=False)
    world.run_scheduled()
    world.room.pump()
    other = world.waiter()
    world.capacity = 1
    world.room.pump()
    assert other.is_placed


def test_a_pump_refuses_a_bounded_number() -> None:
    """Two hundred whose objectives were lost meanwhile."""
    world = World(max_waiting=300, max_placed=99)
    waiters = [Refused(world, world.room) for _ in range(200)]
    for waiter in waiters:
        world.room.enter(waiter, front=False)
    counts = []
    while world.room.num_waiting:
        before = world.room.num_waiting
        world.run_scheduled()
        counts.append(before - world.room.num_waiting)
    assert 0 < min(counts) <= max(counts) <= 24
    assert sum(counts) == 200


def test_those_that_workers_refused_do_not_undo_fair_turns() -> None:
    """Eight sit out their pause; among the others it is the light tenant's turn."""
    world = World(max_waiting=99, max_placed=99)
    for _ in range(8):
        world.room.enter(Picky(world, world.room), front=True)
    flood = [world.waiter(turn=Turn(RequestClass.BATCH, "flooder")) for _ in range(30)]
    world.run_scheduled()
    light = [world.waiter(turn=Turn(RequestClass.REALTIME, "light")) for _ in range(3)]
    for _ in range(5):
        world.capacity = 1
        world.room.pump()
    assert [one in light for one in world.order].count(True) == 3
    assert world.order.count(flood[0]) == 1


def test_batches_that_wait_for_spare_room_do_not_undo_fair_turns() -> None:
    """Of so many tenants that it is always the turn of some of theirs."""
    world = World(max_waiting=999, max_placed=999)

    class Sparing(Waiter):
        def offer(self, *, room_made: bool) -> None:
            self.told.append(room_made)

    for number in range(40):
        batch = Turn(RequestClass.BATCH, f"batch {number % 10}")
        world.room.enter(Sparing(world, world.room), front=False, turn=batch)
    flood = [world.waiter(turn=Turn(tenant="flood")) for _ in range(40)]
    world.run_scheduled()
    light = [world.waiter(turn=Turn(tenant="light")) for _ in range(8)]
    world.run_scheduled()
    for _ in range(16):
        world.capacity = 1
        world.room.pump()
    assert sum(one in light for one in world.order) >= 7, "every other one is its turn"
    assert sum(one in flood for one in world.order) >= 7


class Machine:
    """A worker whose tokens come as slowly as it has sequences; one ends with each turn."""

    def __init__(self) -> None:
        self.world = World(max_waiting=999, max_placed=999)
        self.running: list[Paced] = []
        self.num_placed: Counter[float] = Counter()

    def ask(self, tpot_s: float, request_class: RequestClass = RequestClass.STANDARD) -> None:
        turn = Turn(request_class, tpot_s=tpot_s)
        self.world.room.enter(Paced(self, tpot_s), front=False, turn=turn)

    def turn(self) -> None:
        """Half a second."""
        self.world.now_s += 0.5
        if self.running:
            self.world.room.leave(self.running.pop(0))
        self.world.room.pump_soon()
        self.world.run_scheduled()


class Paced(Waiter):
    """Wants to be one of so few sequences, and is held while there are more."""

    def __init__(self, machine: Machine, tpot_s: float) -> None:
        super().__init__(machine.world, machine.world.room)
        self.machine, self.tpot_s = machine, tpot_s

    def offer(self, *, room_made: bool) -> None:
        running = self.machine.running
        if len(running) < min(8.0, self.tpot_s):
            running.append(self)
            self.machine.num_placed[self.tpot_s] += 1
            self.room.take(self)
        elif len(running) < 8:
            self.room.hold(self)


def test_who_wants_no_pace_does_not_keep_it_from_who_does() -> None:
    """Else each that wants none takes the place of one that ended, for ever."""
    machine = Machine()
    for number in range(100):
        for _ in range(3):
            machine.ask(math.inf)
        if number >= 10 and number % 2:
            machine.ask(4.0, RequestClass.REALTIME)
        machine.turn()
    assert machine.num_placed[4.0] > 20
    assert machine.num_placed[math.inf] > 20, "nor the other way round"


def test_who_cannot_have_its_pace_holds_nobody_for_ever() -> None:
    machine = Machine()
    machine.ask(0.0)
    for _ in range(60):
        machine.ask(math.inf)
        machine.turn()
    assert machine.num_placed[math.inf] > 20


def test_nobody_waits_for_ever_for_a_stream_of_those_that_are_held() -> None:
    """Each is held for half a second, and then comes another: ten seconds in all, as of one."""
    machine = Machine()
    machine.ask(math.inf)
    waited_s = 0.0
    while not machine.num_placed[math.inf]:
        held = Paced(machine, 0.0)
        machine.world.room.enter(held, front=False, turn=Turn(RequestClass.REALTIME, tpot_s=0.0))
        machine.turn()
        machine.world.room.stop_waiting(held)
        waited_s += 0.5
        assert waited_s < 12.0
    assert waited_s > 9.0, "but it does wait for them"


@pytest.mark.parametrize(
    ("held", "behind", "num_placed"),
    [
        (RequestClass.BATCH, RequestClass.REALTIME, 8),
        (RequestClass.BATCH, RequestClass.STANDARD, 8),
        (RequestClass.BATCH, RequestClass.BATCH, 0),
        (RequestClass.STANDARD, RequestClass.REALTIME, 1),
        (RequestClass.REALTIME, RequestClass.STANDARD, 0),
        (RequestClass.STANDARD, RequestClass.BATCH, 0),
    ],
)
def test_a_batch_that_is_held_holds_back_batches_alone(
    held: RequestClass, behind: RequestClass, num_placed: int
) -> None:
    """There is room for those behind, of whom a realtime one has its turn before the others."""
    world = World(max_waiting=99, max_placed=99)
    for number in range(2):
        turn = Turn(held, f"held {number}", tpot_s=0.01)
        world.room.enter(Picky(world, world.room), front=False, turn=turn)
    world.run_scheduled()
    behind_them = [world.waiter(turn=Turn(behind, "light")) for _ in range(8)]
    for _ in range(16):
        world.now_s += 0.05
        world.capacity = 1
        world.room.pump()
    assert sum(one.is_placed for one in behind_them) == num_placed


def test_who_was_held_once_and_wants_but_room_now_holds_nobody_back() -> None:
    world = World(max_waiting=99, max_placed=99)

    class Once(Picky):
        def offer(self, *, room_made: bool) -> None:
            if self.told:
                self.told.append(room_made)
            else:
                super().offer(room_made=room_made)

    once = Once(world, world.room)
    world.room.enter(once, front=False, turn=Turn(tpot_s=0.01))
    world.run_scheduled()
    other = world.waiter(turn=Turn(tpot_s=math.inf))
    world.run_scheduled()
    assert not other.told, "one that is held is before it"
    world.now_s, world.capacity = 0.5, 1
    world.room.pump()
    world.room.pump()
    assert other.is_placed
    assert len(once.told) > 1


def test_who_stays_held_is_held_since_it_was_first() -> None:
    """Else it would hold others back for ten seconds with each time that it is asked."""
    machine = Machine()
    machine.ask(0.0)
    machine.turn()
    for _ in range(16):
        machine.turn()
    machine.ask(math.inf)
    for _ in range(5):
        machine.turn()
    assert machine.num_placed[math.inf] == 1


def test_many_batches_that_wait_for_spare_room_are_no_shadow_on_others() -> None:
    """Sixty tenants, of whom each has been served less than whoever is realtime."""
    world = World(max_waiting=999, max_placed=999)

    class Sparing(Waiter):
        def offer(self, *, room_made: bool) -> None:
            self.told.append(room_made)

    served = [world.waiter(turn=Turn(RequestClass.REALTIME, cost_s=1e6)) for _ in range(3)]
    world.capacity = 3
    world.run_scheduled()
    batches = []
    for number in range(180):
        batches.append(Sparing(world, world.room))
        turn = Turn(RequestClass.BATCH, f"batch {number % 60}")
        world.room.enter(batches[-1], front=False, turn=turn)
    world.run_scheduled()
    late = [world.waiter(turn=Turn(RequestClass.REALTIME)) for _ in range(40)]
    world.capacity = 40
    for _ in range(3):
        world.room.pump()
    assert all(one.is_placed for one in (*served, *late))
    assert sum(len(one.told) for one in batches) < 120, "and a pump asks few"
