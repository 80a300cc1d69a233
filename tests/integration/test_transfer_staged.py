"""Pools on a device are reached through bounded host memory beside them, by nixl between that.

The stand-in device has no view of the host and an address that faults; its copies end late. The
agents, their processes and their reads are real.
"""

import asyncio
import logging
import os
import signal
from contextlib import AsyncExitStack
from typing import Any

import pytest

from diptych.v1 import decode_pb2, worker_pb2
from kvtransfer.transports.staged import StagedTransport
from tests.device_memory import DeviceMemory
from tests.integration.transfer_rig import (
    BLOCK_SIZE,
    BLOCKS,
    LOCAL,
    NUM_TOKENS,
    PATIENT,
    Reader,
    Source,
    agents,
    config,
    failure_of,
    open_reader,
    open_source,
    until_digested,
    until_idle,
)
from tests.waiting import until

pytest.importorskip("nixl_cu13")

BLOCK_BYTES = 4096
NUM_SLOTS = 4  # fewer than the blocks of a pull
SETTINGS = {"staging_bytes": NUM_SLOTS * BLOCK_BYTES, "probe_blocks": 2}
ON_DEVICE = [(True, False), (False, True), (True, True)]  # source, reader
SIDES = {(True, False): "source", (False, True): "reader", (True, True): "source and reader"}


def device() -> DeviceMemory:
    return DeviceMemory(bytearray(64 * BLOCK_BYTES), BLOCK_BYTES)


async def opened(
    stack: AsyncExitStack, on_device: tuple[bool, bool], *names: str, **settings: Any
) -> tuple[Source, Reader]:
    """A pair, not yet connected; ``names`` of transports."""
    wanted = {**SETTINGS, **settings, "transports": names or ("staged",)}
    transfer = config("staged", **wanted)
    memories = [device() if each else None for each in on_device]
    source = await stack.enter_async_context(open_source(transfer, memory=memories[0]))
    reader = await stack.enter_async_context(
        open_reader(transfer, memory=memories[1], timers=PATIENT)
    )
    return source, reader


def stages(*ends: Source | Reader) -> list[StagedTransport]:
    """Of those on a device."""
    found = [end.endpoint.transports["staged"] for end in ends]
    return [each for each in found if isinstance(each, StagedTransport) and each.stage is not None]


def num_lent(*ends: Source | Reader) -> int:
    return sum(each.stage.slots.num_lent for each in stages(*ends) if each.stage is not None)


def on(end: Source | Reader) -> DeviceMemory:
    assert isinstance(end.memory, DeviceMemory)
    return end.memory


async def pull(source: Source, reader: Reader) -> bytes:
    """All of it; what has to have come."""
    content = source.fill(BLOCKS)
    ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
    async with asyncio.TaskGroup() as tasks:
        request = reader.request(source, ticket, NUM_TOKENS, LOCAL)
        pulling = tasks.create_task(reader.pairs.open_pull(request).run())
        source.leases.announce("lease", 2 * BLOCK_SIZE)
        source.leases.announce("lease", NUM_TOKENS)
    source.leases.close("lease")
    stats = pulling.result().stats
    assert (stats.transport, stats.num_bytes) == ("staged", len(content))
    return content


