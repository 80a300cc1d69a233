"""One of several processes of a router, started and ended by their parent."""

import logging
from typing import Protocol

import yaml

from diptych import settings
from diptych.child_process import Addresses, ChildProcess, module_command
from diptych.errors import ConfigurationError
from diptych.own_folder import OwnFolder
from router.config import RouterConfig
from router.heartbeat import Pulse

logger = logging.getLogger(__name__)

_PREFIX = "DIPTYCH_ROUTER_"


class Child(Protocol):
    """A process. Event loop only; ``stop`` may be called at any time, and again."""

    @property
    def pid(self) -> int:
        """Once it has started."""
        ...

    async def start(self) -> None:
        """Start it. Once. Raises ConfigurationError, OSError: it cannot be."""
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
    """``python -m router`` with settings of its own.

    Owns a folder and a pipe from its start to its end.
    """

    def __init__(self, config: RouterConfig, patience_s: float) -> None:
        """It has ``patience_s`` to end by itself."""
        self._config = config
        self._patience_s = patience_s
        self._folder: OwnFolder | None = None
        self._pulse: Pulse | None = None
        self._process: ChildProcess | None = None

    @property
    def pid(self) -> int:
        """See :class:`Child`; so the next ones."""
        return self._started.pid

    async def start(self) -> None:
        """Raises ConfigurationError: the machine has no room for it, on a disk or as a process."""
        try:
            await self._start()
        except OSError as error:
            raise ConfigurationError(f"--processes: one cannot be started: {error}") from None

    async def _start(self) -> None:
        # Not its predecessor's: somebody may have cleaned that away since, or taken its name.
        self._folder = OwnFolder("router")
        self._pulse = Pulse()
        folder = self._folder.path
        path, port_file = folder / "settings.yaml", folder / "ports.json"
        own = {"port_file": port_file, "stop_with_stdin": True, "beats_to": self._pulse.fd}
        config = self._config.model_copy(update=own)
        told = yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True))
        path.write_text(told, encoding="ascii")
        process = ChildProcess(
            [*module_command("router"), "--config", str(path)],
            port_file,
            environment=settings.environment_without(_PREFIX),  # all of it is in the file
            pass_fds=(self._pulse.fd,),
        )
        await process.start()
        self._process = process
        self._pulse.hand_over()

    async def listening(self) -> Addresses:
        return await self._started.listening()

    async def ended(self) -> int:
        return await self._started.ended()

    async def hanging(self) -> None:
        assert self._pulse is not None
        await self._pulse.until_silent(self._config.timers)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        process = self._process
        try:
            if process is not None and not await process.stop(self._patience_s):
                logger.warning("a process was killed: it did not drain", extra={"pid": process.pid})
        finally:
            if self._pulse is not None:
                self._pulse.close()
                self._pulse = None
            if self._folder is not None:
                self._folder.close()

    @property
    def _started(self) -> ChildProcess:
        assert self._process is not None
        return self._process


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
