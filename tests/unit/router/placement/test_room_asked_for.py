"""For whom a waiting room asks for room, and how little it does while there is none. Pure."""

from collections.abc import Callable, Iterable

import pytest

from diptych.request_class import RequestClass
from router.placement.claim import Asked, payer_of
from router.placement.fair_queue import Turn
from router.placement.waiting_room import WaitingRoom
from tests.unit.router.placement.room_world import World
from tests.work_count import num_calls


@pytest.mark.parametrize("num_others", [31, 32, 90])
def test_of_many_payers_that_have_no_room_each_is_looked_at_in_time(num_others: int) -> None:
    world = World(max_waiting=999, max_placed=999)
    light = Asked(payer_of(RequestClass.STANDARD, "light"))
    world.room = WaitingRoom(
        max_waiting=999,
        max_placed=999,
        schedule=world.scheduled.append,
        has_room=lambda those: light in those,
    )
    for number in range(num_others):
        world.waiter(turn=Turn(tenant=f"flood{number}"))
    waiter = world.waiter(turn=Turn(tenant="light"))
    for _ in range(4):
        world.room.pump()
    assert waiter.told


def test_room_is_asked_for_those_that_wait() -> None:
    """By the names that workers know; who has to be placed again is among them."""
    asked: list[set[Asked]] = []

    def note(those: Iterable[Asked]) -> bool:
        asked.append(set(those))
        return False

    world = World()
    world.room = WaitingRoom(
        max_waiting=9, max_placed=9, schedule=world.scheduled.append, has_room=note
    )
    turn = Turn(RequestClass.STANDARD, "a", may_be_local=False)
    first = world.waiter(turn=turn)
    again = world.waiter(turn=turn)
    world.waiter(turn=Turn(RequestClass.BATCH, "b"))
    world.run_scheduled()
    a, b = payer_of(RequestClass.STANDARD, "a"), payer_of(RequestClass.BATCH, "b")
    assert asked[-1] == {Asked(a, False), Asked(b)}
    world.room.stop_waiting(first)
    world.room.pump()
    assert asked[-1] == {Asked(a, False), Asked(b)}, "another one of that kind waits"
    world.room.stop_waiting(again)
    world.room.pump()
    assert asked[-1] == {Asked(b)}
    world.room.enter(first, front=True, turn=turn)
    world.run_scheduled()
    assert asked[-1] == {Asked(a, False), Asked(b)}


class Timed:
    """A room whose decode workers alone have room, its clock and its timers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.num_asked = 0
        self.world = World(max_waiting=999, max_placed=999)
        self.room = self.world.room = WaitingRoom(
            max_waiting=999,
            max_placed=999,
            schedule=self.world.scheduled.append,
            schedule_rest=lambda after_s, pump: self.timers.append((self.now_s + after_s, pump)),
            has_room=self._has_room,
            clock=lambda: self.now_s,
        )

    def _has_room(self, those: Iterable[Asked]) -> bool:
        self.num_asked += 1
        return any(asked.may_be_local for asked in those)

    def run(self, until_s: float) -> None:
        """What was scheduled, and what is due till then, in order."""
        self.world.run_scheduled()
        while due := [timer for timer in self.timers if timer[0] <= until_s]:
            first = min(due, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.now_s = first[0]
            first[1]()
            self.world.run_scheduled()
        self.now_s = until_s


def test_nobody_is_offered_what_prefill_workers_alone_compute_while_those_are_full() -> None:
    """Two hundred wait; of one of them a decode worker has all but a few tokens after a while."""
    timed = Timed()
    waiters = [timed.world.waiter(turn=Turn(may_be_local=False)) for _ in range(200)]
    timed.run(5.0)
    assert not any(waiter.told for waiter in waiters)
    assert timed.num_asked < 30, "a pump each second is enough"
    assert len(timed.timers) == 1
    waiters[150].is_near = True
    timed.run(7.5)
    assert waiters[150].told, "though nothing else happened"
    timed.room.stop_waiting(waiters[150])
    timed.run(8.0)
    num_told = sum(len(waiter.told) for waiter in waiters)
    timed.run(12.0)
    assert sum(len(waiter.told) for waiter in waiters) == num_told, "it was the only one"
    timed.world.capacity = 1
    short = timed.world.waiter()
    timed.run(12.1)
    assert short.is_placed or any(waiter.is_placed for waiter in waiters)


def test_of_many_that_wait_for_prefill_workers_each_is_looked_at_in_time() -> None:
    timed = Timed()
    waiters = [timed.world.waiter(turn=Turn(may_be_local=False)) for _ in range(900)]
    timed.run(0.5)
    for waiter in waiters[600:]:
        waiter.is_near = True
    timed.run(3.5)
    assert waiters[600].told
    timed.world.capacity = 900
    timed.run(60.0)
    assert all(waiter.is_placed for waiter in waiters[600:])


def test_whoever_bars_others_does_not_stop_looks_at_them() -> None:
    """One that was placed is not granted all it needs: the bar ends by itself after two seconds."""
    timed = Timed()
    favoured = timed.world.waiter()
    timed.world.capacity = 1
    timed.run(0.0)
    assert favoured.is_placed
    favoured.is_placed = False
    timed.room.enter(favoured, front=True)
    for _ in range(16):
        other = timed.world.waiter()
        timed.room.take(other)
    late = timed.world.waiter(turn=Turn(may_be_local=False))
    timed.room.take(favoured)
    timed.world.run_scheduled()
    late.is_near = True
    timed.world.capacity = 1
    timed.run(9.0)
    assert late.is_placed


def test_a_pump_of_an_empty_room_looks_at_nothing() -> None:
    """Where there is room for all, that is each: one for who comes, for who goes, and more."""
    world = World(capacity=1)
    one = world.waiter()
    world.run_scheduled()
    assert num_calls(world.room.pump) <= 12, "while it is placed"
    world.room.leave(one)
    assert num_calls(world.room.pump) <= 12, "once it has left"
    refused = world.waiter()
    world.run_scheduled()
    assert refused.told == [False], "that one left is forgotten as it always was"
