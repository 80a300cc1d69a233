"""Requests of one stream are answered side by side; what ends one of them, and what ends all."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, cast

import grpc
import pytest

from diptych.errors import DiptychError, NoWorkerError, QueueFullError, SlowClientError
from diptych.open_inference import service_pb2
from diptych.rpc.server import Context
from router.frontend.open_inference.stream import IDLE_S, MOST_AT_ONCE, InferStream
from tests.virtual_time import run_virtually

WRITE_S = 30.0


class Client:
    """Takes responses, but for those after ``takes``, each ``pause_s`` late; asks by ``ask``."""

    def __init__(self, takes: int = 10**6, pause_s: float = 0.0) -> None:
        self.took: list[tuple[str, str]] = []
        self.num_asked = 0
        self.is_writing = False
        self.is_gone = False
        self._takes = takes
        self.pause_s = pause_s
        self._asks: asyncio.Queue[bytes | None] = asyncio.Queue()

    def ask(self, *names: bytes | None) -> None:
        for name in names:
            self._asks.put_nowait(name)

    async def requests(self) -> AsyncIterator[bytes]:
        while (name := await self._asks.get()) is not None:
            self.num_asked += 1
            yield name

    async def write(self, response: service_pb2.ModelStreamInferResponse) -> None:
        assert not self.is_writing, "two responses on their way"
        self.is_writing = True
        if self.is_gone:
            raise grpc.aio.UsageError("the call is over")
        await asyncio.sleep(self.pause_s)
        if len(self.took) >= self._takes:
            await asyncio.Event().wait()
        self.took.append((response.infer_response.id, response.error_message))
        self.is_writing = False


class Answering:
    """Pieces under the request's own name; what is asked with ``!`` fails after the first."""

    num_closed: int = 0

    def __init__(
        self,
        data: bytes,
        error: DiptychError,
        gate: asyncio.Event | None,
        fails_after_s: float,
    ) -> None:
        self.given_id = data.decode()
        self._fails_after_s = fails_after_s
        self._error = error
        self._gate = gate

    async def responses(
        self, give_up: Callable[[], None]
    ) -> AsyncGenerator[service_pb2.ModelInferResponse, None]:
        try:
            if self.given_id == "!":
                asyncio.get_running_loop().call_later(self._fails_after_s, give_up)
            yield service_pb2.ModelInferResponse(id=self.given_id)
            if self.given_id == "!":
                raise self._error
            if self._gate is not None:
                await self._gate.wait()
            yield service_pb2.ModelInferResponse(id=self.given_id)
        finally:
            Answering.num_closed += 1


def stream(
    client: Client,
    *,
    error: DiptychError | None = None,
    gate: asyncio.Event | None = None,
    fails_after_s: float = 0.0,
    **settings: Any,
) -> InferStream:
    Answering.num_closed = 0
    failing = error or NoWorkerError("none here")
    return InferStream(
        cast(Context, client),
        lambda data: Answering(data, failing, gate, fails_after_s),
        **{"write_s": WRITE_S, **settings},
    )


async def test_answers_come_side_by_side_and_the_stream_ends_with_the_last() -> None:
    client, gate = Client(), asyncio.Event()
    client.ask(b"a", b"b", None)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stream(client, gate=gate).run(client.requests()))
        while len(client.took) < 2:
            await asyncio.sleep(0)
        assert not running.done()
        gate.set()
    assert [name for name, _ in client.took] == ["a", "b", "a", "b"]


async def test_a_failure_is_told_and_the_others_go_on() -> None:
    client = Client()
    client.ask(b"!", b"a", None)
    await stream(client).run(client.requests())
    assert ("!", "NO_WORKER: none here") in client.took
    assert [name for name, error in client.took if not error].count("a") == 2


async def test_a_failure_is_the_calls_own_for_who_wants_that() -> None:
    client = Client()
    client.ask(b"!", None)
    with pytest.raises(NoWorkerError):
        await stream(client, ends_on_failure=True).run(client.requests())


