"""The worker's side of its transport agent's process: started, fed, watched, replaced."""

import logging
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from diptych.child_process import module_command
from kvtransfer.agents.base import AgentSettings
from kvtransfer.agents.wire import Channel, Kind, Message
from kvtransfer.transports.thread import TransferThread

logger = logging.getLogger(__name__)

_PING_INTERVAL_S = 1.0  # at the most: each wakes two processes that may have nothing to do
_START_S = 30.0  # that a new process has until it is ready: it maps and registers the pool

# What the process may know of our environment: where programs and libraries are, and how the
# transport libraries are set. Not our secrets: what runs there reads what peers send.
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG", "TZ")
_INHERITED_PREFIXES = (
    "PYTHON", "LC_", "UCX_", "UCXPY_", "NIXL_", "CUDA_", "NVIDIA_", "IBV_", "RDMAV_", "MLX",
)  # fmt: skip


class SharedPool(NamedTuple):
    """What the process maps."""

    fd: int
    block_bytes: int
    num_blocks: int
    read_only: bool = False  # no read of ours lands there: only peers read it


class AgentOwner(Protocol):
    """Hears of one process. Called on the transfer thread."""

    def on_message(self, message: Message) -> None:
        """Anything but PING and PONG."""
        ...

    def on_end(self, why: str) -> None:
        """The process is gone: nothing it was told to do still goes on."""
        ...


class Answers:
    """Whether a process answers what it is asked; pure. Seconds of one monotonic clock.

    One that nobody asked is not silent: who asks may itself have been late, or stopped.
    """

    def __init__(self, now: float, interval_s: float) -> None:
        """Its start is the first question; a check follows each ``interval_s``."""
        self._interval_s = interval_s
        self._asked_s: float | None = now  # the oldest question without an answer
        self._due_s = now + interval_s

    def heard(self) -> None:
        """It said something."""
        self._asked_s = None

    def check(self, now: float) -> float:
        """For how long an answer has been due. A late check tells nothing: both may have stood."""
        if now - self._due_s > self._interval_s:
            self._asked_s = None
        self._due_s = now + self._interval_s
        return 0.0 if self._asked_s is None else now - self._asked_s

    def asks(self, now: float) -> bool:
        """Whether it is to be asked now: no question waits for its answer."""
        if self._asked_s is not None:
            return False
        self._asked_s = now
        return True


class AgentProcess:
    """One process, from its start to its certain end. Transfer thread only.

    Ends when it dies, when it does not answer for ``answer_s``, or by ``kill``;
    ``on_end`` follows once, when the system says that it is gone.
    """

    def __init__(
        self,
        library: str,
        settings: AgentSettings,
        pool: SharedPool,
        owner: AgentOwner,
        thread: TransferThread,
        answer_s: float,
    ) -> None:
        """Start it; ``library`` names one that it knows. Raises OSError."""
        self._owner = owner
        self._thread = thread
        self._answer_s = answer_s
        self._interval_s = min(_PING_INTERVAL_S, answer_s / 2)
        self._why = ""
        self._has_ended = False
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    _command(library, settings, pool, theirs.fileno()),
                    pass_fds=(theirs.fileno(), pool.fd),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # nobody parses that
                    process_group=0,  # a terminal's Ctrl-C is its worker's matter
                    env=environment(os.environ),
                )
            self._ended_fd = os.pidfd_open(self._process.pid)
        except BaseException:
            ours.close()
            raise
        self._channel = Channel(ours)
        self._is_up = False
        self._is_watched = True  # its socket
        self._answers = Answers(time.monotonic(), self._interval_s)
        thread.watch(self._ended_fd, selectors.EVENT_READ, self._ended)
        thread.watch(ours, selectors.EVENT_READ, self._receive)
        thread.later(self._interval_s, self._check)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send, or keep until there is room; lost if the process is."""
        try:
            self._channel.send(message)
        except OSError:  # ``on_end`` follows
            return
        if self._channel.has_unsent and self._is_watched:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._thread.watch(self._channel.socket, both, self._exchange)

    def kill(self, why: str) -> None:
        """End it at once; ``on_end`` follows."""
        self._why = self._why or why
        self._process.kill()

    def close(self) -> None:
        """End it and wait until it is gone; ``on_end`` follows before this returns."""
        if not self._has_ended:
            self.kill("closed")
            self._ended()

    def _exchange(self) -> None:
        try:
            self._channel.flush()
        except OSError:
            return
        if not self._channel.has_unsent:
            self._thread.watch(self._channel.socket, selectors.EVENT_READ, self._receive)
        self._receive()

    def _receive(self) -> None:
        try:
            messages = self._channel.receive()
        except EOFError:
            # Dead or about to be. Only its end itself says that its reads are over.
            self._process.kill()
            self._unwatch()
            return
        if messages:
            self._answers.heard()
        for message in messages:
            self._is_up |= message.kind is Kind.READY
            if message.kind is not Kind.PONG:
                self._owner.on_message(message)

    def _check(self) -> None:
        """Each ``_interval_s``: has it answered?"""
        if self._process.returncode is not None or self._why:
            return
        self._receive()  # what came while this thread was late itself
        now = time.monotonic()
        silent_s = self._answers.check(now)
        if silent_s > (self._answer_s if self._is_up else _START_S):
            self.kill(f"no answer for {silent_s:.1f} s")
            return
        if self._answers.asks(now):
            self.send(Message(Kind.PING))
        self._thread.later(self._interval_s, self._check)

    def _ended(self) -> None:
        code = self._process.wait()
        self._has_ended = True
        self._thread.unwatch(self._ended_fd)
        os.close(self._ended_fd)
        self._receive()  # what it had still said
        self._unwatch()
        self._channel.socket.close()
        how = f"signal {-code}" if code < 0 else f"code {code}"
        self._owner.on_end(self._why or how)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._thread.unwatch(self._channel.socket)
            self._is_watched = False


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """What the process gets of our environment; numpy's threads are not wanted there."""
    inherited = {
        name: value
        for name, value in ours.items()
        if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }
    return {**inherited, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _command(library: str, settings: AgentSettings, pool: SharedPool, socket_fd: int) -> list[str]:
    numbers = {
        "parent-pid": os.getpid(),
        "socket-fd": socket_fd,
        "pool-fd": pool.fd,
        "block-bytes": pool.block_bytes,
        "num-blocks": pool.num_blocks,
        "read-only": int(pool.read_only),
    }
    texts = {name.replace("_", "-"): value for name, value in settings._asdict().items()}
    arguments = [f"--{name}={value}" for name, value in {**numbers, **texts}.items()]
    return [*module_command("kvtransfer.agents.main"), f"--library={library}", *arguments]
