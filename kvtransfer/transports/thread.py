"""The one thread that posts and polls reads and computes digests."""

import asyncio
import contextlib
import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_MIN_S = 50e-6  # between polls while something moves
POLL_MAX_S = 1e-3  # and when nothing has for a while


class TransferThread:
    """Runs short jobs in order; polls what is unfinished while there is any, else sleeps.

    Knows no transport. One for each endpoint, which starts and stops it. Jobs,
    pollers and what ``watch`` and ``later`` were given run on the thread, from which
    alone those are called; everything else is called from the event loop.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None] | None] = deque()
        self._wake: socket.socket | None = None  # once started
        self._began_s: float | None = None  # what runs now; time.monotonic; the thread's to write
        # thread only
        self._pollers: list[_Poller] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._timer_ids = itertools.count()
        self._selector: selectors.BaseSelector
        self._woken: socket.socket
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    @property
    def native_id(self) -> int | None:
        """The operating system's id of the thread (for measuring its CPU time)."""
        return self._thread.native_id

    @property
    def stuck_s(self) -> float:
        """For how long the job, poll or callback of this moment has been running, s; 0: none is.

        All of them are short: patience ends with ``Timers.read_progress_s``.
        """
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def start(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self.watch(self._woken, selectors.EVENT_READ, self._rouse)
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """Finish queued jobs, drop the rest, end the thread, join it. Blocks for that long.

        Without ``wait`` (it is stuck) it does so by itself, if it ever comes back.
        """
        if self._wake is None:
            return
        self._put(None)
        if wait:
            self._thread.join()
        self._wake.close()

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

        self._put(run)

    def post(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the thread; it reports for itself and must not raise."""
        self._put(job)

    def poll(self, poller: Callable[[], bool], *, wakes: bool = False) -> None:
        """Call ``poller`` again and again until it returns True.

        ``wakes``: only after something else happened here, for a change that
        arrives over a watched file.
        """
        self._pollers.append(_Poller(poller, wakes))

    def watch(self, file: int | socket.socket, events: int, callback: Callable[[], object]) -> None:
        """Call ``callback`` while any of ``events`` (of ``selectors``) is there; replaces."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(file)
        self._selector.register(file, events, callback)

    def unwatch(self, file: int | socket.socket) -> None:
        """Before ``file`` is closed."""
        self._selector.unregister(file)

    def later(self, delay_s: float, job: Callable[[], None]) -> None:
        """Run ``job`` after ``delay_s``."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_ids), job))

    def _put(self, job: Callable[[], None] | None) -> None:
        assert self._wake is not None
        self._jobs.append(job)
        with contextlib.suppress(OSError):  # full: it will wake up anyway; closed: it has ended
            self._wake.send(b"\0")

    def _run(self) -> None:
        pause_s = POLL_MIN_S
        while True:
            events = self._wait(pause_s)
            for key, _ in events:
                self._guarded(key.data)
            while self._jobs:
                job = self._jobs.popleft()
                if job is None:
                    self._selector.close()
                    self._woken.close()
                    return
                self._guarded(job)
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._guarded(heapq.heappop(self._timers)[2])
            polled, self._pollers = self._pollers, []
            self._pollers += [poller for poller in polled if not self._guarded(poller.call)]
            moved = bool(events) or self._pollers != polled
            pause_s = POLL_MIN_S if moved else min(pause_s * 2, POLL_MAX_S)

    def _guarded(self, function: Callable[[], bool | None]) -> bool:
        """Call ``function``; one that raises is a bug and counts as finished."""
        self._began_s = time.monotonic()
        try:
            return bool(function())
        except Exception:
            logger.exception("transfer thread")
            return True
        finally:
            self._began_s = None

    def _wait(self, pause_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Until something is to be done."""
        timeout_s = None
        if not all(poller.wakes for poller in self._pollers):
            timeout_s = pause_s
        if self._timers:
            until_timer_s = max(0.0, self._timers[0][0] - time.monotonic())
            timeout_s = until_timer_s if timeout_s is None else min(timeout_s, until_timer_s)
        if timeout_s is not None and timeout_s < POLL_MAX_S:  # a selector knows milliseconds only
            time.sleep(timeout_s)
            timeout_s = 0
        return self._selector.select(timeout_s)

    def _rouse(self) -> None:
        self._woken.recv(4096)


class _Poller(NamedTuple):
    call: Callable[[], bool]
    wakes: bool


def deliver(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """Run ``callback`` on the event loop, if that still runs."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # closed: nobody is left to care
        logger.debug("a transfer ended after its event loop")
