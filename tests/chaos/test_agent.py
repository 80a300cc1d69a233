"""The process of a worker's transport agent dies or freezes under load: nobody else notices."""

import asyncio
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.expected import Expected
from tests.chaos.load import FLAGS, ROUTER_FLAGS, STEP_S, jobs, run_all
from tests.chaos.survivors import Survivors
from tests.cluster import Cluster, Process, running_cluster
from tests.transports import AGENTS

# Agents that die one after another are replaced after a growing pause, and a pair that fell
# back comes home after a while: both soon here, so that every strike hits one at work.
SOON = {"transfer.reconnect-max-s": "0.5", "transfer.reprove-s": "0.2"}
NUM_JOBS = 40
REPLACED_S = 5.0  # of which transfer.agent_answer_s for one that is stopped
UP_S = 20.0
NUM_ROUNDS_LONG = 5
NUM_KILLS, NUM_KILLS_LONG = 3, 20
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)


def agent_of(worker: Process) -> psutil.Process | None:
    """The worker's one child, if it has one now."""
    return next(iter(psutil.Process(worker.pid).children()), None)


async def until_up(worker: Process) -> psutil.Process:
    """The worker's agent, once it listens: while it starts, it is given longer to answer."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < UP_S:
        agent = agent_of(worker)
        if agent is not None and agent.net_connections("tcp"):
            return agent
        await asyncio.sleep(0.05)
    raise AssertionError(f"{worker.name}'s agent does not start")


async def until_replaced(worker: Process, before: psutil.Process) -> None:
    """Another process is there."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < REPLACED_S:
        agent = agent_of(worker)
        if agent is not None and agent.pid != before.pid:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{worker.name} has no new agent")


async def strike(
    cluster: Cluster,
    worker: Process,
    number: signal.Signals,
    expected: Expected,
    after_s: float = 0.2,
) -> None:
    """Send the signal to the worker's agent under load: every answer is right."""
    agent = await until_up(worker)
    async with asyncio.TaskGroup() as tasks:
        load = tasks.create_task(run_all(cluster, expected.work))
        await asyncio.sleep(after_s)
        agent.send_signal(number)
        await until_replaced(worker, agent)
    expected.check_all(load.result())
    await cluster.wait_ready()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", AGENTS)
async def test_agents_that_die_or_freeze_under_load_cost_no_request_and_no_worker(
    tiny_model: Path, tmp_path: Path, transport: str, chaos_long: bool
) -> None:
    with running_cluster(
        tmp_path,
        str(tiny_model),
        num_prefill=2,
        num_decode=2,
        worker_flags={**FLAGS, **SOON, "transfer.transports": f"{transport},inline"},
        router_flags=ROUTER_FLAGS,
    ) as cluster:
        await cluster.wait_ready()
        expected = await Expected.learn(cluster, jobs(NUM_JOBS, seed=11))
        still_there = Survivors(cluster.workers)
        victims = [
            (side[0], number) for side in (cluster.prefill, cluster.decode) for number in SIGNALS
        ]
        for worker, number in victims * (NUM_ROUNDS_LONG if chaos_long else 1):
            await strike(cluster, worker, number, expected)
        await cluster.wait_baseline(within_s=1 + STEP_S)
        await expected.settle(cluster)
        still_there.check()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", AGENTS)
async def test_readers_killed_while_they_read_over_tcp_cost_the_source_nothing(
    tiny_model: Path, tmp_path: Path, transport: str, chaos_long: bool
) -> None:
    """There nixl may crash the process that is read from: the source's agent, at worst."""
    tcp = {
        "transfer.transports": transport,
        "transfer.ucx-tls": "tcp,cuda_copy",
        "transfer.allow-faults": "",
        "transfer.allow-nixl-tcp": "",
    }
    with running_cluster(
        tmp_path,
        str(tiny_model),
        worker_flags={**FLAGS, **SOON, **tcp},
        router_flags=ROUTER_FLAGS,
    ) as cluster:
        await cluster.wait_ready()
        expected = await Expected.learn(cluster, jobs(NUM_JOBS // 2, seed=12))
        still_there = Survivors(cluster.workers)
        for number in range(NUM_KILLS_LONG if chaos_long else NUM_KILLS):
            after_s = 0.05 + 0.03 * (number % 10)
            await strike(cluster, cluster.decode[0], signal.SIGKILL, expected, after_s)
        await cluster.wait_baseline(within_s=1 + STEP_S)
        await expected.settle(cluster)
        still_there.check()
