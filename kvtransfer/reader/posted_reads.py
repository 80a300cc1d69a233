"""The reads of one pull: handed to the transfer thread, followed to their end."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvtransfer.digest import Coverage
from kvtransfer.errors import TransportError
from kvtransfer.memory import BlockMemory
from kvtransfer.reader.quarantine import PullReads, Quarantine, ReadRecord
from kvtransfer.transports.base import Copy
from kvtransfer.transports.thread import TransferThread, deliver


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

    Event loop, apart from ``_run``, ``_poll`` and ``_land``. ``on_end`` gets the outcome
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

    def start(
        self,
        copy: Copy,
        local_block_ids: tuple[int, ...],
        *,
        first_block: int,
        num_completed: int,
        to_digest: tuple[Coverage, ...],
    ) -> None:
        """Post ``copy``, which writes ``local_block_ids`` and completes the first of them.

        ``to_digest``: one for each completed block, or none.
        """
        record = self._open.begin(frozenset(local_block_ids))
        block_ids = local_block_ids[: len(to_digest)]
        read = _Read(record, copy, first_block, num_completed, block_ids, to_digest)
        self._thread.post(partial(self._run, read))

    def abandon(self) -> frozenset[int]:
        """Post nothing more; quarantine what is unfinished. Idempotent."""
        return self._open.abandon(time.monotonic())

    def _run(self, read: "_Read") -> None:
        if self._open.abandoned:
            self._report(read, TransportError("never posted"))
            return
        read.started_s = time.monotonic()
        if not self._advance(read, read.copy.post):
            poll = partial(self._advance, read, read.copy.poll)
            self._thread.poll(poll, wakes=read.copy.wakes)

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
