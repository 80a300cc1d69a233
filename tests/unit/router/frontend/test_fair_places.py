"""Places for what takes its time: tenants by turns, bounded, and none is lost."""

import asyncio
import itertools
import random

import pytest

from diptych.errors import QueueFullError
from router.frontend.fair_places import FairPlaces


class Users:
    """Those that want a place, each by its name."""

    def __init__(self, places: FairPlaces, tasks: asyncio.TaskGroup) -> None:
        self._places, self._tasks = places, tasks
        self._leave: dict[str, asyncio.Event] = {}
        self.working: list[str] = []
        self.had: list[str] = []
        self.refused: list[str] = []

    async def come(self, name: str, tenant: str) -> asyncio.Task[None]:
        self._leave[name] = asyncio.Event()
        task = self._tasks.create_task(self._use(name, tenant))
        await asyncio.sleep(0)
        return task

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        for _ in range(3):
            await asyncio.sleep(0)

    async def _use(self, name: str, tenant: str) -> None:
        try:
            async with self._places.place(tenant):
                self.working.append(name)
                self.had.append(name)
                try:
                    await self._leave[name].wait()
                finally:
                    self.working.remove(name)
        except QueueFullError:
            self.refused.append(name)


async def test_tenants_have_turns_however_many_of_one_wait() -> None:
    async with asyncio.TaskGroup() as tasks:
        users = Users(FairPlaces(1, 8, "wait"), tasks)
        for name in ("a0", "a1", "a2", "a3", "b0", "c0", "b1"):
            await users.come(name, name[0])
        wanted = ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]
        for name in wanted:
            assert users.working == [name]
            await users.leave(name)
    assert users.had == wanted


async def test_so_many_work_at_once() -> None:
    async with asyncio.TaskGroup() as tasks:
        users = Users(FairPlaces(2, 8, "wait"), tasks)
        for name in ("a0", "a1", "a2"):
            await users.come(name, "a")
        assert users.working == ["a0", "a1"]
        await users.leave("a1")
        assert users.working == ["a0", "a2"]
        await users.leave("a0")
        await users.come("a3", "a")
        assert users.working == ["a2", "a3"]
        await users.leave("a2")
        await users.leave("a3")


async def test_where_too_many_wait_the_newest_of_who_has_most_is_turned_away() -> None:
    async with asyncio.TaskGroup() as tasks:
        users = Users(FairPlaces(1, 3, "constraints wait"), tasks)
        for name in ("a0", "a1", "a2", "a3", "a4"):
            await users.come(name, "a")
        assert users.refused == ["a4"]
        await users.come("b0", "b")
        await asyncio.sleep(0)
        assert users.refused == ["a4", "a3"]
        await users.come("b1", "b")
        assert users.refused == ["a4", "a3", "b1"], "nobody has two more than b"
        for name in ("a0", "a1", "b0", "a2"):
            await users.leave(name)
    assert users.had == ["a0", "a1", "b0", "a2"]
    places = FairPlaces(1, 0, "constraints wait")
    async with places.place("a"):
        with pytest.raises(QueueFullError, match="0 constraints wait"):
            async with places.place("b"):
                pass


async def test_a_place_that_was_given_to_one_who_gave_up_is_the_next_ones() -> None:
    async with asyncio.TaskGroup() as tasks:
        users = Users(FairPlaces(1, 8, "wait"), tasks)
        await users.come("a0", "a")
        gone, _ = await users.come("a1", "a"), await users.come("b0", "b")
        users._leave["a0"].set()
        await asyncio.sleep(0)  # a0 wakes up and gives its place to a1, which has not woken yet
        assert users.working == []
        gone.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert users.working == ["b0"]
        await users.leave("b0")
        await users.come("a2", "a")
        assert users.working == ["a2"]
        await users.leave("a2")


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_no_place_is_lost_and_none_is_had_twice(seed: int) -> None:
    rng, names = random.Random(seed), itertools.count()
    running: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        places = FairPlaces(2, 6, "wait")
        users = Users(places, tasks)
        for _ in range(300):
            event = rng.random()
            if event < 0.5 or not running:
                name = str(next(names))
                running[name] = await users.come(name, rng.choice("aab"))
            elif event < 0.75 and users.working:
                users._leave[rng.choice(users.working)].set()
            else:
                running[rng.choice(list(running))].cancel()
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            running = {name: task for name, task in running.items() if not task.done()}
            assert len(users.working) <= 2
        while True:
            for _ in range(4):
                await asyncio.sleep(0)
            if all(task.done() for task in running.values()):
                break
            assert users.working, "who waits has a place in the end"
            await users.leave(users.working[0])
        for name in ("x", "y"):
            await users.come(name, name)
        assert sorted(users.working) == ["x", "y"], "both are free again"
        for name in ("x", "y"):
            await users.leave(name)
