"""One of several processes of a router, started and ended by their parent."""

import asyncio
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from diptych import settings
from router.config import RouterConfig
from router.heartbeat import Pulse

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_PREFIX = "DIPTYCH_ROUTER_"

Addresses = Mapping[str, str]
"""What a process wrote to its port file: where it listens, by the name of the port."""


class Child(Protocol):
    """A process. Event loop only; ``stop`` may be called at any time, and again."""

    @property
    def pid(self) -> int:
        """Once it has started."""
        ...

    async def start(self) -> None:
        """Start it. Once."""
        ...

    async def listening(self) -> Addresses:
        """Wait until it accepts connections; it may never."""
        ...

    async def ended(self) -> int:
        """Wait for its end: the exit code, or less than 0 for the signal that ended it."""
        ...

    async def hanging(self) -> None:
        """Wait, once it listens, until it shows no sign of life for too long."""
        ...

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        ...

    async def stop(self) -> None:
        """Ask it to end, and see to it that it does."""
        ...


class RouterProcess:
    """``python -m router`` with settings of its own, in a session of its own.

    So Ctrl-C in a terminal reaches its parent alone, which asks it to end. It ends, too, when
    its parent does, however that came. Owns a folder and a pipe from its start to its end.
    """

    def __init__(self, config: RouterConfig, patience_s: float) -> None:
        """It has ``patience_s`` to end by itself."""
        self._config = config
        self._patience_s = patience_s
        self._folder: Path | None = None
        self._pulse: Pulse | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """See :class:`Child`; so the next ones."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Raises OSError: the machine has no room for it, on a disk or as a process."""
        # Not its predecessor's: somebody may have cleaned that away since, or taken its name.
        self._folder = Path(tempfile.mkdtemp(prefix="diptych-router-"))
        self._pulse = Pulse()
        path = self._folder / "settings.yaml"  # JSON is YAML
        own = {"port_file": self._port_file, "stop_with_stdin": True, "beats_to": self._pulse.fd}
        path.write_text(self._config.model_copy(update=own).model_dump_json(exclude_defaults=True))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", "--config", str(path)),
            stdin=asyncio.subprocess.PIPE,
            env=settings.environment_without(_PREFIX),  # all of it is in the file
            start_new_session=True,
            pass_fds=(self._pulse.fd,),
        )
        self._pulse.hand_over()

    async def listening(self) -> Addresses:
        while True:
            with suppress(OSError):  # not there yet; or nothing can be opened at the moment
                addresses: Addresses = json.loads(self._port_file.read_text())
                return addresses
            await asyncio.sleep(_POLL_S)

    @property
    def _port_file(self) -> Path:
        assert self._folder is not None
        return self._folder / "ports.json"

    async def ended(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def hanging(self) -> None:
        assert self._pulse is not None
        await self._pulse.until_silent(self._config.timers)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        try:
            if self._process is not None and self._process.returncode is None:
                await self._end(self._process)
        finally:
            if self._pulse is not None:
                self._pulse.close()
                self._pulse = None
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            process.terminate()
        try:
            async with asyncio.timeout(self._patience_s):
                await process.wait()
        except TimeoutError:
            logger.warning("a process was killed: it did not drain", extra={"pid": process.pid})
            process.kill()
            await process.wait()


def config_of(config: RouterConfig, index: int, port: int, http_port: int) -> RouterConfig:
    """What process ``index`` is set to: it shares the two ports, and has others of its own.

    Metrics of one process say nothing of the others, so no shared port tells them.
    """
    host = config.listen.rpartition(":")[0]
    return config.model_copy(
        update={
            "processes": 1,
            "shares_ports": True,
            "listen": f"{host}:{port}",
            "http_port": http_port,
            "http_metrics": False,
            "metrics_port": _own(config.metrics_port, index),
            "health_port": _own(config.health_port, index),
        }
    )


def _own(port: int | None, index: int) -> int | None:
    """Each picks one where the first does."""
    return port + index if port else port
