"""All batches that have not ended, each a task."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from batch_server.runner.batch_run import BatchRun, Needs

logger = logging.getLogger(__name__)

_RETRY_S: Final = 5.0


class Runner:
    """Runs batches. Event loop only; ``run`` is a task of the process."""

    def __init__(
        self, needs: Needs, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._needs = needs
        self._sleep = sleep
        self._new: asyncio.Queue[str] = asyncio.Queue()
        self._runs: dict[str, BatchRun] = {}
        self._is_ending = False

    @property
    def num_open(self) -> int:
        """Batches that have not ended."""
        return len(self._runs)

    def begin(self, batch_id: str) -> None:
        """Run one that was stored. One that was not ends at once."""
        self._runs[batch_id] = BatchRun(batch_id, self._needs)
        self._new.put_nowait(batch_id)

    def look(self, batch_id: str) -> None:
        """What is stored of it may say that no more is wanted."""
        run = self._runs.get(batch_id)
        if run is not None:
            run.look()

    async def run(self) -> None:
        """Until cancelled; begins with what an earlier process left."""
        for batch_id in await self._needs.batches.open_ids():
            if batch_id not in self._runs:
                self.begin(batch_id)
        async with asyncio.TaskGroup() as tasks:
            try:
                while True:
                    batch_id = await self._new.get()
                    tasks.create_task(self._run(batch_id), name="batch")
            finally:
                self._is_ending = True

    async def _run(self, batch_id: str) -> None:
        """What goes wrong with one is no other's matter, and is tried again from what is stored."""
        run = self._runs[batch_id]
        try:
            while True:
                try:
                    await run.run()
                    return
                except Exception:
                    logger.exception("batch broke off", extra={"batch": batch_id})
                    if self._is_ending:  # which a group of tasks that broke may have hidden
                        return
                await self._sleep(_RETRY_S)
        finally:
            del self._runs[batch_id]
