"""A waiting room without an event loop, and those that wait in it."""

from collections.abc import Callable

from diptych.errors import DiptychError
from diptych.request_class import RequestClass
from router.placement.fair_queue import Turn
from router.placement.waiting_room import ANY_TURN, WaitingRoom


class Waiter:
    """Takes a placement when told that there is one."""

    def __init__(self, world: "World", room: WaitingRoom) -> None:
        self.world = world
        self.room = room
        self.refusal: DiptychError | None = None
        self.is_placed = False
        self.was_placed = False
        self.is_near = False
        self.is_awaited = True  # there are workers that could take it
        self.told: list[bool] = []  # room_made, each time

    def offer(self, *, room_made: bool) -> None:
        assert not self.is_placed
        self.told.append(room_made)
        if self.world.capacity > 0:
            self.world.capacity -= 1
            self.is_placed = self.was_placed = True
            self.world.order.append(self)
            self.room.take(self)

    def may_be_local(self) -> bool:
        return self.is_near

    def may_come(self) -> bool:
        return self.is_awaited

    def turn_away(self, error: DiptychError) -> None:
        assert self.refusal is None
        self.refusal = error


class World:
    """A room whose pumps run when asked for, as an event loop would."""

    def __init__(self, capacity: int = 0, *, max_waiting: int = 9, max_placed: int = 9) -> None:
        self.capacity = capacity
        self.order: list[Waiter] = []
        self.scheduled: list[Callable[[], None]] = []
        self.now_s = 0.0
        self.used: list[tuple[RequestClass, float]] = []
        self.room = WaitingRoom(
            max_waiting=max_waiting,
            max_placed=max_placed,
            schedule=self.scheduled.append,
            clock=lambda: self.now_s,
            used=lambda *told: self.used.append(told),
        )

    def waiter(self, *, front: bool = False, turn: Turn = ANY_TURN) -> Waiter:
        """A new one that has entered."""
        waiter = Waiter(self, self.room)
        self.room.enter(waiter, front=front, turn=turn)
        return waiter

    def run_scheduled(self) -> int:
        """How many pumps were due."""
        due, self.scheduled[:] = list(self.scheduled), []
        for pump in due:
            pump()
        return len(due)


def pass_it(world: World) -> None:
    """So often are others placed before one that waits again that it bars them from now on."""
    for _ in range(16):
        small = Waiter(world, world.room)
        world.room.take(small)
        world.room.leave(small)


def returned(world: World, waiter: Waiter) -> None:
    """``waiter`` loses its placement and waits again."""
    waiter.is_placed = False
    world.room.enter(waiter, front=True)
