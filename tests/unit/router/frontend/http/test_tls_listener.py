"""Who connects and does not speak TLS keeps nobody out."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from diptych.rpc.identity import Certificate
from router.frontend.http import tls_listener
from router.frontend.http.tls_listener import AT_ONCE, TlsListener
from tests.authority import Authority

Run = Callable[[Coroutine[Any, Any, None]], None]


class Greeting(asyncio.Protocol):
    """Says a word and hangs up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast(asyncio.WriteTransport, transport)
        connection.write(b"hello")
        connection.close()


class Door:
    """A listener that runs, and clients of it."""

    def __init__(self, port: int, ca: Path) -> None:
        self._port = port
        self._trust = ssl.create_default_context(cafile=str(ca))
        self.silent: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def connect(self, said: bytes = b"") -> asyncio.StreamReader:
        """A client that says only this."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.silent.append((reader, writer))
        writer.write(said)
        return reader

    async def greeted(self) -> bytes:
        """What a client is told that shakes hands."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=self._trust, ssl_handshake_timeout=5
        )
        word = await reader.read()
        writer.close()
        return word


async def left(reader: asyncio.StreamReader) -> bool:
    """Wait until the listener ends a connection; it told its client nothing."""
    with suppress(ConnectionResetError):  # as it had said something
        return await reader.read() == b""
    return True


@asynccontextmanager
async def listening(work: Path, max_waiting: int) -> AsyncIterator[Door]:
    folder = Authority(work).issue_name("127.0.0.1", "router")
    certificate = Certificate("tls", folder / "certificate.pem", folder / "key.pem")
    bound = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener = TlsListener(bound, certificate, Greeting, max_waiting)
    door = Door(bound.getsockname()[1], folder / "ca.pem")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(listener.run(), name="listener")
        try:
            yield door
        finally:
            for _, writer in door.silent:
                writer.close()
            running.cancel()
            bound.close()


@pytest.mark.parametrize(
    "said", [b"", b"\x16", b"\x16\x03\x01\x02\x00", b"\x16\x03\x01\x02\x00abc"]
)
@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])  # the router's loop has a TLS of its own
def test_who_says_less_than_a_word_takes_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes, run: Run
) -> None:
    monkeypatch.setattr(tls_listener, "_HANDSHAKE_S", 60.0)
    run(_greeted_beside_others(tmp_path, said))


async def _greeted_beside_others(work: Path, said: bytes) -> None:
    async with listening(work, 4 * AT_ONCE) as door:
        for _ in range(AT_ONCE + 20):
            await door.connect(said)
        async with asyncio.timeout(5):
            assert await door.greeted() == b"hello"


async def test_where_too_many_are_silent_the_longest_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_listener, "_HANDSHAKE_S", 60.0)
    async with listening(tmp_path, 4) as door, asyncio.timeout(10):
        readers = [await door.connect() for _ in range(20)]
        assert await door.greeted() == b"hello"
        for reader in readers[:16]:
            assert await left(reader)
        assert not any(reader.at_eof() for reader in readers[-2:])


@pytest.mark.parametrize("said", [b"", b"\x16", b"\x16\x03\x01\x02\x00abc"])
async def test_who_goes_on_to_say_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(tls_listener, "_HANDSHAKE_S", 0.2)
    async with listening(tmp_path, 4) as door, asyncio.timeout(5):
        assert await left(await door.connect(said))


async def test_who_speaks_another_language_is_left_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_listener, "_HANDSHAKE_S", 60.0)
    async with listening(tmp_path, 4) as door, asyncio.timeout(5):
        reader = await door.connect(b"GET / HTTP/1.1\r\n\r\n")
        while await reader.read(1000):
            pass


def first_word(trust: ssl.SSLContext) -> bytes:
    """What a client says first that shakes hands."""
    said = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        trust.wrap_bio(ssl.MemoryBIO(), said, server_hostname="127.0.0.1").do_handshake()
    return said.read()


@pytest.mark.parametrize("num", [AT_ONCE, 2 * AT_ONCE + 20])
@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_who_does_not_go_on_to_shake_hands_is_left_for_who_waits_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int, run: Run
) -> None:
    monkeypatch.setattr(tls_listener, "_HANDSHAKE_S", 60.0)
    monkeypatch.setattr(tls_listener, "_SHAKING_S", 0.3)
    run(_greeted_after_others(tmp_path, num))


async def _greeted_after_others(work: Path, num: int) -> None:
    async with listening(work, 4 * AT_ONCE) as door, asyncio.timeout(20):
        said = first_word(ssl.create_default_context())
        readers = [await door.connect(said) for _ in range(num)]
        assert await readers[AT_ONCE - 1].read(1)  # the server's word: it has a turn
        assert await door.greeted() == b"hello"
        while await readers[0].read(1000):
            pass
        assert num > AT_ONCE or not readers[1].at_eof()


async def test_who_does_not_go_on_to_shake_hands_is_left_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_listener, "_HANDSHAKE_S", 0.2)
    async with listening(tmp_path, 4) as door, asyncio.timeout(5):
        reader = await door.connect(first_word(ssl.create_default_context()))
        while await reader.read(1000):
            pass
