"""One batch from where it stands to its end. What it has done is stored before it goes on."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

from tenacity import AsyncRetrying, before_sleep_log, stop_after_attempt, wait_exponential

from batch_server.records import Batch, Endpoint, Line, LineOwner
from batch_server.runner.answers import Answer, result_of, unanswered
from batch_server.runner.input_file import Chunks, InputBounds, InputFile
from batch_server.runner.line_check import LineMaker
from batch_server.status import ENDED, BatchEvent, BatchStatus
from batch_server.store.batches import BatchStore
from router.frontend.fair_places import FairPlaces

T = TypeVar("T")

logger = logging.getLogger(__name__)

_CHECKS_AT_ONCE: Final = 2  # each keeps the ids of its file's lines, and where each begins
_ANY_NUMBER: Final = 2**31  # how many batches are open is bounded where they are made
_LINES_AT_ONCE: Final = 64  # of those that wait, in memory: their ids, no more
_UNSENT_AT_ONCE: Final = 256
_STORE_ATTEMPTS: Final = 24  # ten minutes
_STORE_PAUSE_S: Final = 30
_LOOK_S: Final = 1.0  # at the wall clock, which may be set
_EXPIRED: Final = ("batch_expired", "it was not answered before the completion window ended")
_CANCELLED: Final = ("batch_cancelled", "it was not answered before the batch was cancelled")


class Sender(Protocol):
    """Whoever has lines answered."""

    async def answer(
        self,
        owner: LineOwner,
        endpoint: Endpoint,
        request_id: str,
        read_body: Callable[[], Awaitable[bytes]],
    ) -> Answer:
        """What becomes the line's result. Its body is read when it is sent, each time."""
        ...


def _places_to_check() -> FairPlaces:
    return FairPlaces(_CHECKS_AT_ONCE, _ANY_NUMBER, "files wait to be checked")


