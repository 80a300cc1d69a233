"""A real cluster for tests: every role its own process, real gRPC between them.

The processes are what a user starts (``python -m router`` and so on; ``fork_server`` says how),
found through their port files, observed through their Prometheus metrics,
and ended by pid. Their logs lie in the work folder.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from diptych.client import DiptychClient
from tests import metrics
from tests.fork_server import Started, lifeline, start_role
from tests.waiting import Patience, until

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 90.0
# Nobody balances load over a router, who would have to look away first.
UNBALANCED = {"timers.lame-duck-s": "0"}
HELD_OWNERS = ("running", "reserved", "leased", "quarantined")
HELD_GAUGES = {  # by role; all 0 when nothing is under way
    "prefill_worker": ("leases_open", "kv_tickets_valid", "kv_fetches_open"),
    "decode_worker": ("kv_reads_open", "kv_quarantine_age_seconds"),
}
HELD_GAUGES["soft_worker"] = HELD_GAUGES["prefill_worker"] + HELD_GAUGES["decode_worker"]


class Process:
    """One role's process; ``address`` and ``metrics_address`` once it listens.

    ``prefix`` is a command that executes the one after it, such as nsenter.
    """

    def __init__(
        self, module: str, name: str, work: Path, args: Sequence[str], prefix: Sequence[str] = ()
    ) -> None:
        self.module, self.name, self._work = module, name, work
        self._args = list(args)
        self._prefix = list(prefix)
        self._port_file = work / f"{name}.port.json"
        self.log_path = work / f"{name}.log"
        self.address = ""
        self.metrics_address = ""
        self.http_address = ""  # of a router, or of a batch server
        self._started: Started | None = None
        self.was_ended = False  # by the test: it may be gone

    def start(self, listen: str = "127.0.0.1:0") -> None:
        self._port_file.unlink(missing_ok=True)
        self.was_ended = False
        args = ["--listen", listen, "--metrics-port", "0"]
        if self.module in ("router", "batch_server"):
            args += ["--http-port", self._http_port(listen)]
        args += ["--port-file", str(self._port_file), *self._args]
        with self.log_path.open("ab") as log:
            if not self._prefix:
                self._started = start_role(self.module, args, log)
                return
            command = [*self._prefix, sys.executable, "-m", self.module, "--stop-with-stdin", *args]
            self._started = subprocess.Popen(command, stdin=lifeline(), stdout=log, stderr=log)

    def _http_port(self, listen: str) -> str:
        """What it was before, where gRPC's is: any other may be the very one of gRPC."""
        is_again = not listen.endswith(":0") and self.http_address
        return self.http_address.rpartition(":")[2] if is_again else "0"

    def wait_listening(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._port_file.exists():
            if self._started is not None and self._started.poll() is not None:
                raise RuntimeError(f"{self.name} exited early:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} does not listen:\n{self.log_tail()}")
            time.sleep(0.02)
        ports = json.loads(self._port_file.read_text())
        self.address, self.metrics_address = ports["address"], ports["metrics_address"]
        self.http_address = ports.get("http_address", "")

    @property
    def pid(self) -> int:
        assert self._started is not None
        return self._started.pid

    def signal(self, signum: signal.Signals) -> None:
        assert self._started is not None
        self._started.send_signal(signum)

    def stand_still(self) -> None:
        """Until it is killed, or ended."""
        self.signal(signal.SIGSTOP)

    def stop(self) -> int:
        """End it with SIGTERM (SIGKILL when that takes too long); its exit code."""
        self.ask_to_end()
        return self.wait_ended()

    def ask_to_end(self) -> None:
        """Send SIGTERM, if it has not ended."""
        assert self._started is not None
        self.was_ended = True
        if self._started.poll() is None:
            self._started.send_signal(signal.SIGCONT)
            self._started.terminate()

    def wait_ended(self) -> int:
        """Its exit code; SIGKILL ends it when its own end takes too long."""
        assert self._started is not None
        try:
            return self._started.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._started.kill()
            return self._started.wait()

    def kill(self) -> None:
        assert self._started is not None
        self.was_ended = True
        self._started.kill()
        self._started.wait()

    @property
    def alive(self) -> bool:
        return self._started is not None and self._started.poll() is None

    def check_alive(self) -> None:
        """Raises AssertionError if it has ended and the test did not end it."""
        assert self.alive or self.was_ended, f"{self.name} ended:\n{self.log_tail()}"

    def log_tail(self, num_lines: int = 30) -> str:
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def metrics(self) -> dict[str, float]:
        """Its Prometheus samples by ``name{labels}`` as exposed."""
        return metrics.scrape(self.metrics_address)

    def metric(self, prefix: str) -> float:
        """Sum of all samples whose key starts with ``prefix``."""
        return sum(value for key, value in self.metrics().items() if key.startswith(prefix))

    def blocks(self) -> dict[str, int]:
        return metrics.blocks_of(self.metrics())

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        blocks = self.blocks()
        return sum(blocks[owner] for owner in HELD_OWNERS)

    def held(self) -> dict[str, float]:
        """What this worker holds for anybody: blocks by owner, and each gauge of the hand-off.

        Only what is not 0. Raises AssertionError where it has no blocks at all.
        """
        samples = self.metrics()
        blocks = metrics.blocks_of(samples)
        assert sum(blocks.values()) > 0, f"{self.name} reports no blocks"
        held = {owner: float(blocks[owner]) for owner in HELD_OWNERS}
        for name in ("sequences_running", "sequences_waiting", *HELD_GAUGES[self.module]):
            held[name] = samples[f"diptych_{name}"]
        return {name: value for name, value in held.items() if value}

    def num_fds(self) -> int:
        return psutil.Process(self.pid).num_fds()

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)


