"""A source's blocks on their way through staging blocks: copied out, lent, taken."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from diptych.errors import InvalidRequestError
from diptych.v1 import kv_source_pb2
from kvtransfer.transports.staging import Stage
from kvtransfer.transports.thread import TransferThread, deliver

Slots = tuple[int, ...]


class SlotQueue:
    """Lends a source's staging blocks to fetches, as they ask for them. Event loop only."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._turn = asyncio.Lock()  # first come, first served
        self._freed = asyncio.Event()

    async def take(self, most: int) -> Slots:
        """Wait for one at least; ``give_back`` has to follow."""
        async with self._turn:
            while not (slots := self.stage.slots.take(most)):
                self._freed.clear()
                await self._freed.wait()
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        """The device is not at them, and whoever reads them wants none of it."""
        self.stage.slots.give_back(slots)
        self._freed.set()


class StagedBlocks:
    """What one fetch has of them. Event loop, apart from ``_begin``.

    ``close`` at its end: what is lent is free then, and what the device still writes is when
    it has. Its reader's reads under way get whatever is there, and nobody believes it.
    """

    def __init__(self, queue: SlotQueue, thread: TransferThread) -> None:
        self._queue = queue
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._lent: set[int] = set()
        self._num_copying = 0
        self._taken = asyncio.Event()
        self._closed = False

    async def send(
        self,
        block_ids: tuple[int, ...],
        num_bytes: int,
        offset: int,
        write: Callable[[kv_source_pb2.Staged], Coroutine[Any, Any, None]],
    ) -> None:
        """Copy the first bytes of each out and tell, a part at a time, as the reader takes them.

        offset: of the first of them in the pull. Raises what the device does.
        """
        while block_ids:
            slots = await self._next_slots(len(block_ids))
            await self._copied(block_ids[: len(slots)], slots, num_bytes)
            await write(kv_source_pb2.Staged(offset=offset, slots=slots))
            block_ids = block_ids[len(slots) :]
            offset += len(slots) * num_bytes

    def taken(self, slots: Sequence[int]) -> None:
        """The reader needs these no more. Raises InvalidRequestError: it has not got them."""
        if len(set(slots)) != len(slots) or not self._lent.issuperset(slots):
            raise InvalidRequestError("are not lent", field="taken.slots")
        self._lent.difference_update(slots)
        self._queue.give_back(slots)
        self._taken.set()

    def close(self) -> None:
        """The fetch is over. Idempotent."""
        self._closed = True
        lent, self._lent = self._lent, set()
        self._queue.give_back(sorted(lent))

    async def _next_slots(self, most: int) -> Slots:
        share = self._queue.stage.slots.most_of_a_peer
        while not (room := share - len(self._lent) - self._num_copying):
            self._taken.clear()
            await self._taken.wait()
        return await self._queue.take(min(most, room))

    async def _copied(self, block_ids: tuple[int, ...], slots: Slots, num_bytes: int) -> None:
        """Wait until they are there. Cancelled, it goes on to its end."""
        copied: asyncio.Future[None] = self._loop.create_future()
        self._num_copying += len(slots)

        def ended(error: Exception | None) -> None:
            self._num_copying -= len(slots)
            if self._closed:
                self._queue.give_back(slots)
                return
            self._lent.update(slots)
            if not copied.done():
                copied.set_exception(error) if error is not None else copied.set_result(None)

        self._thread.post(lambda: self._begin(block_ids, slots, num_bytes, ended))
        await copied

    def _begin(
        self,
        block_ids: tuple[int, ...],
        slots: Slots,
        num_bytes: int,
        ended: Callable[[Exception | None], None],
    ) -> None:
        """Transfer thread: begin the copy and follow it to its end."""
        stage = self._queue.stage
        is_over: Callable[[], bool] | None = None

        def poll() -> bool:
            nonlocal is_over
            error = None
            try:
                if is_over is None:
                    is_over = stage.pool.copy_out(block_ids, stage.memory, slots, num_bytes)
                if not is_over():
                    return False
            except Exception as raised:  # noqa: BLE001 - it travels to the fetch
                error = raised
            deliver(self._loop, ended, error)
            return True

        if not poll():
            self._thread.poll(poll)
