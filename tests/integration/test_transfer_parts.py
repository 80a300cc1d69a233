"""Of blocks of layers with windows, a pull moves what is needed and no byte more."""

import pytest

from diptych.v1 import common_pb2
from tests.integration.transfer_rig import (
    BLOCK_SIZE,
    BLOCKS,
    LOCAL,
    NUM_TOKENS,
    config,
    layout,
    open_reader,
    open_source,
)

BLOCK_BYTES = 4096
UNTOUCHED = b"\x77"
# What of each block a sequence of NUM_TOKENS needs, 68 of them in five blocks: of a window of
# 17 tokens a token at the begin of the last block sees one block, of one of 18 two.
Groups = list[tuple[int | None, int]]  # window and bytes of each
LAYOUTS: dict[str, tuple[Groups, list[int]]] = {
    "full": ([(None, 4096)], [4096] * 5),
    "full and sliding": ([(None, 1000), (18, 3096)], [1000, 1000, 4096, 4096, 4096]),
    "two windows": ([(None, 1), (18, 95), (17, 4000)], [1, 1, 96, 4096, 4096]),
    "sliding alone": ([(17, 4096)], [0, 0, 0, 4096, 4096]),
}


def layout_of(groups: Groups, digest_level: str) -> common_pb2.KVLayout:
    told = layout(BLOCK_BYTES, digest_level)
    for window, num_bytes in groups:
        told.groups.add(window=window or 0, block_bytes=num_bytes)
    return told


@pytest.mark.parametrize("digest_level", ["full", "sampled", "off"])
@pytest.mark.parametrize("kind", LAYOUTS)
async def test_what_is_needed_lands_and_nothing_else(
    transport: str, kind: str, digest_level: str
) -> None:
    groups, sizes = LAYOUTS[kind]
    settings = {"digest_level": digest_level, "inline_message_bytes": 1 << 16}
    transfer, told = config(transport, **settings), layout_of(groups, digest_level)
    async with (
        open_source(transfer, kv_layout=told) as source,
        open_reader(transfer, kv_layout=told) as reader,
    ):
        await reader.connect(source)
        source.fill(BLOCKS)
        for first in (0, BLOCK_SIZE, 4 * BLOCK_SIZE):
            reader.memory.write(LOCAL, 0, UNTOUCHED * len(LOCAL) * BLOCK_BYTES)
            lease = f"lease {first}"
            ticket = source.lease(lease, BLOCKS, NUM_TOKENS, "reader")
            for upto in (BLOCK_SIZE, 3 * BLOCK_SIZE, NUM_TOKENS):
                source.leases.announce(lease, upto)
            pull = reader.pairs.open_pull(
                reader.request(source, ticket, NUM_TOKENS, LOCAL, first=first)
            )
            result = await pull.run()
            source.leases.close(lease)
            skipped = first // BLOCK_SIZE
            assert result.stats.num_bytes == sum(sizes[skipped:])
            for block_id, local_id, num_bytes in zip(
                BLOCKS[skipped:], LOCAL, sizes[skipped:], strict=False
            ):
                want = source.content([block_id])[:num_bytes]
                assert reader.content([local_id]) == want.ljust(BLOCK_BYTES, UNTOUCHED)


async def test_parts_of_blocks_by_an_agent_inside_the_worker() -> None:
    groups, sizes = LAYOUTS["two windows"]
    transfer, told = config("nixl", nixl_process="inside"), layout_of(groups, "full")
    async with (
        open_source(transfer, kv_layout=told) as source,
        open_reader(transfer, kv_layout=told) as reader,
    ):
        await reader.connect(source)
        source.fill(BLOCKS)
        ticket = source.lease("lease", BLOCKS, NUM_TOKENS, "reader")
        source.leases.announce("lease", NUM_TOKENS)
        result = await reader.pairs.open_pull(
            reader.request(source, ticket, NUM_TOKENS, LOCAL)
        ).run()
        assert result.stats.num_bytes == sum(sizes)
        for block_id, local_id, num_bytes in zip(BLOCKS, LOCAL, sizes, strict=True):
            want = source.content([block_id])[:num_bytes]
            assert reader.content([local_id]) == want.ljust(BLOCK_BYTES, b"\0")
