"""A cluster on this machine: one child process per role, found through port files.

Owns the children: starts them, reads their output, and ends every one of them
whatever happens. Each child's standard input is a pipe from this process; it
ends when this process does, even by SIGKILL, and the child then stops by
itself (``--stop-with-stdin``). Used by ``diptych up`` and the demo, on asyncio.
"""

import asyncio
import os
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import grpc

from diptych.cli.cluster_child import Child, ChildFailedError, Show
from diptych.errors import ConfigurationError
from diptych.own_folder import OwnFolder
from diptych.rpc.channel import open_channel
from diptych.rpc.status import from_rpc_error
from diptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

T = TypeVar("T")

STOP_TIMEOUT_S = 30.0
PAIRS_PATIENCE_S = 15.0
_POLL_S = 0.1
_ANSWER_S = 5.0
_NOTICED_S = 0.5


class BatchPlan(NamedTuple):
    """A batch server beside the router."""

    http_port: int
    database: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """Which processes a local cluster has.

    ``num_prefill`` and ``num_soft`` 0: decode workers do everything.
    """

    model: str
    num_prefill: int = 1
    num_decode: int = 1
    num_soft: int = 0  # workers of both roles
    host: str = "127.0.0.1"
    port: int = 0
    http_port: int = 0
    batch: BatchPlan | None = None
    common_args: tuple[str, ...] = ()
    worker_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()

    @property
    def num_pairs(self) -> int:
        """Of one that computes prompts and one that decodes; nobody pulls from itself."""
        num_soft = self.num_soft
        return (self.num_prefill + num_soft) * (self.num_decode + num_soft) - num_soft