@dataclass
class Cluster:
    """A router and its workers."""

    router: Process
    prefill: list[Process]
    decode: list[Process]

    @property
    def workers(self) -> list[Process]:
        return [*self.prefill, *self.decode]

    @property
    def processes(self) -> list[Process]:
        return [self.router, *self.workers]

    def client(self) -> DiptychClient:
        return DiptychClient(self.router.address)

    async def wait_baseline(self, within_s: float) -> None:
        """Wait until no worker holds anything, by metric; every process is there.

        ``within_s`` is time that this machine gave (see ``Patience``).
        Every block is free or cached; no sequence, lease, ticket, fetch or read is open, and
        nothing is in quarantine. Only a process that the test itself has killed or stopped
        may be missing.
        """
        patience = Patience(within_s)
        while True:
            for process in self.processes:
                process.check_alive()
            held = {worker.name: worker.held() for worker in self.workers if worker.alive}
            if not any(held.values()):
                return
            assert not patience.is_over(), f"still held after {within_s} s: {held}"
            await asyncio.sleep(0.05)

    async def start_again(self, process: Process) -> None:
        """Start what a first try of the test has killed, at its address, and wait for its proof."""
        if not process.alive:
            process.start(process.address)
            process.wait_listening()
            await self.wait_ready()

    async def wait_ready(self, num_pairs: int | None = None) -> None:
        """Wait until the router can place, and knows ``num_pairs`` proven pairs."""
        if num_pairs is None:
            num_pairs = len(self.prefill) * len(self.decode)
        deadline = time.monotonic() + START_TIMEOUT_S
        async with self.client() as client:
            while True:
                for process in self.processes:
                    assert process.alive, f"{process.name} ended:\n{process.log_tail()}"
                models = await client.models()
                if models and models[0].ready and self.num_proven_pairs() >= num_pairs:
                    return
                assert time.monotonic() < deadline, (
                    f"not ready: {models}, {self.num_proven_pairs()} pairs\n"
                    + "\n".join(p.log_tail(8) for p in self.processes)
                )
                await asyncio.sleep(0.1)

    def num_proven_pairs(self) -> int:
        return int(self.router.metric("diptych_router_proven_pairs"))

    async def eventually(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        """Wait until ``condition()``. Raises AssertionError that says ``what`` did not happen."""
        await until(condition, within_s, what)


@contextmanager
def running_cluster(
    work: Path,
    model: str,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    worker_flags: dict[str, str] | None = None,
    decode_flags: dict[str, str] | None = None,
    prefill_flags: dict[str, str] | None = None,
    per_decode_flags: Sequence[dict[str, str]] = (),
    router_flags: dict[str, str] | None = None,
    decode_module: str = "decode_worker",
) -> Iterator[Cluster]:
    """Start a cluster in ``work``; end every process of it, and check how each ended.

    ``decode_module``: ``soft_worker`` for workers of both roles. The machine's cores are shared
    out, as ``diptych up`` does.
    """
    work.mkdir(parents=True, exist_ok=True)
    num_threads = max(1, (os.cpu_count() or 1) // (num_prefill + num_decode))
    common = {"model": model, "num-threads": str(num_threads), **(worker_flags or {})}
    prefill = [
        Process(
            "prefill_worker", f"prefill-{i}", work, as_args({**common, **(prefill_flags or {})})
        )
        for i in range(num_prefill)
    ]
    own = [*per_decode_flags, *([{}] * (num_decode - len(per_decode_flags)))]
    decode = [
        Process(
            decode_module,
            f"decode-{i}",
            work,
            as_args({**common, **(decode_flags or {}), **own[i]}),
        )
        for i in range(num_decode)
    ]
    started: list[Process] = []
    try:
        for process in [*prefill, *decode]:
            process.start()
            started.append(process)
        for process in started:
            process.wait_listening()
        args = as_args({"model": model, **UNBALANCED, **(router_flags or {})})
        for process in prefill:
            args += ["--prefill", process.address]
        for process in decode:
            args += ["--decode", process.address]
        router = Process("router", "router", work, args)
        router.start()
        started.append(router)
        router.wait_listening()
        yield Cluster(router, prefill, decode)
    finally:
        lost = [p for p in started if not p.alive and not p.was_ended]
        ending = [p for p in reversed(started) if p.alive]
        if ending and ending[0].module == "router":  # so that no request is left to workers
            ending[0].stop()
        for process in ending:
            process.ask_to_end()
        codes = {process.name: process.wait_ended() for process in ending}
    assert not lost, "\n".join(f"{p.name} ended by itself:\n{p.log_tail()}" for p in lost)
    for process in started:
        code = codes.get(process.name, 0)
        assert code == 0, f"{process.name} exited with {code}:\n{process.log_tail()}"


@contextmanager
def another_router(
    cluster: Cluster, work: Path, model: Path, flags: dict[str, str]
) -> Iterator[Cluster]:
    """The same workers under a second router, which ends with the block."""
    args = as_args({"model": str(model), **UNBALANCED, **flags})
    for process in cluster.prefill:
        args += ["--prefill", process.address]
    for process in cluster.decode:
        args += ["--decode", process.address]
    router = Process("router", "router-2", work, args)
    router.start()
    try:
        router.wait_listening()
        yield Cluster(router, cluster.prefill, cluster.decode)
    finally:
        router.stop()


def as_args(flags: dict[str, str]) -> list[str]:
    """Of each setting its flag and value; a switch has no value."""
    return [part for key, value in flags.items() for part in (f"--{key}", value) if part]
