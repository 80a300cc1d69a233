"""Log lines on their way to a stream, written by a thread of their own."""

import contextlib
import logging
import queue
import threading
from typing import IO

MAX_LINES = 10_000  # that wait; what comes then is dropped
FLUSH_S = 1.0  # what is left may take to get out as the process ends


class LogWriter(logging.Handler):
    """A handler that never waits for its stream: whoever reads that may be slow, or stopped.

    Any thread logs; a line is made in it, as it knows the request that the line is about. Lines
    keep their order. One that finds ``max_lines`` waiting is dropped and counted, and the next
    that is written is preceded by one that says how many were.
    """

    def __init__(self, stream: IO[str], *, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._num_refused = 0  # lines that found too many waiting, or the writer closed
        self._num_unwritten = 0  # lines that the stream did not take; the thread's
        self._num_told = 0  # of all these, in the log
        self._is_closed = False
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        # A daemon: nobody waits for a stream that takes nothing.
        self._thread = threading.Thread(target=self._write_all, name="log-writer", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Lines that were logged and never written."""
        return self._num_refused + self._num_unwritten

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - as logging does: a wrong call fails nobody
            self.handleError(record)
            return
        if self._is_closed or self._lines.full():  # nobody else adds: emit is called under a lock
            self._num_refused += 1
        else:
            self._lines.put_nowait(line)

    def flush(self) -> None:
        """Wait until all is written, ``FLUSH_S`` at the most."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(
                lambda: not self._lines.unfinished_tasks, timeout=FLUSH_S
            )

    def close(self) -> None:
        """Flush and end the thread. Idempotent."""
        if not self._is_closed:
            self.flush()
            self._is_closed = True
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait(None)
        super().close()

    def _write_all(self) -> None:
        while True:
            line = self._lines.get()
            try:
                if line is None:
                    return
                self._write(line)
            except (OSError, ValueError):  # nobody reads it any more, or it was closed
                self._num_unwritten += 1
            finally:
                self._lines.task_done()

    def _write(self, line: str) -> None:
        num_untold = self.num_dropped - self._num_told
        if num_untold:
            self._num_told += num_untold
            record = logging.makeLogRecord(
                {
                    "name": __name__,
                    "levelno": logging.WARNING,
                    "levelname": "WARNING",
                    "msg": "log lines were dropped",
                    "num_lines": num_untold,
                }
            )
            self._stream.write(f"{self.format(record)}\n")
        self._stream.write(f"{line}\n")
        self._stream.flush()
