"""A router of several processes that share its ports: their parent.

Each is a router of its own, to workers and to clients, whose connections the kernel spreads over
them. A process that ends by itself, or is ended as it hangs, is told of and replaced. Until all
have listened, one that cannot start ends them all: its settings are theirs. Later it takes none of
the others with it, and is tried again, as often as it takes and ever more rarely.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from diptych.child_process import Addresses
from diptych.errors import ConfigurationError
from diptych.process import EXIT_CONFIGURATION, Ready
from diptych.service_host import host_of, write_port_file
from router.app import serve as serve_alone
from router.child import Child, RouterProcess, config_of
from router.config import RouterConfig

logger = logging.getLogger(__name__)

_SLACK_S = 10.0  # beyond what a router takes to drain, until it is killed
_SETTLED_S = 60.0  # who listened this long did not die of what ended the one before
_LATE_S = 60.0  # who has not listened by then is told of, each time: it may load for longer
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class ProcessFailedError(Exception):
    """A process ended before it listened."""


class Processes:
    """Keeps so many children alive. Event loop only; its owner runs it once.

    Invariant: however ``run`` ends, none of them is left.
    """

    def __init__(
        self,
        count: int,
        make: Callable[[int], Child],
        on_listening: Callable[[Sequence[Addresses]], None],
    ) -> None:
        """``make`` gets an index below ``count``; ``on_listening`` where all listen, each time
        that another does.
        """
        self._make = make
        self._on_listening = on_listening
        self._addresses: list[Addresses | None] = [None] * count
        self._were_ready = False

    @property
    def were_ready(self) -> bool:
        """Whether all have listened, and that was told; some may have died since."""
        return self._were_ready

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop`` is set and all have ended.

        Raises (in a group) ConfigurationError, OSError, ProcessFailedError: one could not be
        started, and not all had listened yet.
        """
        async with asyncio.TaskGroup() as tasks:
            keeping = [
                tasks.create_task(self._keep(index), name=f"process-{index}")
                for index in range(len(self._addresses))
            ]
            await stop.wait()
            for task in keeping:
                task.cancel()

    async def _keep(self, index: int) -> None:
        """One after another; the more of them are short-lived, the longer until the next."""
        pause_s = 0.0
        while True:
            if await self._live(index) >= _SETTLED_S:
                pause_s = 0.0
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)

    async def _live(self, index: int) -> float:
        """A process from its start to its end; for how long it listened, s."""
        clock = asyncio.get_running_loop().time
        child = self._make(index)
        try:
            await child.start()
            await self._wait_listening(index, child)
            since_s = clock()
            code = await self._until_ended(index, child)
            listened_s = clock() - since_s
        except (ConfigurationError, OSError, ProcessFailedError) as error:
            if not self._were_ready:
                raise
            logger.error(
                "a process of the router could not be replaced; it is tried again",
                extra={"index": index, "error": str(error)},
            )
            return 0.0
        finally:
            await child.stop()
        logger.error(
            "a process of the router ended by itself; another takes its place",
            extra={"index": index, "pid": child.pid, "exit_code": code},
        )
        return listened_s

    async def _until_ended(self, index: int, child: Child) -> int:
        """Its exit code; one that hangs is ended."""
        async with asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(child.ended(), name="ending")
            hanging = tasks.create_task(child.hanging(), name="hanging")
            await asyncio.wait((ending, hanging), return_when=asyncio.FIRST_COMPLETED)
            hanging.cancel()
            if not ending.done():
                extra = {"index": index, "pid": child.pid}
                logger.error("a process of the router hangs: it is killed", extra=extra)
                child.kill()
        return ending.result()

    async def _wait_listening(self, index: int, child: Child) -> None:
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(child.listening(), name="listening")
            ending = tasks.create_task(child.ended(), name="ending")
            both, first = (listening, ending), asyncio.FIRST_COMPLETED
            while not (await asyncio.wait(both, timeout=_LATE_S, return_when=first))[0]:
                extra = {"index": index, "pid": child.pid}
                logger.warning("a process of the router does not listen yet", extra=extra)
            listening.cancel()
            ending.cancel()
        if not listening.cancelled():
            logger.info("a process listens", extra={"index": index, "pid": child.pid})
            self._addresses[index] = listening.result()
            known = [each for each in self._addresses if each is not None]
            if len(known) == len(self._addresses):
                self._on_listening(known)
                self._were_ready = True
            return
        code = ending.result()
        if code == EXIT_CONFIGURATION:  # it has said why
            raise ConfigurationError(f"--processes: process {index} has a wrong setting")
        raise ProcessFailedError(f"process {index} ended with {code} before it listened")


async def serve(config: RouterConfig, stop: asyncio.Event, ready: Ready) -> None:
    """Serve until ``stop`` is set, then drain; in this process, or in as many as are wanted.

    Raises ConfigurationError.
    """
    if config.processes == 1:
        await serve_alone(config, stop, ready)
    else:
        await _serve_together(config, stop, ready)


async def _serve_together(config: RouterConfig, stop: asyncio.Event, ready: Ready) -> None:
    host, port = host_of(config.listen), int(config.listen.rpartition(":")[2])
    timers = config.timers
    patience_s = timers.leave_s + 2 * timers.lame_duck_s + timers.drain_s + _SLACK_S
    with ExitStack() as held:
        grpc = held.enter_context(reserve(host, port, "--listen"))
        http_port = config.http_port
        if config.http:
            http = held.enter_context(reserve(host, http_port, "--http-port"))
            http_port = http.getsockname()[1]
        grpc_port: int = grpc.getsockname()[1]

        def make(index: int) -> Child:
            return RouterProcess(config_of(config, index, grpc_port, http_port), patience_s)

        def on_listening(addresses: Sequence[Addresses]) -> None:
            if processes.were_ready:
                _tell_again(config.port_file, addresses)
            else:
                _tell(config.port_file, addresses)
                ready(grpc_port)

        processes = Processes(config.processes, make, on_listening)
        await processes.run(stop)


def _tell(port_file: Path | None, addresses: Sequence[Addresses]) -> None:
    """Raises ConfigurationError."""
    if port_file is not None:
        write_port_file(port_file, ports_of(addresses))


def _tell_again(port_file: Path | None, addresses: Sequence[Addresses]) -> None:
    """Nobody's streams end because this cannot be told."""
    try:
        _tell(port_file, addresses)
    except ConfigurationError as error:
        logger.error("the port file is out of date", extra={"error": error.message})


def ports_of(addresses: Sequence[Addresses]) -> Mapping[str, object]:
    """What the parent's port file says: the first process's, and where each tells its metrics."""
    metrics = [each["metrics_address"] for each in addresses]
    return {**addresses[0], "metrics_addresses": metrics}


def reserve(host: str, port: int, setting: str) -> socket.socket:
    """A socket that holds a port for processes that share it, and takes no connections.

    Raises ConfigurationError: somebody else has it, though they may share it too.
    """
    try:
        flags = socket.AI_PASSIVE | socket.AI_NUMERICSERV
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            address = alone.getsockname()
        held = socket.socket(family, kind, protocol)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(address)
        except OSError:
            held.close()
            raise
    except OSError as error:
        raise ConfigurationError(
            f"{setting}: cannot bind {host}:{port}: {error.strerror}"
        ) from None
    return held
