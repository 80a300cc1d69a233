"""How long work at start-up (download, import, load) reports how far it is.

Whoever works calls ``progress(stage, done_ratio)``; it knows nothing of
terminals. Whoever started it passes :func:`silent`, or a
:class:`ConsoleProgress`: a bar on a terminal, else a few plain lines.
"""

import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_LINE_STEP_RATIO = 0.25


class Progress(Protocol):
    """Called from any one thread, as often as is convenient."""

    def __call__(self, stage: str, done_ratio: float) -> None:
        """``stage`` (a short phrase) is done to ``done_ratio``, 0 to 1."""


def silent(stage: str, done_ratio: float) -> None:
    """A Progress that shows nothing."""


class AbandonedError(Exception):
    """Nobody waits for this work any more."""


def abandonable(progress: Progress, abandoned: threading.Event) -> Progress:
    """The same, which raises AbandonedError once ``abandoned`` is set."""

    def report(stage: str, done_ratio: float) -> None:
        if abandoned.is_set():
            raise AbandonedError
        progress(stage, done_ratio)

    return report


class ConsoleProgress:
    """Shows progress on ``stream`` (default: stderr); a context manager.

    On a terminal one bar per stage; elsewhere one line when a stage starts, at
    each further quarter and when it ends, so that logs stay short.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._bars: RichProgress | None = None
        if self._stream.isatty():
            self._bars = _bars(self._stream)
        self._tasks: dict[str, TaskID] = {}
        self._next_line_ratio: dict[str, float] = {}

    def __enter__(self) -> "ConsoleProgress":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, done_ratio: float) -> None:
        if self._bars is None:
            self._print_line(stage, done_ratio)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=1.0)
        self._bars.update(self._tasks[stage], completed=done_ratio)

    def _print_line(self, stage: str, done_ratio: float) -> None:
        threshold = self._next_line_ratio.get(stage, 0.0)
        if done_ratio < threshold:
            return
        with suppress(OSError):  # nobody reads it any more, or its disk is full: the work goes on
            self._stream.write(f"{stage}: {done_ratio:.0%}\n")
            self._stream.flush()
        quarters = min(done_ratio // _LINE_STEP_RATIO, 3) + 1
        done = done_ratio >= 1
        self._next_line_ratio[stage] = float("inf") if done else quarters * _LINE_STEP_RATIO


def _bars(stream: TextIO) -> "RichProgress":
    """What draws them is loaded where somebody can see them."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=Console(file=stream),
    )
