"""Probes of many readers take their turns; none is refused, and none passes another."""

import asyncio

import pytest

from diptych.errors import BlocksExhaustedError
from diptych.worker.scratch import PoolScratch
from kvtransfer.source import probe_blocks
from kvtransfer.source.probe_blocks import ProbeBlocks

NUM_BLOCKS = 16


async def test_a_hundred_readers_are_served_in_the_order_of_their_coming() -> None:
    scratch = PoolScratch(range(NUM_BLOCKS))
    blocks = ProbeBlocks(scratch)
    served: list[int] = []
    most_lent = 0

    async def probe(reader: int) -> None:
        nonlocal most_lent
        block_ids = await blocks.take(4)
        served.append(reader)
        most_lent = max(most_lent, scratch.num_lent)
        for _ in range(3):
            await asyncio.sleep(0)
        blocks.give_back(block_ids)

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for reader in range(100):
            tasks.create_task(probe(reader))
    assert served == list(range(100))
    assert most_lent == NUM_BLOCKS
    assert scratch.num_lent == 0


async def test_one_that_leaves_while_it_waits_takes_nothing() -> None:
    scratch = PoolScratch(range(NUM_BLOCKS))
    blocks = ProbeBlocks(scratch)
    first = await blocks.take(12)
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(blocks.take(8)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[1].cancel()
        await asyncio.sleep(0)
        assert scratch.num_lent == 12
        blocks.give_back(first)
    assert scratch.num_lent == 8
    assert len(waiting[2].result()) == 8


async def test_more_than_there_are_or_too_many_waiting_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = ProbeBlocks(PoolScratch(range(NUM_BLOCKS)))
    with pytest.raises(BlocksExhaustedError):
        await blocks.take(NUM_BLOCKS + 1)
    monkeypatch.setattr(probe_blocks, "MAX_WAITING", 1)
    first = await blocks.take(NUM_BLOCKS)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(blocks.take(1))
        await asyncio.sleep(0)
        with pytest.raises(BlocksExhaustedError, match="wait"):
            await blocks.take(1)
        blocks.give_back(first)
