"""A router follows a worker's cache over its stream, whatever becomes of the stream."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from diptych.cache_log import CacheLog
from diptych.errors import NotServedError, NoWorkerError
from diptych.rpc import client_stream
from diptych.rpc.server import Context
from diptych.timers import Timers
from diptych.v1 import cache_pb2, cache_pb2_grpc, worker_pb2
from diptych.worker import cache_watch
from diptych.worker.cache_watch import CacheServicer
from diptych.worker.status import WorkerStatus
from router.cluster.cache_link import CacheLink
from router.placement.cache_index import CacheIndex
from router.placement.views import WorkerId

KEYS = tuple(bytes([i, *range(1, 16)]) for i in range(1, 9))


class FakeCall:
    """A stream of our servicer in the same process; ``code``: what it ends with, once set."""

    def __init__(self, events: AsyncIterator[cache_pb2.CacheChange]) -> None:
        self._events = events
        self.code: grpc.StatusCode | None = None

    async def __aiter__(self) -> AsyncIterator[cache_pb2.CacheChange]:
        while True:
            if self.code is not None:
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(self.code, nothing, nothing, "broken", None)
            yield await anext(self._events)

    def add_done_callback(self, callback: object) -> None: ...

    def cancel(self) -> bool:
        return True


class FakeWorker:
    """A worker with a cache, its watch and its stub. ``mars`` changes what it sends."""

    channel = None

    def __init__(self) -> None:
        self.is_serving = True
        self.keys: dict[bytes, None] = {}
        self.mars: Callable[[cache_pb2.CacheChange], None] = lambda told: None
        self.refuses_with: grpc.StatusCode | None = None
        self.requests: list[cache_pb2.WatchCacheRequest] = []
        self.calls: list[FakeCall] = []
        self.restart()

    @property
    def worker(self) -> WorkerId:
        return WorkerId("w:1", self.status.incarnation)

    def restart(self) -> None:
        """Another process, with an empty cache."""
        self.keys.clear()
        self.status = WorkerStatus(worker_pb2.WORKER_ROLE_DECODE)
        self.status.loaded = True
        self.log = self.status.cache_log = CacheLog(self.keys.keys(), 16)

    def add(self, *keys: bytes) -> None:
        for key in keys:
            self.keys[key] = None
            self.log.entered(key)

    def WatchCache(self, request: cache_pb2.WatchCacheRequest) -> FakeCall:
        self.requests.append(request)
        self.calls.append(FakeCall(self._events(request)))
        self.calls[-1].code = self.refuses_with
        return self.calls[-1]

    async def _events(
        self, request: cache_pb2.WatchCacheRequest
    ) -> AsyncIterator[cache_pb2.CacheChange]:
        servicer = CacheServicer(self.status)
        async for told in servicer.WatchCache(request, cast(Context, None)):
            self.mars(told)
            yield told


class World:
    """A link to one worker."""

    def __init__(self, max_blocks: int = 100) -> None:
        self.there = FakeWorker()
        self.index = CacheIndex(max_blocks)
        self.link = CacheLink(
            cast(Any, self.there), self.index, router_incarnation="r", timers=Timers()
        )

    def knows(self, num_blocks: int) -> Callable[[], bool]:
        """Whether it is so many of the worker that is there now."""
        return lambda: (
            self.index.num_hit_blocks(self.there.worker.incarnation, (*KEYS,)) == (num_blocks)
        )

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.link.run())
            yield
            running.cancel()


async def until(is_so: Callable[[], object]) -> None:
    while not is_so():
        await asyncio.sleep(0)


@pytest.fixture
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(getattr(request, "param", 100))
    monkeypatch.setattr(cache_pb2_grpc, "CacheStub", lambda channel: made.there)
    monkeypatch.setattr(cache_watch, "_GAP_S", 0.0)
    monkeypatch.setattr(client_stream, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(client_stream, "_LONGEST_PAUSE_S", 0.0)
    return made


async def test_what_a_worker_has_is_known_and_what_becomes_other(world: World) -> None:
    world.there.add(*KEYS[:3])
    async with world.followed():
        await until(world.knows(3))
        world.there.add(KEYS[3])
        await until(world.knows(4))
        del world.there.keys[KEYS[1]]
        world.there.log.left(KEYS[1])
        await until(world.knows(1))
    assert len(world.there.requests) == 1
    assert world.there.requests[0] == cache_pb2.WatchCacheRequest(router_incarnation="r")


async def test_what_another_process_has_is_not_taken_for_the_workers(world: World) -> None:
    """It is there already, and its watch has not said so yet."""
    world.there.add(*KEYS[:3])

    def of_another(told: cache_pb2.CacheChange) -> None:
        told.incarnation = "another"

    world.there.mars = of_another
    async with world.followed():
        await until(lambda: len(world.there.requests) == 3)
        assert world.knows(0)()


async def test_a_stream_that_broke_is_taken_up_where_it_ended(world: World) -> None:
    world.there.add(*KEYS[:3])
    async with world.followed():
        await until(world.knows(3))
        world.there.calls[-1].code = grpc.StatusCode.UNAVAILABLE
        await until(lambda: len(world.there.requests) == 2)
        assert world.knows(3)()
        world.there.add(KEYS[3])
        await until(world.knows(4))
    request = world.there.requests[1]
    assert (request.incarnation, request.seq) == (world.there.worker.incarnation, 3)


async def test_nothing_is_believed_once_a_stream_cannot_be_opened_again(world: World) -> None:
    world.there.add(*KEYS[:3])
    async with world.followed():
        await until(world.knows(3))
        world.there.refuses_with = world.there.calls[-1].code = grpc.StatusCode.UNAVAILABLE
        await until(world.knows(0))
        world.there.refuses_with = None
        await until(world.knows(3))


@pytest.mark.parametrize("field", ["from_seq", "num_blocks", "digest", "added"])
async def test_all_is_asked_for_anew_when_something_does_not_fit(
    world: World, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    def mars(told: cache_pb2.CacheChange) -> None:
        world.there.mars = lambda told: None
        setattr(told, field, b"no key" if field == "added" else getattr(told, field) + 1)

    world.there.add(*KEYS[:3])
    async with world.followed():
        await until(world.knows(3))
        world.there.mars = mars
        world.there.add(KEYS[3])
        await until(world.knows(4))
    assert [request.seq for request in world.there.requests] == [0, 0]
    assert not world.there.requests[1].incarnation
    assert "a worker's cache was lost track of" in caplog.messages


async def test_of_another_process_nothing_is_taken_over(world: World) -> None:
    world.there.add(*KEYS[:3])
    async with world.followed():
        await until(world.knows(3))
        before = world.there.worker
        world.there.restart()
        world.link.worker_changed()
        world.there.add(*KEYS[:2])
        await until(world.knows(2))
    assert world.index.seq(before.incarnation) is None


async def test_a_worker_that_does_not_serve_is_not_asked(world: World) -> None:
    world.there.is_serving = False
    world.link.worker_changed()
    world.there.add(*KEYS[:3])
    async with world.followed():
        for _ in range(50):
            await asyncio.sleep(0)
        assert not world.there.requests
        world.there.is_serving = True
        world.link.worker_changed()
        await until(world.knows(3))


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED])
async def test_a_process_of_an_earlier_version_is_asked_once(
    world: World, caplog: pytest.LogCaptureFixture, code: grpc.StatusCode
) -> None:
    world.there.refuses_with = code
    async with world.followed():
        await until(lambda: caplog.messages)
        for _ in range(50):
            world.link.worker_changed()
            await asyncio.sleep(0)
        assert len(world.there.requests) == 1
        world.there.refuses_with = None
        world.there.restart()
        world.there.add(*KEYS[:3])
        world.link.worker_changed()
        await until(world.knows(3))
    assert caplog.messages == ["worker does not tell what it has cached"]


async def test_a_process_that_let_nobody_ask_is_asked_again_after_it_was_lost(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lock may have another key then."""
    world.there.refuses_with = grpc.StatusCode.PERMISSION_DENIED
    world.there.add(*KEYS[:3])
    async with world.followed():
        await until(lambda: caplog.messages)
        world.there.refuses_with = None
        for is_serving in (False, True):
            world.there.is_serving = is_serving
            world.link.worker_changed()
        await until(world.knows(3))


