"""Log lines on their way to a stream, written by a thread of their own."""

import logging
import os
import queue
import threading
from typing import Protocol

MAX_LINES = 10_000  # that wait; what comes then is dropped
FLUSH_S = 1.0  # what is left may take to get out as the process ends


class TextStream(Protocol):
    """Where lines go. Called by the writer's thread alone."""

    def write(self, text: str, /) -> int:
        """Take all of ``text``. Raises OSError, or ValueError once it is closed."""
        ...

    def flush(self) -> None:
        """Let it get out."""
        ...


class RawStandardError:
    """The process's standard error, past ``sys.stderr``.

    That holds a lock while it writes, which the interpreter takes once more as the process
    ends: it would wait for whoever has stopped reading. Here nothing is locked or held back.
    """

    def write(self, text: str, /) -> int:
        """See :class:`TextStream`."""
        left = text.encode("utf-8", "backslashreplace")
        while left:
            left = left[os.write(2, left) :]
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


class LogWriter(logging.Handler):
    """A handler that never waits for its stream: whoever reads that may be slow, or stopped.

    Any thread logs, at any point of its code: a finalizer may log wherever the interpreter
    collects garbage, in the writing thread too, so ``emit`` takes no lock that this waits for.
    A line is made by who logs it, as that knows the request that the line is about. Lines
    keep their order. One that finds ``max_lines`` waiting is dropped and counted, and the next
    that is written is preceded by one that says how many were.
    """

    def __init__(self, stream: TextStream, *, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._num_refused = 0  # lines that found too many waiting, or the writer closed
        self._num_unwritten = 0  # lines that the stream did not take; the thread's
        self._num_told = 0  # of all these, in the log
        self._is_closed = False
        self._is_stuck = False  # the last flush waited in vain
        self._stream = stream
        self._max_lines = max_lines
        # Lines; marks that are set once all before them is written; None ends the thread.
        # Its ``put`` may come in the middle of its ``get``: see the finalizers above.
        self._lines: queue.SimpleQueue[str | threading.Event | None] = queue.SimpleQueue()
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
        if self._is_closed or self._lines.qsize() >= self._max_lines:
            self._num_refused += 1
        else:
            self._lines.put(line)

    def say(self, line: str) -> None:
        """Queue a line as it is, for people, however many wait."""
        self._lines.put(line)

    def flush(self) -> None:
        """Wait until all is written, ``FLUSH_S`` at the most."""
        if not self._is_closed:
            written = threading.Event()
            self._lines.put(written)
            self._is_stuck = not written.wait(FLUSH_S)

    def close(self) -> None:
        """Flush, unless that was in vain just before, and end the thread. Idempotent."""
        if not self._is_closed:
            if not self._is_stuck:
                self.flush()
            self._is_closed = True
            self._lines.put(None)
        super().close()

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                self._write(line)
            except (OSError, ValueError):  # nobody reads it any more, or it was closed
                self._num_unwritten += 1

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
