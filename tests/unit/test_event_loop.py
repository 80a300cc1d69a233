"""What gRPC has for an event loop, as its turns are long."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVarTuple

import grpc

from diptych.event_loop import EventLoop
from tests.waiting import Patience

NUM_CALLS = 100
METHOD = "Echo"
SERVICE = "test.Echo"

Ts = TypeVarTuple("Ts")


class Observed(EventLoop):
    """Knows what it was given to watch."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[socket.socket] = []

    def add_reader(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        """See asyncio."""
        self.watched.append(fd)
        super().add_reader(fd, callback, *args)


@contextmanager
def echoing() -> Iterator[str]:
    """The address of a server of other threads."""
    server = grpc.server(ThreadPoolExecutor(2))
    echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    handler = grpc.method_handlers_generic_handler(SERVICE, {METHOD: echo})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def num_unread(woken: socket.socket) -> int:
    try:
        return len(woken.recv(10 * NUM_CALLS, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return 0


def stand_still_until(condition: Callable[[], bool]) -> None:
    """As a loop does whose turn is long."""
    patience = Patience(10.0)
    while not condition():
        assert not patience.is_over()
        time.sleep(0.001)


def test_a_turn_of_the_loop_takes_all_that_grpc_has() -> None:
    """As one is at something else, the answers to many calls come."""

    async def ask_amid_a_long_turn(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, Observed)
            (woken,) = loop.watched
            await channel.channel_ready()
            echo = channel.unary_unary(
                f"/{SERVICE}/{METHOD}", request_serializer=None, response_deserializer=None
            )

            async def ask() -> None:
                assert await echo(b"x") == b"x"

            async with asyncio.TaskGroup() as tasks:
                for _ in range(NUM_CALLS):
                    tasks.create_task(ask())
                for _ in range(2):  # they are made, and asked
                    await asyncio.sleep(0)
                stand_still_until(lambda: num_unread(woken) >= NUM_CALLS)
                for _ in range(2):
                    await asyncio.sleep(0)
                assert num_unread(woken) < NUM_CALLS / 2

    with echoing() as address, asyncio.Runner(loop_factory=Observed) as runner:
        runner.run(ask_amid_a_long_turn(address))
