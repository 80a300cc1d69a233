"""What a hand-off takes between workers of 1 and 2 ranks, relative to that between two of 1.

    .venv/bin/python -m tests.bench.ranks --out ranks.json    # about a minute

Pulls of announced blocks over nixl with digests at level full, source and reader in one process,
their agents in others, or with ``--inside`` in the same; all pairs take turns. Reported: the
median of each pair's pulls, from Open until proven, and its ratio to the one of 1 and 1.
"""

import argparse
import asyncio
import json
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

from diptych.v1 import common_pb2
from kvtransfer.config import TransferConfig
from tests.bench.environment import environment
from tests.integration.transfer_rig import (
    BLOCK_SIZE,
    Reader,
    Source,
    config,
    layout,
    open_reader,
    open_source,
)
from tests.rank_pools import pools_of

PAIRS = ((1, 1), (2, 2), (2, 1), (1, 2))  # ranks of the source, of the reader


class Shape(NamedTuple):
    """Of the blocks that one pull moves."""

    num_layers: int
    head_bytes: int  # keys of one head in one block
    num_blocks: int
    num_heads: int = 4

    @property
    def stretch_bytes(self) -> int:
        return self.num_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.stretch_bytes


SHAPES = {
    "tiny": Shape(num_layers=4, head_bytes=16 * 16 * 4, num_blocks=8),
    "small": Shape(num_layers=28, head_bytes=16 * 64 * 4, num_blocks=32),
}


def layout_of(shape: Shape, num_ranks: int) -> common_pb2.KVLayout:
    told = layout(shape.block_bytes)
    told.num_layers, told.num_kv_heads = shape.num_layers, shape.num_heads
    told.tensor_parallel_size = num_ranks
    return told


async def opened(
    stack: AsyncExitStack, shape: Shape, pair: tuple[int, int], transfer: TransferConfig
) -> "Hand":
    """Source and reader, proven."""
    num_blocks = 2 * shape.num_blocks + 16
    memories = [
        pools_of(num_ranks, num_blocks, shape.block_bytes, shape.stretch_bytes)
        for num_ranks in pair
    ]
    layouts = [layout_of(shape, num_ranks) for num_ranks in pair]
    source = await stack.enter_async_context(
        open_source(
            transfer,
            num_blocks=num_blocks,
            block_bytes=shape.block_bytes,
            kv_layout=layouts[0],
            memory=memories[0],
        )
    )
    reader = await stack.enter_async_context(
        open_reader(
            transfer,
            num_blocks=num_blocks,
            block_bytes=shape.block_bytes,
            kv_layout=layouts[1],
            memory=memories[1],
        )
    )
    await reader.connect(source)
    source.fill(range(shape.num_blocks))
    return Hand(source, reader, [])


class Hand(NamedTuple):
    """One pair, and what its pulls took, s."""

    source: Source
    reader: Reader
    pulls_s: list[float]

    async def over(self, shape: Shape, number: int) -> None:
        blocks, num_tokens = range(shape.num_blocks), shape.num_blocks * BLOCK_SIZE
        lease = f"lease {number}"
        ticket = self.source.lease(lease, blocks, num_tokens, "reader")
        self.source.leases.announce(lease, num_tokens)
        places = range(shape.num_blocks, 2 * shape.num_blocks)
        request = self.reader.request(self.source, ticket, num_tokens, places)
        begun_s = time.perf_counter()
        await self.reader.pairs.open_pull(request).run()
        self.pulls_s.append(time.perf_counter() - begun_s)
        self.source.leases.close(lease)


async def measured(
    shape: Shape, num_pulls: int, transfer: TransferConfig
) -> dict[str, dict[str, float]]:
    async with AsyncExitStack() as stack:
        hands = {pair: await opened(stack, shape, pair, transfer) for pair in PAIRS}
        for number in range(num_pulls):
            for hand in hands.values():
                await hand.over(shape, number)
    taken = {pair: median(hand.pulls_s[num_pulls // 10 :]) for pair, hand in hands.items()}
    return {
        f"{source} to {reader}": {
            "ms": round(1e3 * taken_s, 3),
            "ratio": round(taken_s / taken[1, 1], 2),
            "gb_per_s": round(shape.num_blocks * shape.block_bytes / taken_s / 1e9, 2),
        }
        for (source, reader), taken_s in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pulls", type=int, default=100, help="of each pair")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", action="store_true", help="the agents are in this process")
    arguments = parser.parse_args()
    transfer = config("nixl", nixl_process="inside" if arguments.inside else "child")
    found = {
        name: asyncio.run(measured(shape, arguments.pulls, transfer))
        for name, shape in SHAPES.items()
    }
    report = json.dumps({"environment": environment(), "handed_over": found}, indent=1)
    if arguments.out:
        arguments.out.write_text(report)
    print(report)  # noqa: T201


if __name__ == "__main__":
    main()
