"""What a file says that may be replaced at any time."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from diptych.errors import ConfigurationError

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_MAX_BYTES = 2**22

T = TypeVar("T")


class WatchedFile(Generic[T]):
    """A file that is looked at when its content is asked for, each second at most.

    One that has changed is taken over when it is still the same a second later: it may be
    written to. A file that cannot be read, or makes no sense, changes nothing for what is
    known; that is logged once. Event loop only.
    """

    def __init__(
        self,
        setting: str,
        path: Path,
        parse: Callable[[str], T],
        *,
        what: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``what`` is in it, for the log; ``parse`` raises ValueError.

        Raises ConfigurationError: it cannot be read, or makes no sense.
        """
        self._setting = setting
        self._path = path
        self._parse = parse
        self._taken, self._not_taken = f"{what} taken over", f"{what} not taken over"
        self._clock = clock
        self._looked_s = clock()
        self._refused = ""  # why the file was no use when it was looked at last
        self._seen = self._look_up()
        self._version = self._seen  # of what is known
        self._content = self._read()

    @property
    def content(self) -> T:
        """What is known; the same object while it stays so. Looks at the file."""
        now = self._clock()
        if now - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now
            try:
                self._look()
                self._refused = ""
            except ConfigurationError as error:
                if self._refused != error.message:
                    self._refused = error.message
                    logger.error(self._not_taken, extra={"why": error.message})
        return self._content

    def _look(self) -> None:
        before, self._seen = self._seen, self._look_up()
        if self._seen == self._version or self._seen != before:
            return
        self._content = self._read()
        self._version = self._seen
        logger.info(self._taken)

    def _look_up(self) -> object:
        """Something that differs once the file does."""
        try:
            status = self._path.stat()
        except OSError as error:
            self._seen = None
            raise self._wrong(error) from None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> T:
        try:
            if self._path.stat().st_size > _MAX_BYTES:
                raise ValueError(f"has more than {_MAX_BYTES} bytes")
            return self._parse(self._path.read_text())
        except (OSError, ValueError) as error:
            raise self._wrong(error) from None

    def _wrong(self, error: OSError | ValueError) -> ConfigurationError:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return ConfigurationError(f"--{self._setting}: {self._path}: {why}")
