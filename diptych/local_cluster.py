"""A cluster on this machine: one child process per role, found through port files.

Owns the children: starts them, reads their output, and ends every one of them
whatever happens. Each child's standard input is a pipe from this process; it
ends when this process does, even by SIGKILL, and the child then stops by
itself (``--stop-with-stdin``). Used by ``diptych up`` and the demo, on asyncio.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from diptych.rpc import channel
from diptych.v1 import inference_pb2, inference_pb2_grpc

T = TypeVar("T")

TAIL_LINES = 20
STOP_TIMEOUT_S = 30.0
PAIRS_PATIENCE_S = 15.0
_POLL_S = 0.1

Show = Callable[[str, str], None]


class ChildFailedError(Exception):
    """A child ended by itself; ``tail`` holds its last lines."""

    def __init__(self, name: str, code: int, tail: Sequence[str]) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        super().__init__(f"{name} {how}")
        self.name, self.code, self.tail = name, code, list(tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """Which processes a local cluster has. ``num_prefill`` 0: decode workers do everything."""

    model: str
    num_prefill: int = 1
    num_decode: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    common_args: tuple[str, ...] = ()
    worker_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()


class Child:
    """One role's process. Its addresses are known once it wrote its port file."""

    def __init__(self, name: str, module: str, args: Sequence[str], folder: Path) -> None:
        self.name = name
        self.address = ""
        self.metrics_address = ""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._port_file = folder / f"{name}.json"
        self._command = [sys.executable, "-m", module, *args]
        self._command += ["--metrics-port", "0", "--port-file", str(self._port_file)]
        self._command += ["--stop-with-stdin"]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id, once started."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it in a session of its own, so that Ctrl-C reaches only the parent."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )

    async def follow(self, show: Show) -> int:
        """Show its lines until it has ended; its exit code (negative: the signal)."""
        assert self._process is not None
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._show(line, show)
        if rest:
            self._show(rest, show)
        return await self._process.wait()

    async def listening(self) -> None:
        """Wait until it accepts connections."""
        while not self._port_file.exists():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(_POLL_S)
        ports = json.loads(self._port_file.read_text())
        self.address, self.metrics_address = ports["address"], ports["metrics_address"]

    async def stop(self, timeout_s: float) -> None:
        """Ask it to end; end it after ``timeout_s``."""
        if self._process is None:
            return
        try:
            self._process.terminate()
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except ProcessLookupError:
            await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _show(self, raw: bytes, show: Show) -> None:
        line = readable(raw.decode(errors="replace"))
        self.tail.append(line)
        show(self.name, line)