@dataclass(frozen=True, slots=True)
class Needs:
    """What all runs share."""

    batches: BatchStore
    chunks: Chunks
    sender: Sender
    bounds: InputBounds
    max_concurrent: int
    clock: Callable[[], float]
    """Seconds of the Unix epoch."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    checks: FairPlaces = field(default_factory=_places_to_check)
    """Of files that are read at a time: those of tenants by turns, as one may take minutes."""


class BatchRun:
    """Does what the stored state says is next, until the batch has ended. One task's.

    Each step may break off anywhere and be taken again, by another process: it finds what
    was stored and does the rest.
    """

    def __init__(self, batch_id: str, needs: Needs) -> None:
        self._batch_id = batch_id
        self._needs = needs
        self._has_news = asyncio.Event()
        self._steps: Mapping[BatchStatus, Callable[[Batch], Awaitable[None]]] = {
            BatchStatus.VALIDATING: self._validate,
            BatchStatus.IN_PROGRESS: self._answer_lines,
            BatchStatus.FINALIZING: self._finalize,
            BatchStatus.CANCELLING: self._cancel,
        }

    def look(self) -> None:
        """It may be stored that no more is wanted: look, and stop sending if so."""
        self._has_news.set()

    async def run(self) -> None:
        """To its end. What a database raises goes through."""
        while True:
            batch = await self._needs.batches.get(self._batch_id)
            if batch is None:
                return
            if batch.status in ENDED:
                logger.info("batch ended", extra=_told(batch))
                return
            await self._steps[batch.status](batch)

    async def _validate(self, batch: Batch) -> None:
        await self._until_cancelled(self._check_in_turn(batch))

    async def _check_in_turn(self, batch: Batch) -> None:
        async with self._needs.checks.place(batch.tenant):
            await self._check(batch)

    async def _check(self, batch: Batch) -> None:
        batches, clock = self._needs.batches, self._needs.clock
        file = InputFile(
            self._needs.chunks, batch.input_file_id, batch.endpoint, self._needs.bounds
        )
        found = await file.check()
        if found.errors:
            await batches.refuse(batch.batch_id, found.errors, clock())
            return
        await batches.clear_lines(batch.batch_id)
        num_lines = 0
        async for lines in file.lines(found.ranks, LineMaker(batch.endpoint, batch.tenant)):
            if lines:
                await batches.add_lines(batch.batch_id, lines)
            num_lines += len(lines)
        if num_lines == len(found.ranks):  # else it was deleted meanwhile: look again
            await batches.accept(batch.batch_id, num_lines, clock())

    async def _answer_lines(self, batch: Batch) -> None:
        async with asyncio.TaskGroup() as storing:  # what came in time, however long that takes
            await self._until_cancelled(self._send_all(batch, storing), self._expired(batch))
        await self._needs.batches.move(batch.batch_id, BatchEvent.CLOSE, self._needs.clock())

    async def _until_cancelled(self, *work: Coroutine[None, None, None]) -> None:
        """Or the first of ``work`` is done, which ends the other."""
        async with asyncio.TaskGroup() as tasks:
            all_of_it = [tasks.create_task(each, name="batch-work") for each in work]
            all_of_it.append(tasks.create_task(self._cancelled(), name="batch-cancelled"))
            await asyncio.wait(all_of_it, return_when=asyncio.FIRST_COMPLETED)
            for each in all_of_it:
                each.cancel()

    async def _expired(self, batch: Batch) -> None:
        """Until the moment that clients were told, by their clock: a machine that sleeps counts
        no seconds meanwhile.
        """
        left_s = batch.expires_s - self._needs.clock()
        while left_s > 0:
            await asyncio.sleep(min(left_s, _LOOK_S))
            left_s = batch.expires_s - self._needs.clock()
        logger.info("batch expired", extra={"batch": batch.batch_id})

    async def _cancelled(self) -> None:
        """Until what is stored says that no more is wanted."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            batch = await self._patiently(partial(self._needs.batches.get, self._batch_id))
            if batch is None or batch.status is BatchStatus.CANCELLING:
                return

    async def _send_all(self, batch: Batch, storing: asyncio.TaskGroup) -> None:
        waiting = _Waiting(self._needs.batches, batch.batch_id)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self._needs.max_concurrent, batch.num_lines)):
                tasks.create_task(self._send_some(batch, waiting, storing), name="batch-line")

    async def _send_some(
        self, batch: Batch, waiting: "_Waiting", storing: asyncio.TaskGroup
    ) -> None:
        """Answer lines while there are some. Who is cancelled leaves an answer to ``storing``."""
        batches, sender = self._needs.batches, self._needs.sender
        owner = LineOwner(batch.tenant, batch.batch_id)
        while (line := await self._patiently(waiting.take)) is not None:
            body = partial(batches.body, batch.batch_id, line.number)
            read_body = partial(self._patiently, body)
            answer = await sender.answer(owner, batch.endpoint, line.request_id, read_body)
            store = partial(batches.add_results, batch.batch_id, [result_of(line, answer)])
            stored = storing.create_task(self._patiently(store), name="batch-result")
            await asyncio.shield(stored)

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the database again and again, for some minutes.

        Whoever gives up breaks off all lines of the batch, and those under way are computed anew.
        """
        asking = AsyncRetrying(
            sleep=self._needs.sleep,
            wait=wait_exponential(max=_STORE_PAUSE_S),
            stop=stop_after_attempt(_STORE_ATTEMPTS),
            before_sleep=before_sleep_log(logger, logging.WARNING),
            reraise=True,
        )
        return await asking(ask)

    async def _finalize(self, batch: Batch) -> None:
        await self._fill(batch, *_EXPIRED)
        filled = await self._needs.batches.get(batch.batch_id)
        assert filled is not None
        event = BatchEvent.EXPIRE if filled.num_unsent else BatchEvent.COMPLETE
        await self._needs.batches.finish(batch.batch_id, event, self._needs.clock())

    async def _cancel(self, batch: Batch) -> None:
        if batch.num_lines:  # else its file was not accepted, and some lines may be stored
            await self._fill(batch, *_CANCELLED)
        event = BatchEvent.CANCELLED
        await self._needs.batches.finish(batch.batch_id, event, self._needs.clock())

    async def _fill(self, batch: Batch, code: str, message: str) -> None:
        """Give each line without a result one that says why."""
        batches, rank = self._needs.batches, 0
        while lines := await batches.unanswered(batch.batch_id, rank, _UNSENT_AT_ONCE):
            rank = lines[-1].rank + 1
            results = [unanswered(line, code, message) for line in lines]
            await batches.add_results(batch.batch_id, results, are_unsent=True)


class _Waiting:
    """The lines of a batch that are to be sent, each taken once. Tasks take turns."""

    def __init__(self, batches: BatchStore, batch_id: str) -> None:
        self._batches = batches
        self._batch_id = batch_id
        self._lines: list[Line] = []  # the next is the last
        self._rank = 0
        self._turn = asyncio.Lock()

    async def take(self) -> Line | None:
        """The next; None: there are no more."""
        async with self._turn:
            if not self._lines:
                found = await self._batches.unanswered(self._batch_id, self._rank, _LINES_AT_ONCE)
                if not found:
                    return None
                self._lines = list(reversed(found))
                self._rank = found[-1].rank + 1
            return self._lines.pop()


def _told(batch: Batch) -> Mapping[str, object]:
    return {
        "batch": batch.batch_id,
        "status": str(batch.status),
        "num_lines": batch.num_lines,
        "num_completed": batch.num_completed,
        "num_failed": batch.num_failed,
    }