@pytest.mark.parametrize("on_device", ON_DEVICE)
@pytest.mark.parametrize("digest_level", ["full", "off"])
async def test_a_pull_moves_exactly_the_bytes_through_few_staging_blocks(
    on_device: tuple[bool, bool], digest_level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvtransfer")
    async with AsyncExitStack() as stack:
        source, reader = await opened(stack, on_device, digest_level=digest_level)
        pair = await reader.connect(source)
        assert (pair.transport, pair.message) == ("staged", "")
        assert pair.way.endswith(f", staged at the {SIDES[on_device]}")
        assert pair.bytes_per_s > 0
        (said,) = [each for each in caplog.records if each.message == "pair proven"]
        assert said.__dict__["way"] == pair.way
        assert said.__dict__["gb_per_s"] == round(pair.bytes_per_s / 1e9, 3)
        for _ in range(3):
            content = await pull(source, reader)
            assert reader.content(LOCAL) == content
        await until_idle(source)
        await until(lambda: not num_lent(source, reader))
        for memory in (source.memory, reader.memory):
            if isinstance(memory, DeviceMemory):
                assert memory.num_copied >= 3 * len(BLOCKS)
                assert 0 < memory.most_copying <= NUM_SLOTS


async def test_beside_a_device_the_agent_is_in_a_process_of_its_own() -> None:
    async with AsyncExitStack() as stack:
        source, reader = await opened(stack, (True, True))
        for transport in stages(source, reader):
            assert len(agents(transport._carrier)) == 1
            descriptor = transport.descriptor()
            assert descriptor is not None
            assert (descriptor.memory_kind, descriptor.num_blocks) == ("DRAM", NUM_SLOTS)


async def test_in_host_memory_it_is_the_agent_that_is_there_anyway() -> None:
    async with AsyncExitStack() as stack:
        source, reader = await opened(stack, (False, False), "nixl", "staged", "inline")
        for end in (source, reader):
            staged = end.endpoint.transports["staged"]
            assert isinstance(staged, StagedTransport)
            assert staged._carrier is end.endpoint.transports["nixl"]
        pair = await reader.connect(source)
        assert (pair.transport, pair.message) == ("nixl", "")
        assert pair.way == "DRAM at the source, DRAM at the reader, direct"


async def test_a_direct_way_that_does_not_exist_is_told_and_never_tried() -> None:
    async with AsyncExitStack() as stack:
        source, reader = await opened(stack, (False, True), "nixl", "staged", "inline")
        pair = await reader.connect(source)
        assert pair.transport == "staged"
        assert "nixl: DRAM at the source, VRAM of device 0 at the reader: neither" in pair.message
        assert not reader.pairs.counters.num_transport_fallbacks
        assert reader.endpoint.transports["nixl"].problem  # it says: this UCX knows no device


async def test_nixl_that_cannot_use_device_memory_says_so_and_is_passed_over() -> None:
    async with AsyncExitStack() as stack:
        source, reader = await opened(stack, (True, True), "nixl", "staged")
        pair = await reader.connect(source)
        assert pair.transport == "staged"
        assert await pull(source, reader) == reader.content(LOCAL)


async def test_where_there_is_no_way_both_memories_are_named() -> None:
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(
            open_source(config("nixl", transports=("nixl", "inline")), memory=device())
        )
        reader = await stack.enter_async_context(open_reader(config("nixl")))
        reader.pairs.set_peers("router", [source.key])
        pair = await reader.wait_for(source.key, worker_pb2.PAIR_STATE_FAILED)
        assert "VRAM of device 0 at the source, DRAM at the reader" in pair.message
        assert not pair.way


@pytest.mark.parametrize("on_device", ON_DEVICE)
async def test_a_pull_that_is_cancelled_in_mid_copy_leaves_no_staging_block(
    on_device: tuple[bool, bool],
) -> None:
    async with AsyncExitStack() as stack:
        source, reader = await opened(stack, on_device)
        await reader.connect(source)
        held = on(source if on_device[0] else reader)
        held.is_held = True
        source.fill(BLOCKS)
        ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
        source.leases.announce("lease", NUM_TOKENS)
        request = reader.request(source, ticket, NUM_TOKENS, LOCAL)
        async with asyncio.TaskGroup() as tasks:
            pulling = tasks.create_task(reader.pairs.open_pull(request).run())
            await until(lambda: held.num_copying > 0)
            pulling.cancel()
        await until_idle(source)
        assert num_lent(source, reader) == held.num_copying > 0  # the device is still at them
        held.is_held = False
        await until(lambda: not num_lent(source, reader))
        await until(lambda: not reader.quarantined)
        source.leases.close("lease")
        assert await pull(source, reader) == reader.content(LOCAL)


@pytest.mark.parametrize("killed", ["source", "reader"])
async def test_an_agent_killed_in_mid_copy_leaves_no_staging_block(killed: str) -> None:
    async with AsyncExitStack() as stack:
        source, reader = await opened(stack, (True, True))
        await reader.connect(source)
        held = on(source if killed == "source" else reader)
        held.is_held = True
        content = source.fill(BLOCKS)
        ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
        source.leases.announce("lease", NUM_TOKENS)
        request = reader.request(source, ticket, NUM_TOKENS, LOCAL)
        (transport,) = stages(source if killed == "source" else reader)
        (carrier,) = agents(transport._carrier)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reader.pairs.open_pull(request).run())
            await until(lambda: held.num_copying > 0)
            pid = carrier.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: carrier.pid not in (None, pid))
            held.is_held = False
        # It began anew under its ticket.
        assert reader.content(LOCAL) == content
        await until_idle(source)
        await until(lambda: not num_lent(source, reader))


async def test_a_bit_that_a_copy_to_the_device_spoils_is_found() -> None:
    async with AsyncExitStack() as stack:
        source, reader = await opened(stack, (True, True))
        await reader.connect(source)
        on(reader).flips = {LOCAL[2]}
        source.fill(BLOCKS)
        ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
        source.leases.announce("lease", NUM_TOKENS)
        error = await failure_of(reader, source, ticket)
        assert error.failure == decode_pb2.PULL_FAILURE_UNPROVEN
        await until_idle(source)
        await until(lambda: not num_lent(source, reader))


async def test_bytes_that_changed_after_their_digest_are_unproven() -> None:
    async with AsyncExitStack() as stack:
        source, reader = await opened(stack, (True, False))
        await reader.connect(source)
        source.fill(BLOCKS)
        ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
        source.leases.announce("lease", NUM_TOKENS)
        await until_digested(source)
        source.fill(BLOCKS[2:3])
        error = await failure_of(reader, source, ticket)
        assert error.failure == decode_pb2.PULL_FAILURE_UNPROVEN


async def test_many_pulls_at_once_share_what_is_there() -> None:
    async with AsyncExitStack() as stack:
        source, reader = await opened(stack, (True, True))
        await reader.connect(source)
        contents, requests = [], []
        for number in range(6):
            block_ids = range(8 * number, 8 * number + 5)
            contents.append(source.fill(block_ids))
            lease = f"lease {number}"
            ticket = source.lease(lease, block_ids, NUM_TOKENS, "reader")
            source.leases.announce(lease, NUM_TOKENS)
            requests.append(reader.request(source, ticket, NUM_TOKENS, block_ids))
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                tasks.create_task(reader.pairs.open_pull(request).run())
        for content, request in zip(contents, requests, strict=True):
            assert reader.content(request.local_block_ids) == content
        assert max(on(source).most_copying, on(reader).most_copying) <= NUM_SLOTS
        await until_idle(source)
        await until(lambda: not num_lent(source, reader))