@pytest.mark.parametrize("error", [SlowClientError("took nothing"), NoWorkerError("none here")])
def test_a_client_that_takes_nothing_ends_the_call(error: DiptychError) -> None:
    async def ask() -> None:
        client = Client(takes=0)
        client.ask(b"!", b"a")
        with pytest.raises(type(error)):
            await stream(client, error=error).run(client.requests())

    run_virtually(ask())
    assert Answering.num_closed == 2


@pytest.mark.parametrize("is_first", [True, False])
def test_a_client_that_pauses_misses_no_answer_for_one_that_fails(is_first: bool) -> None:
    """Whether the response that is on its way then is the failing answer's own or another's."""

    async def ask() -> Client:
        client = Client(pause_s=WRITE_S / 2)
        client.ask(*([b"!", b"a"] if is_first else [b"a", b"!"]), None)
        await stream(client).run(client.requests())
        return client

    took = run_virtually(ask()).took
    assert took.count(("a", "")) == 2
    assert took.count(("!", "")) == is_first
    assert took.count(("!", "NO_WORKER: none here")) == 1


def test_a_response_that_was_on_its_way_for_long_has_a_moment_more() -> None:
    """Its client may be about to take it when the answer fails."""

    async def ask() -> Client:
        client = Client(pause_s=WRITE_S + 5.5)
        client.ask(b"!", None)
        asyncio.get_running_loop().call_later(1, setattr, client, "pause_s", 0.0)
        await stream(client, fails_after_s=WRITE_S + 5).run(client.requests())
        return client

    assert run_virtually(ask()).took == [("!", ""), ("!", "NO_WORKER: none here")]


def test_and_so_does_one_that_does_not_hear_of_a_failure() -> None:
    async def ask() -> float:
        client = Client(takes=1)
        client.ask(b"!")
        with pytest.raises(SlowClientError):
            await stream(client).run(client.requests())
        return asyncio.get_running_loop().time()

    assert run_virtually(ask()) == pytest.approx(WRITE_S)


def test_a_stream_that_asks_nothing_ends() -> None:
    """Not while something is being answered."""

    async def ask() -> float:
        client, gate = Client(), asyncio.Event()
        client.ask(b"a")
        asyncio.get_running_loop().call_later(3 * IDLE_S, gate.set)
        with pytest.raises(SlowClientError):
            await stream(client, gate=gate).run(client.requests())
        assert len(client.took) == 2
        return asyncio.get_running_loop().time()

    assert run_virtually(ask()) == pytest.approx(4 * IDLE_S)


def test_a_stream_that_makes_room_ends_though_something_is_asked_at_that_moment() -> None:
    async def ask() -> None:
        client = Client()
        making_room = stream(client, gate=asyncio.Event())

        def at_once() -> None:
            client.ask(b"a")
            making_room.make_room()

        asyncio.get_running_loop().call_later(1, at_once)
        asyncio.get_running_loop().call_later(2 * IDLE_S, client.ask, None)
        with pytest.raises(QueueFullError):
            await making_room.run(client.requests())
        assert asyncio.get_running_loop().time() == pytest.approx(1)

    run_virtually(ask())


async def test_no_more_is_read_than_is_answered_at_a_time() -> None:
    client, gate = Client(), asyncio.Event()
    client.ask(*[b"a"] * (2 * MOST_AT_ONCE), None)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        tasks.create_task(stream(client, gate=gate).run(client.requests()))
        while len(client.took) < MOST_AT_ONCE:
            await asyncio.sleep(0)
        assert client.num_asked == MOST_AT_ONCE
        gate.set()
    assert len(client.took) == 4 * MOST_AT_ONCE


async def test_who_leaves_leaves_nothing_behind() -> None:
    client, gate = Client(), asyncio.Event()
    client.ask(b"a", b"b")
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stream(client, gate=gate).run(client.requests()))
        while len(client.took) < 2:
            await asyncio.sleep(0)
        client.is_gone = True
        running.cancel()
    assert Answering.num_closed == 2


async def test_a_call_that_is_over_is_no_error() -> None:
    client = Client()
    client.is_gone = True
    client.ask(b"a", None)
    await stream(client).run(client.requests())
    assert Answering.num_closed == 1
