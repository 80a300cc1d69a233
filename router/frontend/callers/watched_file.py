"""What a file says that may be replaced at any time."""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from diptych.errors import ConfigurationError

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_SETTLED_S = 1.0
_PATIENCE_S = 3.0
_MAX_BYTES = 2**22

T = TypeVar("T")


class WatchedFile(Generic[T]):
    """A file that ``run`` looks at each second, whether or not anybody asks for its content.

    One that has changed is taken over once it has not been written to for ``_SETTLED_S``, or
    once it has not stood still for ``_PATIENCE_S``: until then it may be half written. A file
    that cannot be read, or makes no sense, changes nothing for what is known; that is logged
    once, and the same file is not read again. Event loop only; the disk is waited for beside it.
    """

    def __init__(
        self,
        setting: str,
        path: Path,
        parse: Callable[[str], T],
        *,
        what: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``what`` is in it, for the log; ``parse`` raises ValueError. ``now`` is of the wall
        clock, s, by which the file is dated.

        Raises ConfigurationError: it cannot be read, or makes no sense.
        """
        self._setting = setting
        self._path = path
        self._parse = parse
        self._taken, self._not_taken = f"{what} taken over", f"{what} not taken over"
        self._now = now
        self._refused = ""  # why the file was no use when it was read last
        self._unsettled_s = 0.0  # for how long it has differed from what was read
        try:
            self._read_as = self._look_up()  # what was read last, whether or not it was of use
            self._content = self._read()
        except (OSError, ValueError) as error:
            raise self._wrong(error) from None

    @property
    def content(self) -> T:
        """What is known; the same object while it stays so."""
        return self._content

    async def run(self) -> None:
        """Look at it each second, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """What ``run`` does each second. Not while another look is under way."""
        try:
            await self._look()
        except (OSError, ValueError) as error:
            why = self._wrong(error).message
            if self._refused != why:
                self._refused = why
                logger.error(self._not_taken, extra={"why": why})

    async def _look(self) -> None:
        try:
            found = await asyncio.to_thread(self._look_up)
            if found == self._read_as:
                self._unsettled_s = 0.0
                return
            _, is_settled = found
            self._unsettled_s += _LOOK_EVERY_S
            if not is_settled and self._unsettled_s < _PATIENCE_S:
                return
            self._unsettled_s = 0.0
            self._read_as = found
            content = await asyncio.to_thread(self._read)
        except OSError:  # it may be readable the next time
            self._read_as = None, False
            raise
        self._refused = ""
        if content != self._content:
            self._content = content
            logger.info(self._taken)

    def _look_up(self) -> tuple[object, bool]:
        """Something that differs once the file does, and whether it is whole by its date."""
        status = self._path.stat()
        version = status.st_mtime_ns, status.st_size, status.st_ino
        return version, self._now() - status.st_mtime >= _SETTLED_S

    def _read(self) -> T:
        """Raises OSError, or ValueError: it makes no sense."""
        if self._path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"has more than {_MAX_BYTES} bytes")
        return self._parse(self._path.read_text().removeprefix("\ufeff"))  # an editor's mark

    def _wrong(self, error: OSError | ValueError) -> ConfigurationError:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return ConfigurationError(f"--{self._setting}: {self._path}: {why}")


def trusting(pem: str) -> ssl.SSLContext:
    """What believes the authorities of a file. Raises ValueError: there are none."""
    try:
        return ssl.create_default_context(cadata=pem.encode("ascii", "ignore").decode())
    except ssl.SSLError as error:
        raise ValueError(error.strerror or str(error)) from None
