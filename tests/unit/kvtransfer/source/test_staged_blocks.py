"""What a source lends of its staging blocks: bounded, as it was asked, and never twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from diptych.errors import InvalidRequestError
from diptych.v1 import kv_source_pb2
from kvtransfer.memory import HostMemory
from kvtransfer.source.staged_blocks import SlotQueue, StagedBlocks
from kvtransfer.transports.staging import Stage, StagingSlots
from kvtransfer.transports.thread import TransferThread
from tests.device_memory import DeviceMemory
from tests.waiting import until

SIZE, NUM_SLOTS = 16, 8


@asynccontextmanager
async def rig() -> AsyncIterator[tuple[SlotQueue, TransferThread, DeviceMemory]]:
    pool = DeviceMemory(bytearray(range(256)) * 2, SIZE)
    staging = HostMemory(bytearray(NUM_SLOTS * SIZE), SIZE)
    thread = TransferThread()
    thread.start()
    try:
        yield SlotQueue(Stage(pool, staging, StagingSlots(NUM_SLOTS))), thread, pool
    finally:
        thread.stop()


async def test_blocks_are_told_in_order_as_the_reader_takes_them() -> None:
    async with rig() as (queue, thread, pool):
        staged = StagedBlocks(queue, thread)
        told: list[kv_source_pb2.Staged] = []
        read = bytearray()

        async def write(message: kv_source_pb2.Staged) -> None:
            told.append(message)

        block_ids = tuple(range(20, 9, -1))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(staged.send(block_ids, 10, 7, write))
            for _ in range(6):
                await until(lambda: bool(told))
                message = told.pop(0)
                assert queue.stage.slots.num_lent <= queue.stage.slots.most_of_a_peer
                assert message.offset == 7 + len(read)
                for slot in message.slots:
                    read += queue.stage.memory.block(slot)[:10]
                staged.taken(message.slots)
        assert read == pool.read(block_ids, 0, 110, 10)
        assert queue.stage.slots.num_lent == 0


async def test_what_is_not_lent_cannot_be_given_back() -> None:
    async with rig() as (queue, thread, _):
        staged = StagedBlocks(queue, thread)
        told: list[kv_source_pb2.Staged] = []

        async def write(message: kv_source_pb2.Staged) -> None:
            told.append(message)

        await staged.send((1, 2), 16, 0, write)
        (slots,) = [tuple(message.slots) for message in told]
        for wrong in ((7,), (slots[0], slots[0]), (*slots, 7)):
            with pytest.raises(InvalidRequestError):
                staged.taken(wrong)
        staged.taken(slots)
        with pytest.raises(InvalidRequestError):
            staged.taken(slots)
        assert queue.stage.slots.num_lent == 0


async def test_a_fetch_that_ends_in_mid_copy_frees_its_slots_when_the_device_is_done() -> None:
    async with rig() as (queue, thread, pool):
        pool.is_held = True
        staged = StagedBlocks(queue, thread)

        async def write(_: kv_source_pb2.Staged) -> None:
            raise AssertionError("it has ended")

        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(staged.send((1, 2, 3), 16, 0, write))
            await until(lambda: pool.num_copying > 0)
            sending.cancel()
        staged.close()
        assert queue.stage.slots.num_lent == pool.num_copying == 2
        pool.is_held = False
        await until(lambda: not queue.stage.slots.num_lent)


async def test_one_fetch_leaves_the_others_some_and_its_end_frees_what_it_held() -> None:
    async with rig() as (queue, thread, _):
        greedy, modest = StagedBlocks(queue, thread), StagedBlocks(queue, thread)
        told: list[kv_source_pb2.Staged] = []

        async def write(message: kv_source_pb2.Staged) -> None:
            told.append(message)

        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(greedy.send(tuple(range(20)), 16, 0, write))
            await until(lambda: sum(len(message.slots) for message in told) == 4)
            await modest.send((1, 2), 16, 0, write)
            assert queue.stage.slots.num_lent == 6
            sending.cancel()
        greedy.close()
        greedy.close()
        assert queue.stage.slots.num_lent == 2
        modest.close()
        assert queue.stage.slots.num_lent == 0


async def test_a_device_that_fails_fails_the_fetch() -> None:
    async with rig() as (queue, thread, _):
        staged = StagedBlocks(queue, thread)

        async def write(_: kv_source_pb2.Staged) -> None: ...

        with pytest.raises(IndexError):
            await staged.send((10_000,), 16, 0, write)
        staged.close()
        assert queue.stage.slots.num_lent == 0
