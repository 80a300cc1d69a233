"""Workers whose ranks have a pool each hand blocks over to each other, whatever their numbers."""

import os
import signal
from contextlib import AbstractAsyncContextManager

import pytest

from diptych.v1 import common_pb2, decode_pb2, worker_pb2
from kvtransfer.config import TransferConfig
from kvtransfer.memory import HostMemory
from kvtransfer.rank_pools import RankPools
from tests.integration.transfer_rig import (
    BLOCKS,
    LOCAL,
    NUM_TOKENS,
    PATIENT,
    Reader,
    Source,
    agents,
    config,
    failure_of,
    layout,
    open_reader,
    open_source,
    until_digested,
)
from tests.rank_pools import pools_of
from tests.waiting import until

BLOCK_BYTES, NUM_BLOCKS, NUM_HEADS = 8192, 64, 4
STRETCH = BLOCK_BYTES // 4  # two layers, keys and values
PAIRS = [(1, 2), (2, 1), (2, 2), (4, 2), (1, 4)]


def layout_of(num_ranks: int, digest_level: str = "full") -> common_pb2.KVLayout:
    """One layer of all tokens, and one with a window that sees two blocks before a token's."""
    told = layout(BLOCK_BYTES, digest_level)
    told.num_kv_heads, told.tensor_parallel_size = NUM_HEADS, num_ranks
    for window in (0, 18):
        told.groups.add(window=window, block_bytes=BLOCK_BYTES // 2, num_kv_heads=NUM_HEADS)
    return told


def memory_of(num_ranks: int) -> HostMemory | RankPools:
    return pools_of(num_ranks, NUM_BLOCKS, BLOCK_BYTES, STRETCH)


def source_of(
    num_ranks: int, transfer: TransferConfig, level: str = "full"
) -> AbstractAsyncContextManager[Source]:
    told, memory = layout_of(num_ranks, level), memory_of(num_ranks)
    return open_source(transfer, block_bytes=BLOCK_BYTES, kv_layout=told, memory=memory)


def reader_of(
    num_ranks: int, transfer: TransferConfig, level: str = "full"
) -> AbstractAsyncContextManager[Reader]:
    told, memory = layout_of(num_ranks, level), memory_of(num_ranks)
    return open_reader(
        transfer, block_bytes=BLOCK_BYTES, kv_layout=told, memory=memory, timers=PATIENT
    )


async def check_pull(source: Source, reader: Reader, lease: str = "lease") -> None:
    """What is needed of each block lands, and nothing else."""
    content = source.fill(BLOCKS)
    reader.memory.write(LOCAL, 0, b"\x77" * len(content))
    ticket = source.lease(lease, BLOCKS, NUM_TOKENS, "reader")
    for upto in (16, NUM_TOKENS):
        source.leases.announce(lease, upto)
    result = await reader.pairs.open_pull(reader.request(source, ticket, NUM_TOKENS, LOCAL)).run()
    source.leases.close(lease)
    sizes = [BLOCK_BYTES // 2] * 2 + [BLOCK_BYTES] * 3
    assert result.stats.num_bytes == sum(sizes)
    for index, num_bytes in enumerate(sizes):
        want = content[index * BLOCK_BYTES :][:num_bytes].ljust(BLOCK_BYTES, b"\x77")
        assert reader.content([LOCAL[index]]) == want


@pytest.mark.parametrize("ranks", PAIRS, ids=str)
async def test_any_numbers_of_ranks_are_a_pair(transport: str, ranks: tuple[int, int]) -> None:
    if transport == "ucxx" and ranks[0] != ranks[1]:
        pytest.skip("ucxx reads whole blocks: see below")
    transfer = config(transport, inline_message_bytes=5000, max_read_bytes=2 * BLOCK_BYTES)
    async with source_of(ranks[0], transfer) as source, reader_of(ranks[1], transfer) as reader:
        assert (await reader.connect(source)).transport == transport
        await check_pull(source, reader)


@pytest.mark.parametrize("digest_level", ["sampled", "off"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=str)
async def test_at_other_levels_of_digests(digest_level: str, ranks: tuple[int, int]) -> None:
    transfer = config("nixl", digest_level=digest_level)
    async with (
        source_of(ranks[0], transfer, digest_level) as source,
        reader_of(ranks[1], transfer, digest_level) as reader,
    ):
        await reader.connect(source)
        await check_pull(source, reader)


async def test_agents_inside_the_worker_read_parts_as_well() -> None:
    transfer = config("nixl", nixl_process="inside")
    async with source_of(2, transfer) as source, reader_of(1, transfer) as reader:
        await reader.connect(source)
        await check_pull(source, reader)


@pytest.mark.parametrize("rank", [0, 1])
async def test_what_one_rank_has_wrong_is_unproven(transport: str, rank: int) -> None:
    transfer = config(transport)
    async with source_of(2, transfer) as source, reader_of(2, transfer) as reader:
        await reader.connect(source)
        source.fill(BLOCKS)
        ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
        source.leases.announce("lease", NUM_TOKENS)
        await until_digested(source)
        assert isinstance(source.memory, RankPools)
        part = source.memory.parts[rank]
        assert isinstance(part, HostMemory)
        part.block(BLOCKS[-1])[-1] ^= 1
        error = await failure_of(reader, source, ticket)
        assert error.failure == decode_pb2.PULL_FAILURE_UNPROVEN


@pytest.mark.parametrize("side", ["reader", "source"])
async def test_a_rank_whose_agent_dies_costs_no_lease(side: str) -> None:
    transfer = config("nixl")
    async with source_of(2, transfer) as source, reader_of(2, transfer) as reader:
        await reader.connect(source)
        endpoint = reader.endpoint if side == "reader" else source.endpoint
        transport = endpoint.transports["nixl"]
        (_, last) = agents(transport)
        before = last.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await until(lambda: not transport.ready or last.pid != before)
        await check_pull(source, reader)
        assert last.pid not in (None, before)
        assert not reader.quarantined


@pytest.mark.parametrize(("ours", "theirs"), [(2, 3), (8, 2)])
async def test_heads_that_do_not_divide_are_refused_before_anything_moves(
    ours: int, theirs: int
) -> None:
    """Whoever told of such ranks: no worker has them."""
    transfer = config("inline")
    wrong = max(ours, theirs)
    async with (
        open_source(transfer, block_bytes=BLOCK_BYTES, kv_layout=layout_of(theirs)) as source,
        open_reader(transfer, block_bytes=BLOCK_BYTES, kv_layout=layout_of(ours)) as reader,
    ):
        reader.pairs.set_peers("router", [source.key])
        pair = await reader.wait_for(source.key, worker_pb2.PAIR_STATE_FAILED)
        assert (
            f"tensor_parallel_size: the reader has {ours}, the source has {theirs}: {wrong} cannot "
            "share 4 key-value heads evenly"
        ) in pair.message
        assert not source.scratch.num_lent
