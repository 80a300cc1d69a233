"""Pulls over real gRPC and real transports, between two workers of one process."""

import asyncio
import contextlib
import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.errors import ConfigurationError, InvalidRequestError
from diptych.rpc.call_end import CallEnd
from diptych.rpc.channel import open_channel
from diptych.rpc.status import from_rpc_error
from diptych.v1 import common_pb2, decode_pb2, kv_source_pb2, kv_source_pb2_grpc, worker_pb2
from kvtransfer.digest import block_digest, combined_digest
from kvtransfer.errors import TransportError
from tests.call_ends import told
from tests.integration.transfer_rig import (
    BLOCK_SIZE,
    BLOCKS,
    LOCAL,
    NUM_TOKENS,
    TIMERS,
    Reader,
    Source,
    config,
    failure_of,
    layout,
    open_reader,
    open_source,
    until_digested,
    until_idle,
)
from tests.transports import AGENTS
from tests.waiting import until

# Leases, streams, proofs and pairs are the same over each: one transport is enough.
ABOVE_TRANSPORTS = pytest.mark.parametrize("transport", ["inline"], indirect=True)


async def test_a_pull_moves_exactly_the_bytes(
    source: Source, reader: Reader, transport: str
) -> None:
    pair = await reader.connect(source)
    assert pair.transport == transport
    assert pair.bytes_per_s > 0
    num_probes = source.servicer.counters.num_confirmed
    assert num_probes >= 2  # two for each time that the pair had to be proven
    content = source.fill(BLOCKS)
    ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
    source.leases.announce("lease", NUM_TOKENS)
    result = await reader.pairs.open_pull(reader.request(source, ticket, NUM_TOKENS, LOCAL)).run()
    assert reader.content(LOCAL) == content
    stats = result.stats
    assert stats.num_bytes == len(content)
    assert stats.num_tokens == NUM_TOKENS
    assert stats.transport == transport
    assert 0 < stats.exposed_s <= stats.total_s
    assert 0 < stats.read_s <= stats.total_s
    assert 0 < stats.digest_s <= stats.total_s
    assert source.servicer.counters.num_confirmed == num_probes + 1
    await until_idle(source)
    assert not reader.scratch.num_lent
    assert not source.scratch.num_lent


@pytest.mark.parametrize("digest_level", ["full", "sampled", "off"])
async def test_only_what_is_missing_moves(transport: str, digest_level: str) -> None:
    transfer = config(transport, digest_level=digest_level)
    async with open_source(transfer) as source, open_reader(transfer) as reader:
        await reader.connect(source)
        content = source.fill(BLOCKS)
        ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
        source.leases.announce("lease", 3 * BLOCK_SIZE)
        source.leases.announce("lease", NUM_TOKENS)
        result = await reader.pairs.open_pull(
            reader.request(source, ticket, NUM_TOKENS, LOCAL, first=2 * BLOCK_SIZE)
        ).run()
        assert reader.content(LOCAL[:3]) == content[2 * 4096 :]
        assert not any(reader.content(LOCAL[3:]))
        assert result.stats.num_tokens == NUM_TOKENS - 2 * BLOCK_SIZE


async def test_ranges_are_read_while_more_is_computed(source: Source, reader: Reader) -> None:
    await reader.connect(source)
    content = source.fill(BLOCKS)
    ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
    async with asyncio.TaskGroup() as tasks:
        pull = tasks.create_task(
            reader.pairs.open_pull(reader.request(source, ticket, NUM_TOKENS, LOCAL)).run()
        )
        for upto, num_landed in ((5, 0), (20, 1), (60, 3)):
            source.leases.announce("lease", upto)
            landed, expected = LOCAL[:num_landed], content[: num_landed * 4096]
            await until(
                partial(lambda ids, bytes_: reader.content(ids) == bytes_, landed, expected)
            )
            await asyncio.sleep(0.1)  # the next range is computed
            assert not pull.done()
        source.leases.announce("lease", NUM_TOKENS)
        result = await pull
    assert reader.content(LOCAL) == content
    assert result.stats.exposed_s < result.stats.total_s / 2


async def test_cancelling_frees_the_source_and_the_ticket_stays_good(
    source: Source, reader: Reader
) -> None:
    await reader.connect(source)
    content = source.fill(BLOCKS)
    ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
    source.leases.announce("lease", 2 * BLOCK_SIZE)
    request = reader.request(source, ticket, NUM_TOKENS, LOCAL)
    async with asyncio.TaskGroup() as tasks:
        pull = reader.pairs.open_pull(request)
        task = tasks.create_task(pull.run())
        await asyncio.sleep(0.1)
        assert pull.abandon() == frozenset()
        task.cancel()
    assert task.cancelled()
    await until_idle(source)
    source.leases.announce("lease", NUM_TOKENS)
    await reader.pairs.open_pull(request).run()
    assert reader.content(LOCAL) == content


