"""Pools of blocks that the host cannot reach are proven and pulled all the same, over inline."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from diptych.v1 import decode_pb2
from tests.device_memory import DeviceMemory
from tests.integration.transfer_rig import (
    BLOCK_SIZE,
    BLOCKS,
    LOCAL,
    NUM_TOKENS,
    Reader,
    Source,
    config,
    failure_of,
    open_reader,
    open_source,
    until_digested,
)

ON_DEVICE = [(True, False), (False, True), (True, True)]  # source, reader


async def opened(
    stack: AsyncExitStack, digest_level: str, on_device: tuple[bool, bool]
) -> tuple[Source, Reader]:
    """A pair that is proven."""
    transfer = config("inline", digest_level=digest_level)
    memories = [DeviceMemory(bytearray(64 * 4096), 4096) if each else None for each in on_device]
    source = await stack.enter_async_context(open_source(transfer, memory=memories[0]))
    reader = await stack.enter_async_context(open_reader(transfer, memory=memories[1]))
    await reader.connect(source)
    return source, reader


@pytest.mark.parametrize("on_device", ON_DEVICE)
@pytest.mark.parametrize("digest_level", ["full", "sampled", "off"])
async def test_a_pull_moves_exactly_the_bytes(
    digest_level: str, on_device: tuple[bool, bool]
) -> None:
    async with AsyncExitStack() as stack:
        source, reader = await opened(stack, digest_level, on_device)
        content = source.fill(BLOCKS)
        ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
        async with asyncio.TaskGroup() as tasks:
            request = reader.request(source, ticket, NUM_TOKENS, LOCAL)
            tasks.create_task(reader.pairs.open_pull(request).run())
            source.leases.announce("lease", 2 * BLOCK_SIZE)
            source.leases.announce("lease", NUM_TOKENS)
        assert reader.content(LOCAL) == content


@pytest.mark.parametrize("digest_level", ["full", "sampled"])
async def test_bytes_that_changed_after_their_digest_are_unproven(digest_level: str) -> None:
    async with AsyncExitStack() as stack:
        source, reader = await opened(stack, digest_level, (True, True))
        source.fill(BLOCKS)
        ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
        source.leases.announce("lease", NUM_TOKENS)
        await until_digested(source)
        source.fill(BLOCKS[2:3])
        error = await failure_of(reader, source, ticket)
        assert error.failure == decode_pb2.PULL_FAILURE_UNPROVEN
