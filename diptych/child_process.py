"""A process that another one starts, finds through a file, and ends. Event loop only.

It is in a session of its own, so that Ctrl-C in a terminal reaches its parent alone, which asks
it to end. Its standard input is a pipe from the parent and ends with it, however that came: a
child that is told ``--stop-with-stdin`` then stops by itself.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.05

Addresses = Mapping[str, str]
"""What a process wrote to its port file: where it listens, by the name of the port."""


def module_command(module: str) -> list[str]:
    """The command that runs one of our modules, imported from where this process imports its own.

    By ``-m`` alone Python would look into the working folder first: a user's folder that is called
    ``router``, or a file that is called as one of the standard library's, would run in its place.
    """
    try:
        looks_here = not {"", os.getcwd()}.isdisjoint(sys.path)
    except FileNotFoundError:  # the working folder is gone
        looks_here = False
    return [sys.executable, *(() if looks_here else ("-P",)), "-m", module]


class ChildProcess:
    """Owns one process from its start to its end. ``stop`` may be called at any time, and again."""

    def __init__(
        self,
        command: Sequence[str],
        port_file: Path,
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        is_read: bool = False,
    ) -> None:
        """``environment`` is the parent's unless given; of its descriptors the child has only
        ``pass_fds``, under the same numbers. ``is_read``: what it writes comes to
        ``output``, both of it, rather than to where its parent's does."""
        self._command = command
        self._port_file = port_file
        self._environment = environment
        self._pass_fds = tuple(pass_fds)
        self._pipes = (asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT) if is_read else None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Once it has started."""
        assert self._process is not None
        return self._process.pid

    @property
    def output(self) -> asyncio.StreamReader:
        """What it writes, where it is read."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout

    async def start(self) -> None:
        """Start it. Once. Raises OSError: the machine has no room for it."""
        stdout, stderr = self._pipes or (None, None)
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=self._environment,
            pass_fds=self._pass_fds,
            start_new_session=True,
        )

    async def listening(self) -> Addresses:
        """Wait until it accepts connections; it may never."""
        while True:
            with suppress(OSError):  # not there yet; or nothing can be opened at the moment
                addresses: Addresses = json.loads(self._port_file.read_text())
                return addresses
            await asyncio.sleep(_POLL_S)

    async def ended(self) -> int:
        """Wait for its end: the exit code, or less than 0 for the signal that ended it."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, patience_s: float) -> bool:
        """Ask it to end, and see to it that it does; whether it did so within ``patience_s``."""
        process = self._process
        if process is None or process.returncode is not None:
            return True
        with suppress(ProcessLookupError):  # it has just ended
            process.terminate()
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()
            return False
        return True

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