async def test_cancelling_at_any_moment_leaves_nothing_behind(
    source: Source, reader: Reader
) -> None:
    await reader.connect(source)
    source.fill(BLOCKS)
    ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
    source.leases.announce("lease", NUM_TOKENS)
    request = reader.request(source, ticket, NUM_TOKENS, LOCAL)
    for num_ticks in range(80):
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(reader.pairs.open_pull(request).run())
            for _ in range(num_ticks):
                await asyncio.sleep(0)
            task.cancel()
    await until_idle(source)
    await until(lambda: not reader.quarantined)
    await reader.pairs.open_pull(request).run()


@ABOVE_TRANSPORTS
async def test_a_newer_grant_ends_the_pull_at_once(source: Source, reader: Reader) -> None:
    await reader.connect(source)
    ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
    source.leases.announce("lease", BLOCK_SIZE)
    async with asyncio.TaskGroup() as tasks:
        failing = tasks.create_task(failure_of(reader, source, ticket))
        await asyncio.sleep(0.1)
        newer = os.urandom(16)
        source.leases.grant("lease", newer, "reader")
        error = await failing
    assert error.failure == decode_pb2.PULL_FAILURE_TICKET_INVALID
    assert error.refusal == "TICKET_INVALID"
    assert source.servicer.counters.num_refused["TICKET_INVALID"] == 1
    source.leases.announce("lease", NUM_TOKENS)
    await reader.pairs.open_pull(reader.request(source, newer, NUM_TOKENS, LOCAL)).run()


@ABOVE_TRANSPORTS
async def test_closing_the_lease_ends_the_pull_at_once(source: Source, reader: Reader) -> None:
    await reader.connect(source)
    ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
    source.leases.announce("lease", BLOCK_SIZE)
    async with asyncio.TaskGroup() as tasks:
        failing = tasks.create_task(failure_of(reader, source, ticket))
        await asyncio.sleep(0.1)
        source.leases.close("lease")
        error = await failing
    assert error.failure == decode_pb2.PULL_FAILURE_TICKET_INVALID
    assert error.refusal == "LEASE_EXPIRED"
    assert (await failure_of(reader, source, ticket)).refusal == "LEASE_EXPIRED"
    assert source.servicer.counters.num_refused["LEASE_EXPIRED"] == 2


@ABOVE_TRANSPORTS
async def test_a_reason_reaches_a_reader_that_is_sending(source: Source) -> None:
    """A status that meets a message on its way is lost; Ended is not."""
    opened = kv_source_pb2.FetchOpen(
        reader_incarnation="reader",
        source_incarnation="source",
        transport=source.endpoint.config.transports[0],
    )
    beat = kv_source_pb2.FetchCommand(heartbeat=common_pb2.Heartbeat())
    async with open_channel(source.address) as channel:
        stub: Any = kv_source_pb2_grpc.KVSourceStub(channel)
        for number in range(20):
            opened.ticket = source.lease(str(number), BLOCKS, NUM_TOKENS, "reader")
            call = stub.Fetch()
            await call.write(kv_source_pb2.FetchCommand(open=opened))
            assert (await call.read()).HasField("opened")

            async def send(call: Any = call) -> None:
                with contextlib.suppress(grpc.aio.AioRpcError):  # ended meanwhile
                    for _ in range(50):
                        await call.write(beat)

            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(send())
                await asyncio.sleep(0.002)
                source.leases.close(str(number))
                while not (event := await call.read()).HasField("ended"):
                    pass
                assert event.ended.reason == "LEASE_EXPIRED"
                sending.cancel()
            call.cancel()
    await until_idle(source)


@ABOVE_TRANSPORTS
async def test_a_reason_is_sent_although_a_range_is_being_sent(source: Source) -> None:
    """What ends the stream comes while it writes: the write is not broken off."""
    source.fill(BLOCKS)
    opened = kv_source_pb2.FetchOpen(
        reader_incarnation="reader",
        source_incarnation="source",
        transport=source.endpoint.config.transports[0],
    )
    async with open_channel(source.address) as channel:
        stub: Any = kv_source_pb2_grpc.KVSourceStub(channel)
        for number in range(100):
            opened.ticket = source.lease(str(number), BLOCKS, NUM_TOKENS, "reader")
            source.leases.announce(str(number), NUM_TOKENS)
            await until_digested(source)
            call = stub.Fetch()
            twice = kv_source_pb2.FetchCommand(open=opened)
            await call.write(twice)
            await call.write(twice)
            while not (event := await call.read()).HasField("ended"):
                pass
            assert event.ended.reason == "REQUEST_INVALID"
            call.cancel()
            source.leases.close(str(number))
    await until_idle(source)


