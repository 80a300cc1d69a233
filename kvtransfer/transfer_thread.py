"""The one thread that posts and polls reads and computes digests."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_MIN_S = 50e-6  # between polls while something moves
POLL_MAX_S = 1e-3  # and when nothing has for a while


class TransferThread:
    """Runs short jobs in order; polls what is unfinished while there is any, else sleeps.

    Knows no transport. One per process; started and stopped by the endpoint. Jobs
    and pollers run on the thread; everything else is called from the event loop.
    """

    def __init__(self, name: str = "kv-transfer") -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pollers: list[Callable[[], bool]] = []  # thread only
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    @property
    def native_id(self) -> int | None:
        """The operating system's id of the thread (for measuring its CPU time)."""
        return self._thread.native_id

    def start(self) -> None:
        self._thread.start()
        self._started = True

    def stop(self) -> None:
        """Finish queued jobs, drop pollers, end the thread, join it. Blocks for that long."""
        if self._started:
            self._jobs.put(None)
            self._thread.join()

    async def call(self, job: Callable[[], T]) -> T:
        """Run ``job`` on the thread; cancelling the wait does not stop the job."""
        return await self.begin(job)

    def begin(self, job: Callable[[], T]) -> "asyncio.Future[T]":
        """Like ``call``, to be awaited later."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(result: T | None, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        self.submit(job, done)
        return future

    def submit(
        self, job: Callable[[], T], done: Callable[[T | None, Exception | None], None]
    ) -> None:
        """Run ``job`` on the thread, then ``done(result, error)`` on the event loop."""
        loop = asyncio.get_running_loop()

        def run() -> None:
            result, error = None, None
            try:
                result = job()
            except Exception as raised:  # noqa: BLE001 - it travels to the caller
                error = raised
            deliver(loop, done, result, error)

        self._jobs.put(run)

    def post(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the thread; it reports for itself and must not raise."""
        self._jobs.put(job)

    def poll(self, poller: Callable[[], bool]) -> None:
        """Call ``poller`` again and again until it returns True. From the thread only."""
        self._pollers.append(poller)

    def _run(self) -> None:
        pause_s = POLL_MIN_S
        while True:
            try:
                job = self._jobs.get(timeout=pause_s if self._pollers else None)
            except queue.Empty:
                pass
            else:
                if job is None:
                    return
                _guarded(job)
                pause_s = POLL_MIN_S
            waiting = [poller for poller in self._pollers if not _guarded(poller)]
            pause_s = POLL_MIN_S if waiting != self._pollers else min(pause_s * 2, POLL_MAX_S)
            self._pollers = waiting


def deliver(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """Run ``callback`` on the event loop, if that still runs."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # closed: nobody is left to care
        logger.debug("a transfer ended after its event loop")


def _guarded(function: Callable[[], bool | None]) -> bool:
    """Call ``function``; one that raises is a bug and counts as finished."""
    try:
        return bool(function())
    except Exception:
        logger.exception("transfer thread")
        return True