async def test_a_worker_that_was_left_does_not_come_back(world: World) -> None:
    """Its last words may come before the task that hears them ends."""
    world.there.add(*KEYS[:3])
    async with world.followed():
        await until(world.knows(3))
        world.link.close()
        world.index.forget(world.there.worker.incarnation)
        world.there.add(KEYS[3])
        world.link.worker_changed()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not world.index._workers
    assert len(world.there.requests) == 1


@pytest.mark.parametrize("world", [3], indirect=True)
async def test_one_who_has_more_than_there_is_room_for_is_named_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.there.add(*KEYS[:3])
    async with world.followed():
        await until(world.knows(3))
        assert not caplog.messages
        for key in KEYS[3:6]:
            world.there.add(key)
            await until(
                lambda: world.index.seq(world.there.worker.incarnation) == world.there.log.seq
            )
    assert caplog.messages == ["a worker has more cached than is known here"]


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_a_worker_without_a_cache_to_tell_of_says_so(is_loaded: bool) -> None:
    status = WorkerStatus(worker_pb2.WORKER_ROLE_DECODE)
    status.loaded = is_loaded
    stream = CacheServicer(status).WatchCache(cache_pb2.WatchCacheRequest(), cast(Context, None))
    with pytest.raises(NotServedError if is_loaded else NoWorkerError):
        await anext(stream)