async def spoilt(call: Any, end: CallEnd) -> None:
    async with told(end):
        await call.write(b"\xff\xff\xff")
        while await call.read():  # heartbeats, the reason, and that is all
            await call.done_writing()


@ABOVE_TRANSPORTS
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
async def test_a_command_that_cannot_be_decoded_is_no_end_of_a_fetch(
    source: Source, is_first: bool
) -> None:
    opened = kv_source_pb2.FetchOpen(
        reader_incarnation="reader",
        source_incarnation="source",
        transport=source.endpoint.config.transports[0],
        ticket=source.lease("lease", BLOCKS, NUM_TOKENS, "reader"),
    )
    async with open_channel(source.address) as channel:
        raw: Any = channel
        call = raw.stream_stream("/diptych.v1.KVSource/Fetch")()
        end = CallEnd(call)
        if not is_first:
            await call.write(kv_source_pb2.FetchCommand(open=opened).SerializeToString())
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await spoilt(call, end)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until_idle(source)


@ABOVE_TRANSPORTS
async def test_the_end_of_a_confirmed_lease_refuses_nobody(source: Source, reader: Reader) -> None:
    """The router closes it as soon as it is proven; the reader's leaving may come later."""
    content = source.fill(BLOCKS)
    ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
    source.leases.announce("lease", NUM_TOKENS)
    await until_digested(source)
    opened = kv_source_pb2.FetchOpen(
        reader_incarnation="reader",
        source_incarnation="source",
        transport=source.endpoint.config.transports[0],
        ticket=ticket,
    )
    async with open_channel(source.address) as channel:
        stub: Any = kv_source_pb2_grpc.KVSourceStub(channel)
        call = stub.Fetch()
        await call.write(kv_source_pb2.FetchCommand(open=opened))
        while not (event := await call.read()).HasField("range"):
            pass
        size = len(content) // len(BLOCKS)
        blocks = [content[i * size : (i + 1) * size] for i in range(len(BLOCKS))]
        digest = combined_digest([block_digest(block) for block in blocks])
        confirm = kv_source_pb2.Confirm(num_tokens=NUM_TOKENS, digest=digest)
        await call.write(kv_source_pb2.FetchCommand(confirm=confirm))
        while not (event := await call.read()).HasField("confirmed"):
            assert not event.HasField("ended"), event
        source.leases.close("lease")
        while isinstance(event := await call.read(), kv_source_pb2.FetchEvent):
            assert not event.HasField("ended")
        assert await call.code() is grpc.StatusCode.OK
    assert not source.servicer.counters.num_refused


@ABOVE_TRANSPORTS
async def test_a_source_that_nobody_named_is_not_connected(source: Source, reader: Reader) -> None:
    error = await failure_of(reader, source, os.urandom(16))
    assert error.failure == decode_pb2.PULL_FAILURE_NOT_CONNECTED


@ABOVE_TRANSPORTS
async def test_a_pair_stays_while_any_router_names_it(source: Source, reader: Reader) -> None:
    await reader.connect(source)
    reader.pairs.set_peers("another router", [source.key])
    reader.pairs.set_peers("router", [])
    await reader.wait_for(source.key, worker_pb2.PAIR_STATE_PROVEN)
    reader.pairs.set_peers("another router", [])
    assert reader.pairs.pairs() == []


FIELDS = [field.name for field in common_pb2.KVLayout.DESCRIPTOR.fields]


@pytest.mark.parametrize("field", FIELDS)
async def test_layouts_that_differ_make_the_pair_unplaceable(field: str) -> None:
    theirs = layout(4096)
    settings: dict[str, object] = {}
    block_bytes = 4096
    if field == "digest_level":
        theirs.digest_level = settings["digest_level"] = "off"
    elif field == "block_bytes":
        theirs.block_bytes = block_bytes = 8192
    elif field == "groups":
        theirs.groups.add()
    elif field == "tensor_parallel_size":
        theirs.tensor_parallel_size = 3  # of two heads
    elif isinstance(getattr(theirs, field), str):
        setattr(theirs, field, "other")
    else:
        setattr(theirs, field, getattr(theirs, field) + 1)
    async with (
        open_source(
            config("inline", **settings), kv_layout=theirs, block_bytes=block_bytes
        ) as source,
        open_reader(config("inline")) as reader,
    ):
        reader.pairs.set_peers("router", [source.key])
        pair = await reader.wait_for(source.key, worker_pb2.PAIR_STATE_FAILED)
    assert pair.message.startswith(f"{field}: the reader has ")
    told = len(theirs.groups) if field == "groups" else getattr(theirs, field)
    assert repr(told) in pair.message