class LocalCluster:
    """The children of one :class:`ClusterPlan`. Made and ended by :func:`run_cluster`."""

    def __init__(self, plan: ClusterPlan, folder: Path, show: Show) -> None:
        self._show = show
        self._stopping = False
        num_workers = plan.num_prefill + plan.num_decode + plan.num_soft
        shares = iter(core_shares(usable_cores(), num_workers))

        def worker(name: str, module: str) -> Child:
            args = ["--listen", f"{plan.host}:0", "--model", plan.model, *next(shares)]
            return Child(name, module, [*args, *plan.common_args, *plan.worker_args], folder)

        self.prefill = [worker(f"prefill-{i}", "prefill_worker") for i in range(plan.num_prefill)]
        self.decode = [worker(f"decode-{i}", "decode_worker") for i in range(plan.num_decode)]
        self.soft = [worker(f"soft-{i}", "soft_worker") for i in range(plan.num_soft)]
        self._plan, self._folder = plan, folder
        self.router: Child | None = None
        self.batch: Child | None = None

    @property
    def workers(self) -> list[Child]:
        """All workers, in the order they were started."""
        return [*self.prefill, *self.decode, *self.soft]

    @property
    def children(self) -> list[Child]:
        """All processes, in the order in which they are stopped: who asks before who is asked."""
        asking = [each for each in (self.batch, self.router) if each is not None]
        return [*asking, *self.workers]

    @property
    def address(self) -> str:
        """host:port of the router."""
        assert self.router is not None
        return self.router.address

    @property
    def http_address(self) -> str:
        """host:port of the router's HTTP API; empty where it is off."""
        assert self.router is not None
        return self.router.http_address

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the workers, learn their ports, start the router on them."""
        for child in self.workers:
            await self._start(child, tasks)
        for child in self.workers:
            await child.listening()
            tasks.create_task(self._show_loading(child), name=f"loading-{child.name}")
        plan = self._plan
        args = ["--listen", f"{plan.host}:{plan.port}", "--model", plan.model]
        args += ["--http-port", str(plan.http_port)]
        args += ["--timers.leave-s", "0"]  # there is no other router to go to
        for child in self.prefill:
            args += ["--prefill", child.address]
        for child in [*self.decode, *self.soft]:  # which roles these have they say themselves
            args += ["--decode", child.address]
        self.router = Child(
            "router", "router", [*args, *plan.common_args, *plan.router_args], self._folder
        )
        await self._start(self.router, tasks)
        await self.router.listening()
        if plan.batch is not None:
            args = ["--listen", f"{plan.host}:0", "--http-port", str(plan.batch.http_port)]
            args += [*plan.common_args, "--router", f"http://{self.http_address}"]
            database = ("DIPTYCH_BATCH_SERVER_DATABASE", plan.batch.database)  # with a password
            self.batch = Child("batch", "batch_server", args, self._folder, database)
            await self._start(self.batch, tasks)
            await self.batch.listening()

    async def ready(self) -> inference_pb2.Model:
        """Wait until the router can place requests and every pair of workers is proven.

        Returns the model that is served.
        Pairs that are not proven 15 s after the first placement are reported
        and left: requests go elsewhere.

        Raises ConfigurationError: the router does not answer us, as where it asks for a key.
        """
        async with open_channel(self.address) as to_router:
            while True:
                served = await _served(to_router)
                if served:
                    break
                await asyncio.sleep(_POLL_S)
        deadline = time.monotonic() + PAIRS_PATIENCE_S
        while (proven := await self.num_proven_pairs()) < self._plan.num_pairs:
            if time.monotonic() > deadline:
                self._show(
                    "up", f"only {proven} of {self._plan.num_pairs} pairs of workers are proven"
                )
                break
            await asyncio.sleep(_POLL_S)
        return served[0]

    async def num_proven_pairs(self) -> int:
        """How many (prefill, decode) pairs the router may use, by its metric."""
        assert self.router is not None
        try:
            url = f"http://{self.router.metrics_address}/metrics"
            text = await asyncio.to_thread(_get, url)
        except OSError:  # the machine is busy; who watches the process says where it ended
            return 0
        for line in text.splitlines():
            if line.startswith("diptych_router_proven_pairs "):
                return int(float(line.rpartition(" ")[2]))
        return 0

    async def stop(self) -> None:
        """End all children: who asks, so that nothing new comes, then the workers."""
        self._stopping = True
        for group in ([self.batch], [self.router], self.workers):
            async with asyncio.TaskGroup() as tasks:
                for child in filter(None, group):
                    tasks.create_task(child.stop(STOP_TIMEOUT_S), name=f"stop-{child.name}")

    def kill(self) -> None:
        """End all children at once."""
        for child in self.children:
            child.kill()

    async def _start(self, child: Child, tasks: asyncio.TaskGroup) -> None:
        await child.start()
        tasks.create_task(self._watch(child), name=f"watch-{child.name}")

    async def _show_loading(self, child: Child) -> None:
        shown = ""
        request = worker_pb2.WatchRequest(router_incarnation="local-cluster")
        async with open_channel(child.address) as to_worker:
            try:
                async for state in worker_pb2_grpc.WorkerStub(to_worker).Watch(request):
                    ready = state.state == worker_pb2.SERVING_STATE_READY
                    message = "ready" if ready else by_quarters(state.message)
                    if message and message != shown:
                        self._show(child.name, message)
                        shown = message
                    if ready:
                        return
            except grpc.RpcError:  # it ended: whoever watches the process says so
                return

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
        ConfigurationError: there is nowhere to write a file, or see ``LocalCluster.ready``.
    """
    with closing(_folder()) as folder:
        cluster = LocalCluster(plan, folder.path, show)
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


def _folder() -> OwnFolder:
    """For port files. Raises ConfigurationError."""
    try:
        return OwnFolder("up")
    except OSError as error:
        raise ConfigurationError(
            f"no folder for temporary files (the variable TMPDIR names one): {error.strerror}"
        ) from None


async def _served(to_router: grpc.aio.Channel) -> list[inference_pb2.Model]:
    """The models that requests can be placed for. Raises ConfigurationError."""
    stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(to_router)
    try:
        answer = await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=_ANSWER_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # the machine is busy
            return []
        await asyncio.sleep(_NOTICED_S)  # who watches the process says it where it ended
        why = from_rpc_error(error).message
        raise ConfigurationError(f"the router does not answer diptych up: {why}") from None
    return [model for model in answer.models if model.ready]


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


def by_quarters(message: str) -> str:
    """Progress (``stage: 37%``) rounded down to quarters, so that it is shown four times."""
    stage, _, ratio = message.rpartition(" ")
    if not ratio.endswith("%") or not ratio[:-1].isdigit():
        return message
    return f"{stage} {int(ratio[:-1]) // 25 * 25} %"


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _get(url: str) -> str:
    """Without a proxy, whatever the environment says. Raises OSError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=_ANSWER_S) as reply:
        text: str = reply.read().decode()
        return text
