"""A role's process by a fork of one that has imported the role already, and done nothing else.

``python -m decode_worker`` computes for three seconds before it can run a step, nearly all of it
importing torch and the compiled loops, and a test run starts hundreds of workers. So there is one
process for workers here that imports them once, and forks, and one each for routers and for batch
servers, which know of no torch. What is forked goes on like ``python -m`` would:
the same module as ``__main__``, arguments of its own. It is a process like any other, with its own
threads, signals and memory. It ends as ``multiprocessing`` ends what it has forked, after its
threads and exit handlers: to take the shared modules apart would copy each of their pages, which
costs twice as much as the start. ``python -m`` itself is tested too, by ``test_up.py`` and
``test_process.py`` among others.
"""

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, NoReturn, Protocol

from diptych.loading import loading

_MAX_MESSAGE_BYTES = 1 << 16


class Started(Protocol):
    """What a test does with a process that it has started; a Popen is one."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Forked:
    """A process that a server has forked, and whose end it tells."""

    def __init__(self, answers: socket.socket) -> None:
        self._answers = answers
        self._returncode: int | None = None
        self.pid = int(answers.recv(64))

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self._returncode is None and select.select([self._answers], [], [], 0)[0]:
            self._ended()
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired where it runs for longer."""
        if self._returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._ended()
        assert self._returncode is not None
        return self._returncode

    def send_signal(self, sig: int, /) -> None:
        """Nothing where it has ended: the server reaps it, and tells so a moment later."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self) -> None:
        self._returncode = int(self._answers.recv(64))
        self._answers.close()


class ForkServer:
    """The process that has imported the roles ``modules``.

    However the test run ends, it ends too, and ends what is left of what it has forked.
    """

    def __init__(self, *modules: str) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = dict(os.environ)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), *modules]
            self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        atexit.register(self.close)

    @property
    def is_usable(self) -> bool:
        """Whether ``python -m`` would be given the same environment now, but for what is moot."""
        return _telling(os.environ) == _telling(self._environment)

    def start(self, module: str, args: list[str], log: BinaryIO) -> Forked:
        """Fork once, as ``module``; standard output and error go to ``log``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked = json.dumps([os.getcwd(), module, *args]).encode()
        with theirs:
            socket.send_fds(self._requests, [asked], [log.fileno(), theirs.fileno()])
        return Forked(ours)

    def close(self) -> None:
        """End it. Idempotent."""
        self._requests.close()
        self._server.wait()


# What changes while tests run, and says nothing to a role: which test runs; where torch would cache
# what it compiles, once a test has loaded its compiler; what an agent within a test's process told
# UCX, which a worker tells its own agent itself.
_MOOT = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "UCX_", "NIXL_LOG_LEVEL")
_KERNELS = "diptych.engine.backends.cpu.kernels"
# What a worker imports of them when it loads a model of float32.
_USED_LOOPS = (
    "int8_slot_loop",
    "layer_loops",
    "paged_loops",
    "prefill_loop",
    "program",
    "slot_loop",
    "thin_matmul",
    "wide_matmul",
)
_ROUTERS = ("router",)
_WORKERS = ("prefill_worker", "decode_worker", "soft_worker")
_BATCHES = ("batch_server",)  # apart: it needs packages that are not on every machine
_servers: dict[str, ForkServer] = {}  # by role


def start_role(
    module: str, args: list[str], log: BinaryIO, *, imports_like: str | None = None
) -> Started:
    """Start ``python -m module args``, by a fork where that is the same.

    ``imports_like``: of a module that is no role, the one that has imported what it needs.
    """
    role = imports_like or module
    if role not in _servers:
        for together in ((_WORKERS, _ROUTERS), (_BATCHES,)):  # they import side by side
            if any(role in roles for roles in together):
                for roles in together:
                    _servers.update(dict.fromkeys(roles, ForkServer(*roles)))
    server = _servers.get(role)
    if server is not None and server.is_usable:
        return server.start(module, args, log)
    command = [sys.executable, "-m", module, "--stop-with-stdin", *args]
    return subprocess.Popen(command, stdin=lifeline(), stdout=log, stderr=log)


def _telling(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_MOOT)}


@cache
def lifeline() -> int:
    """A pipe that ends when this process does, whatever ends it."""
    reading, _ = os.pipe()
    return reading


def _serve(requests: socket.socket) -> list[str]:
    """Fork for every request. Returns in what was forked, with its module and arguments."""
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    answers: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _tell_ended(answers)
        if requests.fileno() in readable:
            message, fds, _, _ = socket.recv_fds(requests, _MAX_MESSAGE_BYTES, 2)
            if not message:
                _end(answers)
                sys.exit()
            log, answer = fds
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (woken, wakes, answer, *(a.detach() for a in answers.values())):
                    os.close(fd)
                requests.close()
                return _become(log, *json.loads(message))
            os.close(log)
            answers[pid] = socket.socket(fileno=answer)
            _tell(answers[pid], pid)


def _end(answers: dict[int, socket.socket]) -> None:
    """The test run is over, or was broken off: nothing outlives it."""
    for pid in answers:
        os.kill(pid, signal.SIGKILL)
    _tell_ended(answers, wait=True)


def _tell_ended(answers: dict[int, socket.socket], *, wait: bool = False) -> None:
    while answers:
        pid, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
        if not pid:
            return
        with answers.pop(pid) as answer:
            _tell(answer, os.waitstatus_to_exitcode(status))


def _tell(answer: socket.socket, number: int) -> None:
    with suppress(ConnectionError):  # nobody asks any more
        answer.send(str(number).encode())


def _become(log: int, folder: str, *command: str) -> list[str]:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, number)
    for fd in (nothing, log):
        os.close(fd)
    os.chdir(folder)
    return list(command)


def _main(fd: int, modules: Sequence[str]) -> NoReturn:
    # A Ctrl-C reaches this process with all the others: it ends when the test run does.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with loading():
        for each in modules:
            import_module(f"{each}.app")
        if "decode_worker" in modules and find_spec("numba") is not None:
            for name in _USED_LOOPS:
                import_module(f"{_KERNELS}.{name}")
    module, *args = _serve(socket.socket(fileno=fd))
    signal.signal(signal.SIGINT, on_interrupt)
    sys.argv = [str(Path(module) / "__main__.py"), *args]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        if isinstance(ending.code, int):
            _leave(ending.code)
        raise
    sys.exit()


def _leave(code: int) -> NoReturn:
    """End like the interpreter, but for its modules: they are left to the system."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
