"""A router follows its source of workers while it serves."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import grpc
import pytest
from dns.asyncresolver import Resolver

from diptych.rpc.channel import open_channel
from router.app import serve
from router.config import RouterConfig
from router.discovery.dns import DnsLookup, NoAnswerError
from tests.call import generate, token_request
from tests.integration.fake_workers import FakeDecode
from tests.integration.kube_api import kube_api
from tests.integration.router_rig import EVENTUALLY_S, PROMPT, TIMERS, eventually, expected
from tests.waiting import within


@asynccontextmanager
async def serving(model: Path, **settings: object) -> AsyncIterator[grpc.aio.Channel]:
    """A router with these settings."""
    given = {"model": str(model), "timers": TIMERS, "http": False, **settings}
    config = RouterConfig.model_validate(given)
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(config, stop, port.set_result))
        async with open_channel(f"127.0.0.1:{await port}") as channel:
            try:
                yield channel
            finally:
                stop.set()


class NameServer(asyncio.DatagramProtocol):
    """Answers for ``records``: texts by name and type. No such name: NXDOMAIN."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.is_broken = False
        self.send: Callable[[bytes, tuple[str, int]], object]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        reply = dns.message.make_response(query)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        kind = dns.rdatatype.to_text(question.rdtype)
        if self.is_broken:
            reply.set_rcode(dns.rcode.SERVFAIL)
        elif (name, kind) in self.records:
            found = self.records[name, kind]
            reply.answer.append(dns.rrset.from_text_list(question.name, 5, "IN", kind, found))
        elif not any(known == name for known, _ in self.records):
            reply.set_rcode(dns.rcode.NXDOMAIN)
        self.send(reply.to_wire(), addr)


@asynccontextmanager
async def name_server() -> AsyncIterator[tuple[NameServer, str]]:
    """A DNS server and its address."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    server.send = transport.sendto
    try:
        yield server, "{}:{}".format(*transport.get_extra_info("sockname"))
    finally:
        transport.close()


@asynccontextmanager
async def two_workers() -> AsyncIterator[tuple[FakeDecode, FakeDecode]]:
    """Decode workers, which compute prompts themselves."""
    first, second = FakeDecode(), FakeDecode()
    for worker in (first, second):
        await worker.start()
    try:
        yield first, second
    finally:
        for worker in (first, second):
            await worker.kill()


async def answers_from(channel: grpc.aio.Channel, worker: FakeDecode) -> None:
    """Ask until this one was asked; every answer on the way is right."""
    async with within(EVENTUALLY_S):
        while not worker.specs:
            request = token_request(PROMPT, max_tokens=4)
            answer = await generate(channel, request, timeout_s=EVENTUALLY_S)
            assert answer.error is None
            assert answer.token_ids == expected(4)


async def test_a_file_that_is_replaced_moves_requests(wide_model: Path, tmp_path: Path) -> None:
    async with two_workers() as (first, second):
        path = tmp_path / "workers.json"

        def name(worker: FakeDecode) -> None:
            beside = tmp_path / "new"
            beside.write_text(json.dumps({"decode": [worker.address]}))
            beside.replace(path)

        name(first)
        source = {"path": path, "interval_s": 0.02}
        async with serving(wide_model, discovery="file", file=source) as channel:
            await answers_from(channel, first)
            path.write_text("decode: [")
            await asyncio.sleep(0.1)
            first.specs.clear()
            await answers_from(channel, first)
            name(second)
            await answers_from(channel, second)


async def test_names_that_stand_for_others_move_requests(wide_model: Path) -> None:
    async with two_workers() as (first, second), name_server() as (server, address):
        ports = [worker.address.rpartition(":")[2] for worker in (first, second)]
        name = "_grpc._tcp.decode.test"
        server.records[name, "SRV"] = [f"0 0 {ports[0]} localhost."]
        source = {"decode": [name], "interval_s": 0.02, "server": address}
        async with serving(wide_model, discovery="dns", dns=source) as channel:
            await answers_from(channel, first)
            server.is_broken = True
            await asyncio.sleep(0.1)
            first.specs.clear()
            await answers_from(channel, first)
            server.is_broken = False
            server.records[name, "SRV"] = [f"0 0 {ports[1]} localhost."]
            await answers_from(channel, second)


async def test_endpoints_that_change_move_requests(wide_model: Path, tmp_path: Path) -> None:
    async with two_workers() as (first, second), kube_api(tmp_path) as (api, config):
        ports = [int(worker.address.rpartition(":")[2]) for worker in (first, second)]
        await api.put("d-1", "decode", ports[0], "127.0.0.1")
        source = {"decode": ["decode"], "kubeconfig": config}
        async with serving(wide_model, discovery="kubernetes", kubernetes=source) as channel:
            await answers_from(channel, first)
            api.is_down = True
            api.cut()
            await eventually(lambda: api.num_refused >= 1, "it was not asked")
            first.specs.clear()
            await answers_from(channel, first)
            api.is_down = False
            await api.put("d-1", "decode", ports[1], "127.0.0.1")
            await answers_from(channel, second)


async def test_what_a_server_says_of_names() -> None:
    async with name_server() as (server, address):
        lookup = DnsLookup(address)
        assert await lookup("decode.test:1") == frozenset()
        assert await lookup("_grpc._tcp.decode.test") == frozenset()
        server.records["six.test", "AAAA"] = ["fd00::7"]
        assert await lookup("six.test:1") == {"[fd00::7]:1"}
        server.records["six.test", "A"] = ["10.0.0.1", "10.0.0.2"]
        assert await lookup("six.test:1") == {"10.0.0.1:1", "10.0.0.2:1"}
        for odd in ("0 0 1 unix.", "0 0 0 ."):
            server.records["_grpc._tcp.odd.test", "SRV"] = [odd]
            with pytest.raises(NoAnswerError, match="expected host:port"):
                await lookup("_grpc._tcp.odd.test")
        server.is_broken = True
        with pytest.raises(NoAnswerError):
            await lookup("six.test:1")


@pytest.mark.parametrize("is_broken", [False, True])
async def test_who_is_told_to_end_while_an_answer_comes_ends(
    monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """As ``asyncio.wait_for`` of CPython 3.11 does, by which the library waits."""
    resolve = Resolver.resolve

    async def finish(self: Resolver, *args: Any, **options: Any) -> Any:
        asked = asyncio.get_running_loop().create_task(resolve(self, *args, **options))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            return await asked

    monkeypatch.setattr(Resolver, "resolve", finish)
    async with name_server() as (server, address):
        server.records["six.test", "A"] = ["10.0.0.1"]
        server.is_broken = is_broken
        asking = asyncio.get_running_loop().create_task(DnsLookup(address)("six.test:1"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
