"""What a cluster costs when nothing is asked of it, and that working does not make it grow."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.load import Job, run_all
from tests.cluster import Cluster, Process, running_cluster
from tests.notes import Note
from tests.transports import AGENTS

SETTLE_S = 3.0
IDLE_S = 10.0
MAX_WAKEUPS = 2000  # in that time; measured: 774 to 1,032, which took 0.8 % of a core
SPINNING_CORES = 0.25  # a thread that never waits takes a whole one
NUM_BEFORE, NUM_REQUESTS = 500, 2000
MAX_GROWTH_BYTES = 8 * 2**20


@pytest.fixture(scope="module", params=AGENTS)
def cluster(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """One prefill and one decode worker, each on a core of its own if there are two."""
    cores = sorted(psutil.Process().cpu_affinity())
    with running_cluster(
        tmp_path_factory.mktemp("cluster"),
        str(tiny_model),
        worker_flags={
            "num-blocks": "128",
            "max-model-len": "128",
            "transfer.transports": request.param,
        },
        prefill_flags={"cpus": str(cores[0])},
        decode_flags={"cpus": str(cores[-1])},
        router_flags={"local-prefill-below-tokens": "0"},
    ) as cluster:
        yield cluster


def jobs(num: int, rng: random.Random) -> list[Job]:
    """Prompts that nobody has seen, so that every request is prefilled and handed over."""
    return [
        Job(
            token_ids=tuple(rng.randrange(3, 480) for _ in range(rng.randint(17, 48))),
            max_tokens=3,
            temperature=0.0,
            seed=1,
        )
        for _ in range(num)
    ]


def parts(cluster: Cluster) -> dict[str, psutil.Process]:
    """Every process of the cluster, with those that workers started (a transport's agent)."""
    found = {}
    for process in cluster.processes:
        own = psutil.Process(process.pid)
        found[process.name] = own
        for child in own.children(recursive=True):
            found[f"{process.name}'s child {child.pid}"] = child
    return found


async def test_requests_leave_nothing_behind(cluster: Cluster) -> None:
    """RSS of each process after 2,000 requests and after 500: at most 8 MiB apart."""
    await cluster.wait_ready()
    processes = parts(cluster)
    assert len(processes) == len(cluster.processes) + len(cluster.workers)
    rng = random.Random(3)
    rss: list[dict[str, int]] = []
    for num in (NUM_BEFORE, NUM_REQUESTS - NUM_BEFORE):
        answers = await run_all(cluster, jobs(num, rng), concurrency=16)
        assert not [answer.error for answer in answers if answer.error is not None]
        await cluster.wait_baseline(within_s=10)
        rss.append({name: process.memory_info().rss for name, process in processes.items()})
    before, after = rss
    growth = {name: after[name] - before[name] for name in before}
    assert max(growth.values()) <= MAX_GROWTH_BYTES, growth


async def test_an_idle_cluster_rests(cluster: Cluster, note: Note) -> None:
    """Each process with its children, pair connected: wakes a few times for each heartbeat.

    What a wake-up takes depends on the machine, how many there are does not. A thread that
    polls without waiting does not wake up at all: that is seen by what it takes.
    """
    await cluster.wait_ready()
    await asyncio.sleep(SETTLE_S)
    before = {process.name: num_wakeups(process) for process in cluster.processes}
    began_s = {process.name: cpu_s(process) for process in cluster.processes}
    await asyncio.sleep(IDLE_S)
    wakeups = {p.name: num_wakeups(p) - before[p.name] for p in cluster.processes}
    cores = {p.name: round((cpu_s(p) - began_s[p.name]) / IDLE_S, 4) for p in cluster.processes}
    note(f"idle for {IDLE_S:.0f} s: wake-ups {wakeups}, cores {cores}")
    assert cluster.num_proven_pairs() == 1
    assert max(wakeups.values()) <= MAX_WAKEUPS, wakeups
    assert max(cores.values()) < SPINNING_CORES, cores


def num_wakeups(process: Process) -> int:
    """How often any thread of it or of its children has waited for something."""
    own = psutil.Process(process.pid)
    return sum(
        _num_waits(Path(f"/proc/{each.pid}/task/{thread.id}/status"))
        for each in (own, *own.children(recursive=True))
        for thread in each.threads()
    )


def _num_waits(status: Path) -> int:
    lines = status.read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("voluntary_ctxt_switches:"))
    return int(line.split()[1])


def cpu_s(process: Process) -> float:
    own = psutil.Process(process.pid)
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def test_every_thread_keeps_to_its_cores(cluster: Cluster) -> None:
    """Torch's, gRPC's and the agent's threads too, after they have worked."""
    cores = sorted(psutil.Process().cpu_affinity())
    for process, core in ((cluster.prefill[0], cores[0]), (cluster.decode[0], cores[-1])):
        own = psutil.Process(process.pid)
        children = own.children(recursive=True)
        assert children, "the agent lives in one"
        for each in (own, *children):
            threads = each.threads()
            assert len(threads) > 1
            for thread in threads:
                assert psutil.Process(thread.id).cpu_affinity() == [core]