class LocalCluster:
    """The children of one :class:`ClusterPlan`. Made and ended by :func:`run_cluster`."""

    def __init__(self, plan: ClusterPlan, folder: Path, show: Show) -> None:
        self._show = show
        self._num_pairs = plan.num_prefill * plan.num_decode
        self._stopping = False
        shares = iter(core_shares(usable_cores(), plan.num_prefill + plan.num_decode))

        def worker(name: str, module: str) -> Child:
            args = ["--listen", f"{plan.host}:0", "--model", plan.model, *next(shares)]
            return Child(name, module, [*args, *plan.common_args, *plan.worker_args], folder)

        self.prefill = [worker(f"prefill-{i}", "prefill_worker") for i in range(plan.num_prefill)]
        self.decode = [worker(f"decode-{i}", "decode_worker") for i in range(plan.num_decode)]
        self._plan, self._folder = plan, folder
        self.router: Child | None = None

    @property
    def workers(self) -> list[Child]:
        """All workers, in the order they were started."""
        return [*self.prefill, *self.decode]

    @property
    def children(self) -> list[Child]:
        """All processes, the router first: the order in which they are stopped."""
        return [*([self.router] if self.router else []), *self.workers]

    @property
    def address(self) -> str:
        """host:port of the router."""
        assert self.router is not None
        return self.router.address

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the workers, learn their ports, start the router on them."""
        for child in self.workers:
            await self._start(child, tasks)
        for child in self.workers:
            await child.listening()
        plan = self._plan
        args = ["--listen", f"{plan.host}:{plan.port}", "--model", plan.model]
        for child in self.prefill:
            args += ["--prefill", child.address]
        for child in self.decode:
            args += ["--decode", child.address]
        self.router = Child(
            "router", "router", [*args, *plan.common_args, *plan.router_args], self._folder
        )
        await self._start(self.router, tasks)
        await self.router.listening()

    async def ready(self) -> None:
        """Wait until the router can place requests and every pair of workers is proven.

        Pairs that are not proven 15 s after the first placement are reported
        and left: requests go elsewhere.
        """
        async with channel(self.address) as to_router:
            stub = inference_pb2_grpc.InferenceStub(to_router)
            while True:
                answer = await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5)
                if any(model.ready for model in answer.models):
                    break
                await asyncio.sleep(_POLL_S)
        deadline = time.monotonic() + PAIRS_PATIENCE_S
        while (proven := await self.num_proven_pairs()) < self._num_pairs:
            if time.monotonic() > deadline:
                self._show("up", f"only {proven} of {self._num_pairs} pairs of workers are proven")
                return
            await asyncio.sleep(_POLL_S)

    async def num_proven_pairs(self) -> int:
        """How many (prefill, decode) pairs the router may use, by its metric."""
        assert self.router is not None
        text = await asyncio.to_thread(_get, f"http://{self.router.metrics_address}/metrics")
        for line in text.splitlines():
            if line.startswith("diptych_router_proven_pairs "):
                return int(float(line.rpartition(" ")[2]))
        return 0

    async def stop(self) -> None:
        """End all children: the router, so that nothing new comes, then the workers."""
        self._stopping = True
        router, workers = self.children[: -len(self.workers)], self.workers
        for group in (router, workers):
            async with asyncio.TaskGroup() as tasks:
                for child in group:
                    tasks.create_task(child.stop(STOP_TIMEOUT_S), name=f"stop-{child.name}")

    def kill(self) -> None:
        """End all children at once."""
        for child in self.children:
            child.kill()

    async def _start(self, child: Child, tasks: asyncio.TaskGroup) -> None:
        await child.start()
        tasks.create_task(self._watch(child), name=f"watch-{child.name}")

    async def _watch(self, child: Child) -> None:
        code = await child.follow(self._show)
        if not self._stopping:
            raise ChildFailedError(child.name, code, child.tail)


async def run_cluster(
    plan: ClusterPlan, show: Show, use: Callable[[LocalCluster], Awaitable[T]]
) -> T:
    """Start a cluster, run ``use`` on it once it listens, and end every process of it.

    Raises:
        ChildFailedError: a child ended by itself meanwhile; the others are ended.
    """
    with tempfile.TemporaryDirectory(prefix="diptych-") as folder:
        cluster = LocalCluster(plan, Path(folder), show)
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    await cluster.start(tasks)
                    return await use(cluster)
                finally:
                    await cluster.stop()
        except BaseExceptionGroup as group:
            failed = group.subgroup(ChildFailedError)
            raise _first(failed or group) from None
        finally:
            cluster.kill()


def usable_cores() -> list[int]:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def core_shares(cores: Sequence[int], num_workers: int) -> list[list[str]]:
    """Worker flags that give each worker cores of its own, as far as they go.

    With more workers than cores each runs one thread, anywhere.
    """
    each = len(cores) // max(1, num_workers)
    if num_workers == 1:
        return [[]]
    if each == 0:
        return [["--num-threads", "1"]] * num_workers
    shares = [list(cores[i * each : (i + 1) * each]) for i in range(num_workers)]
    for index, core in enumerate(cores[num_workers * each :]):
        shares[index].append(core)
    return [
        ["--num-threads", str(len(share)), "--cpus", ",".join(map(str, share))] for share in shares
    ]


def readable(line: str) -> str:
    """A child's JSON log line as text: the message, then its fields."""
    try:
        fields = json.loads(line)
        level, message = fields.pop("level"), fields.pop("message")
    except (ValueError, AttributeError, KeyError, TypeError):
        return line
    for name in ("time", "service", "logger"):
        fields.pop(name, None)
    exception = fields.pop("exception", "")
    details = "".join(f" {name}={value}" for name, value in fields.items())
    mark = "" if level in ("info", "debug") else f"{level}: "
    return f"{mark}{message}{details}" + (f"\n{exception}" if exception else "")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as reply:
        text: str = reply.read().decode()
        return text
