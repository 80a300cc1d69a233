"""Static batches: full or late, to the end of all, and nobody's place is lost."""

import asyncio
import math

import pytest

from tests.bench.static_batches import StaticBatches

WAIT_S = 0.05


class Room:
    """Requests that want a place, and end when they are told."""

    def __init__(self, num_requests: int, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self.batches = StaticBatches(num_requests, WAIT_S)
        self.running: set[str] = set()
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def come(self, *names: str, within_s: float = math.inf) -> None:
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = self._tasks.create_task(self._run(name, within_s))

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await self.settled()

    async def settled(self, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        for _ in range(5):
            await asyncio.sleep(0)

    async def _run(self, name: str, within_s: float) -> None:
        async with self.batches.place(within_s):
            self.running.add(name)
            await self.ends[name].wait()
        self.running.remove(name)


async def test_a_full_batch_begins_and_the_next_one_when_all_have_ended() -> None:
    async with asyncio.TaskGroup() as tasks:
        room = Room(2, tasks)
        room.come("a")
        await room.settled()
        assert room.running == set()
        room.come("b", "c", "d", "e")
        await room.settled()
        assert room.running == {"a", "b"}
        await room.end("a")
        assert room.running == {"b"}, "to the end of the longest"
        await room.end("b")
        assert room.running == {"c", "d"}
        await room.end("c", "d")
        await room.settled(2 * WAIT_S)
        assert room.running == {"e"}, "which has waited long enough"
        await room.end("e")


async def test_who_has_waited_long_enough_begins_with_those_there_are() -> None:
    async with asyncio.TaskGroup() as tasks:
        room = Room(8, tasks)
        room.come("a", "b")
        await room.settled(2 * WAIT_S)
        assert room.running == {"a", "b"}
        room.come("c")
        await room.settled(2 * WAIT_S)
        assert room.running == {"a", "b"}
        await room.end("a", "b")
        assert room.running == {"c"}
        await room.end("c")


async def test_who_cannot_be_in_time_takes_no_place() -> None:
    async with asyncio.TaskGroup() as tasks:
        room = Room(2, tasks)
        room.come("a", "b")
        await room.settled()
        room.come("late", within_s=WAIT_S / 2)
        room.come("c", "d")
        await room.settled(WAIT_S)
        await room.end("a", "b")
        assert room.running == {"late", "c", "d"}
        await room.end("late")
        room.come("e", "f")
        await room.settled(2 * WAIT_S)
        assert room.running == {"c", "d"}, "what ended had no place"
        await room.end("c", "d")
        assert room.running == {"e", "f"}
        await room.end("e", "f")


@pytest.mark.parametrize("is_running", [True, False])
async def test_who_goes_away_leaves_its_place(is_running: bool) -> None:
    async with asyncio.TaskGroup() as tasks:
        room = Room(2, tasks)
        room.come("a", "b") if is_running else room.come("a")
        await room.settled()
        room.tasks["a"].cancel()
        await room.settled()
        room.running.discard("a")
        if is_running:
            await room.end("b")
        room.come("c", "d")
        await room.settled()
        assert room.running == {"c", "d"}
        await room.end("c", "d")