async def test_no_common_transport_is_named() -> None:
    async with open_source(config("nixl")) as source, open_reader(config("inline")) as reader:
        reader.pairs.set_peers("router", [source.key])
        pair = await reader.wait_for(source.key, worker_pb2.PAIR_STATE_FAILED)
    assert pair.message == "transports: the reader has ['inline'], the source has ['nixl']"


TCP = ("tcp", "cuda_copy")  # where a GPU is, nixl wants the latter


async def test_plain_tcp_is_refused_unless_allowed() -> None:
    async with open_source(config("nixl", transports=("nixl", "inline"))) as source:
        async with open_reader(config("nixl", ucx_tls=TCP), incarnation="a") as reader:
            reader.pairs.set_peers("router", [source.key])
            pair = await reader.wait_for(source.key, worker_pb2.PAIR_STATE_FAILED)
            assert "nixl would read over TCP" in pair.message
        either = config("nixl", ucx_tls=TCP, transports=("nixl", "inline"))
        async with open_reader(either, incarnation="b") as reader:
            pair = await reader.connect(source)
            assert pair.transport == "inline"
            assert "nixl would read over TCP" in pair.message
            assert reader.pairs.counters.num_transport_fallbacks == 1
        allowed = config("nixl", ucx_tls=TCP, allow_nixl_tcp=True, allow_faults=True)
        async with open_reader(allowed, incarnation="c") as reader:
            pair = await reader.connect(source)
            assert pair.transport == "nixl"


async def test_ucxx_asked_for_but_not_installed_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for transports in (("ucxx",), ("ucxx", "inline")):
        with pytest.raises(ConfigurationError, match=r"pip install -e '\.\[ucxx\]'"):
            async with open_source(config("ucxx", transports=transports)):
                pass


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_that_cannot_start_leaves_its_turn_to_the_next(name: str) -> None:
    broken = {"ucx_net_devices": "nosuchdevice0"}
    async with open_source(config(name, transports=(name, "inline"), **broken)) as source:
        ready = [each.name for each in source.endpoint.transports.values() if each.ready]
        assert ready == ["inline"]
    with pytest.raises(ConfigurationError, match=name):
        async with open_source(config(name, **broken)):
            pass


@pytest.mark.parametrize("name", AGENTS)
async def test_a_damaged_descriptor_never_reaches_the_library(name: str) -> None:
    async with open_source(config(name)) as source, open_reader(config(name)) as reader:
        transport = reader.endpoint.transports[name]
        descriptor = source.endpoint.transports[name].descriptor()
        assert descriptor is not None
        metadata = bytearray(descriptor.agent_metadata)
        metadata[len(metadata) // 2] ^= 1
        descriptor.agent_metadata = bytes(metadata)
        with pytest.raises(TransportError, match="damaged"):
            await reader.endpoint.thread.call(lambda: transport.connect(descriptor))


def num_wake_ups(native_id: int | None) -> int:
    status = Path(f"/proc/self/task/{native_id}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


async def test_an_idle_transfer_thread_sleeps(
    source: Source, reader: Reader, transport: str
) -> None:
    """But for a ping a second of its agent's process, and their answers."""
    await reader.connect(source)
    await until_idle(source)
    threads = [source.endpoint.thread.native_id, reader.endpoint.thread.native_id]
    await asyncio.sleep(0.1)
    before = [num_wake_ups(thread) for thread in threads]
    await asyncio.sleep(1)
    for thread, num_before in zip(threads, before, strict=True):
        assert num_wake_ups(thread) - num_before <= (0 if transport == "inline" else 6)


@ABOVE_TRANSPORTS
async def test_heartbeats_keep_a_waiting_pull_alive(source: Source, reader: Reader) -> None:
    await reader.connect(source)
    ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
    async with asyncio.TaskGroup() as tasks:
        pull = tasks.create_task(
            reader.pairs.open_pull(reader.request(source, ticket, NUM_TOKENS, LOCAL)).run()
        )
        await asyncio.sleep(3 * TIMERS.lost_peer_s)
        assert not pull.done()
        source.leases.announce("lease", NUM_TOKENS)
        await pull


async def test_a_reader_that_names_hosts_of_transports_is_refused() -> None:
    async with open_source(config("inline")) as source, open_channel(source.address) as channel:
        stub: kv_source_pb2_grpc.KVSourceAsyncStub = kv_source_pb2_grpc.KVSourceStub(channel)
        request = kv_source_pb2.ConnectRequest(
            layout=source.endpoint.layout, transports=["inline", *["x" * 1000] * 16]
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Connect(request)
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequestError)
        assert error.field == "transports"
        assert "xxx" not in error.message
        del request.transports[16:]
        assert (await stub.Connect(request)).transport == "inline"
