"""Takes a worker that cannot move KV blocks any more out of service. Event loop only."""

import asyncio
import logging
from collections.abc import Callable

from diptych.timers import Timers
from diptych.worker.status import WorkerStatus
from kvtransfer.memory import BlockMemory

logger = logging.getLogger(__name__)


class TransferStuckError(Exception):
    """The transfer thread does not come back; the process must go down."""


class TransferWatch:
    """Says why a worker cannot move KV blocks, and when that is not going to change.

    A call into a library cannot be broken off, nor its thread be replaced: it may still
    write. So the worker takes nothing new while the thread has been at one thing for more
    than ``read_progress_s``, lets what runs finish for ``drain_s``, and ends. Where the pool's
    device is lost nothing can finish, and it ends at once. A process that was stopped as a whole
    does not blame its thread.
    """

    def __init__(
        self,
        stuck_s: Callable[[], float],
        memory: BlockMemory,
        timers: Timers,
        status: WorkerStatus,
    ) -> None:
        """``stuck_s()``: for how long the thread has been at one thing, s; it uses ``memory``."""
        self.problem = ""  # why it is not ready; the status tells of changes
        self._stuck_s = stuck_s
        self._memory = memory
        self._timers = timers
        self._status = status

    async def run(self) -> None:
        """Watch until cancelled. Raises TransferStuckError, DeviceLostError."""
        while True:
            await self._until(stuck=True)
            await asyncio.sleep(self._timers.heartbeat_s / 2)
            if not self._is_stuck:  # the process had been stopped: it goes on where it was
                continue
            logger.critical("the transfer thread is stuck", extra={"stuck_s": self._stuck_s()})
            self._tell("the transfer thread is stuck")
            try:
                async with asyncio.timeout(self._timers.drain_s):
                    await self._until(stuck=False)
            except TimeoutError:
                raise TransferStuckError(
                    f"the transfer thread is stuck for {self._stuck_s():.1f} s"
                ) from None
            logger.warning("the transfer thread goes on")
            self._tell("")

    @property
    def _is_stuck(self) -> bool:
        return self._stuck_s() > self._timers.read_progress_s

    async def _until(self, *, stuck: bool) -> None:
        while True:
            if self._memory.lost is not None:
                self._tell("the device of the KV pool is lost")
                raise self._memory.lost
            if self._is_stuck is stuck:
                return
            await asyncio.sleep(self._timers.heartbeat_s / 2)

    def _tell(self, problem: str) -> None:
        self.problem = problem
        self._status.changed()
