"""A batch server asks routers by the key and the authority that its files name now."""

import asyncio
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from batch_server.config import BatchServerConfig
from batch_server.router_client import RouterFiles, router_client
from diptych.errors import ConfigurationError
from tests.authority import Authority


class Router:
    """Answers each request over TLS, and keeps which keys it was asked with."""

    def __init__(self) -> None:
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.keys: list[str] = []

    def certify(self, folder: Path) -> None:
        self.tls.load_cert_chain(folder / "certificate.pem", folder / "key.pem")

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        self.keys += [line for line in head if line.lower().startswith("authorization:")]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()


async def test_the_files_are_followed(tmp_path: Path) -> None:
    (one := tmp_path / "1").mkdir()
    (two := tmp_path / "2").mkdir()
    before = Authority(one).issue_name("127.0.0.1", "router")
    after = Authority(two).issue_name("127.0.0.1", "router")
    key, ca = tmp_path / "key", tmp_path / "ca.pem"
    key.write_text("old\n")
    ca.write_bytes((before / "ca.pem").read_bytes())
    router = Router()
    router.certify(before)
    config = BatchServerConfig(router_key_file=key, router_ca=ca)
    server = await asyncio.start_server(router.answer, "127.0.0.1", 0, ssl=router.tls)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    files = RouterFiles(config, now=lambda: time.time() + 60.0)  # nothing was written just now
    async with server, router_client(files, max_connections=4) as client:
        assert (await client.get(url)).status_code == 200
        router.certify(after)
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
        key.write_text("the new one")
        ca.write_bytes((after / "ca.pem").read_bytes())
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
        assert files.key is not None
        assert files.ca is not None
        await files.key.look()
        await files.ca.look()
        assert (await client.get(url)).status_code == 200
    assert router.keys == ["authorization: Bearer old", "authorization: Bearer the new one"]


async def test_a_router_whose_machine_is_gone_is_noticed_amid_an_answer() -> None:
    """Its answer may take its time, so reading has no end of its own."""
    asked = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    files = RouterFiles(BatchServerConfig())
    async with server, router_client(files, max_connections=4) as client:
        loop = asyncio.get_running_loop()
        asking = loop.create_task(client.get(f"http://127.0.0.1:{port}/"))
        await asked.wait()
        (connection,) = (c for c in psutil.Process().net_connections() if is_to(c, port))
        with socket.fromfd(connection.fd, socket.AF_INET, socket.SOCK_STREAM) as used:
            assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 10
            assert 0 < used.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking


def is_to(connection: Any, port: int) -> bool:
    return bool(connection.raddr) and connection.raddr.port == port


@pytest.mark.parametrize(
    ("setting", "content", "why"),
    [
        ("router_key_file", None, "--router-key-file: .*: No such file"),
        ("router_key_file", b"\xff", "--router-key-file: .*: "),
        ("router_key_file", b"\n", "--router-key-file: .*: expected one key"),
        ("router_key_file", b"one\ntwo\n", "--router-key-file: .*: expected one key"),
        ("router_ca", None, "--router-ca: .*: No such file"),
        ("router_ca", b"no certificate", "--router-ca: .*: "),
    ],
)
def test_a_file_that_is_no_use_ends_the_start(
    tmp_path: Path, setting: str, content: bytes | None, why: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=why):
        RouterFiles(BatchServerConfig.model_validate({setting: path}))
