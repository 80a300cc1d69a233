"""The reads of one pull: handed to the transfer thread, followed to their end."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvtransfer.digest import Coverage
from kvtransfer.errors import TransportError
from kvtransfer.memory import BlockMemory
from kvtransfer.reader.quarantine import PullReads, Quarantine, ReadRecord
from kvtransfer.transports.base import Copy, PartedCopy
from kvtransfer.transports.thread import TransferThread, deliver

MAX_POSTED = 8  # copies of one pull: enough that an agent does not wait for us between them


class Landed(NamedTuple):
    """A copy ended well; blocks ``first_block`` and following of the pull are whole."""

    first_block: int
    num_blocks: int  # 0: the first block lacks bytes still
    digests: tuple[bytes, ...]  # of those blocks, where asked for
    started_s: float  # time.monotonic
    ended_s: float
    digest_s: float


class ReadGroup:
    """Starts copies for one pull and knows which have not ended.

    A few of them are posted at a time, and the next as one ends: an agent does what it is given in
    order, so a long pull would keep all others from it, and a posted read cannot be recalled.
    Event loop, apart from what runs on the transfer thread. ``on_end`` gets the outcome
    of each copy, until the group is abandoned.
    """

    def __init__(
        self,
        thread: TransferThread,
        memory: BlockMemory,
        quarantine: Quarantine,
        transport: str,
        on_end: Callable[[Landed | TransportError], None],
    ) -> None:
        self._thread = thread
        self._memory = memory
        self._on_end = on_end
        self._open = PullReads(quarantine, transport)
        self._loop = asyncio.get_running_loop()
        # thread only
        self._queued: deque[_Read] = deque()
        self._num_posted = 0  # that have not ended

    def start(
        self,
        copy: Copy,
        local_block_ids: tuple[int, ...],
        *,
        first_block: int,
        num_completed: int,
        to_digest: tuple[Coverage, ...],
    ) -> None:
        """Post ``copy`` in its turn; it writes ``local_block_ids`` and completes the first of them.

        ``to_digest``: one for each completed block, or none.
        """
        record = self._open.begin(frozenset(local_block_ids))
        block_ids = local_block_ids[: len(to_digest)]
        read = _Read(record, copy, first_block, num_completed, block_ids, to_digest)
        self._thread.post(partial(self._queue, read))

    def abandon(self) -> frozenset[int]:
        """Post nothing more; quarantine what is unfinished. Idempotent."""
        block_ids = self._open.abandon(time.monotonic())
        if block_ids:
            self._thread.post(self._post_queued)  # none of them: that is their end
        return block_ids

    # On the transfer thread.

    def _queue(self, read: "_Read") -> None:
        self._queued.append(read)
        self._post_queued()

    def _post_queued(self) -> None:
        """As many as may be under way; those of a pull that is over end without."""
        while self._queued and (self._open.abandoned or self._num_posted < MAX_POSTED):
            read = self._queued.popleft()
            if self._open.abandoned:
                self._report(read, TransportError("never posted"))
                continue
            self._num_posted += 1
            read.started_s = time.monotonic()
            if not self._advance(read, read.copy.post):
                self._thread.poll(partial(self._poll, read), wakes=read.copy.wakes)

    def _poll(self, read: "_Read") -> bool:
        if self._open.abandoned and isinstance(read.copy, PartedCopy):
            read.copy.stop()
        has_ended = self._advance(read, read.copy.poll)
        if has_ended:
            self._post_queued()
        return has_ended

    def _advance(self, read: "_Read", step: Callable[[], bool]) -> bool:
        """One step of a copy; True once it has ended and was reported."""
        try:
            if not step():
                return False
            self._report(read, self._land(read))
        except TransportError as error:
            self._report(read, error)
        except Exception as error:  # noqa: BLE001 - a bug, or a lost device, strands no block
            self._report(read, TransportError(f"{type(error).__name__}: {error}"))
        self._num_posted -= 1
        return True

    def _land(self, read: "_Read") -> Landed:
        ended_s = time.monotonic()
        digests: tuple[bytes, ...] = ()
        if not self._open.abandoned:
            digests = self._memory.digests(read.block_ids, read.coverages)
        return Landed(
            first_block=read.first_block,
            num_blocks=read.num_completed,
            digests=digests,
            started_s=read.started_s,
            ended_s=ended_s,
            digest_s=time.monotonic() - ended_s,
        )

    def _report(self, read: "_Read", outcome: Landed | TransportError) -> None:
        deliver(self._loop, self._ended, read.record, outcome)

    # On the event loop.

    def _ended(self, record: ReadRecord, outcome: Landed | TransportError) -> None:
        if self._open.ended(record):
            self._on_end(outcome)


class _Read:
    """One copy on its way; transfer thread only once posted."""

    def __init__(
        self,
        record: ReadRecord,
        copy: Copy,
        first_block: int,
        num_completed: int,
        block_ids: tuple[int, ...],
        coverages: tuple[Coverage, ...],
    ) -> None:
        self.record = record
        self.copy = copy
        self.first_block = first_block
        self.num_completed = num_completed
        self.block_ids = block_ids  # to take the digests of
        self.coverages = coverages
        self.started_s = 0.0
