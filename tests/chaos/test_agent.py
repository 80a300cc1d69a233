"""The process of a worker's transport agent dies or freezes under load: nobody else notices."""

import asyncio
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.load import FLAGS, ROUTER_FLAGS, STEP_S, check_answers, jobs, run_all
from tests.cluster import Process, running_cluster

NUM_JOBS = 40
REPLACED_S = 5.0  # of which transfer.nixl_answer_s for one that is stopped
NUM_ROUNDS_LONG = 5
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)


def agent_of(worker: Process) -> psutil.Process | None:
    """The worker's one child, if it has one now."""
    return next(iter(psutil.Process(worker.pid).children()), None)


async def until_replaced(worker: Process, before: psutil.Process) -> None:
    """Another process is there."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < REPLACED_S:
        agent = agent_of(worker)
        if agent is not None and agent.pid != before.pid:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{worker.name} has no new agent")


@pytest.mark.timeout(240)
async def test_agents_that_die_or_freeze_under_load_cost_no_request_and_no_worker(
    tiny_model: Path, tmp_path: Path, chaos_long: bool
) -> None:
    with running_cluster(
        tmp_path,
        str(tiny_model),
        num_prefill=2,
        num_decode=2,
        worker_flags=FLAGS,
        router_flags=ROUTER_FLAGS,
    ) as cluster:
        await cluster.wait_ready()
        work = jobs(NUM_JOBS, seed=11)
        want = await run_all(cluster, work)
        workers = [*cluster.prefill, *cluster.decode]
        pids = [worker.pid for worker in workers]
        victims = [
            (side[0], number) for side in (cluster.prefill, cluster.decode) for number in SIGNALS
        ]
        for worker, number in victims * (NUM_ROUNDS_LONG if chaos_long else 1):
            agent = agent_of(worker)
            assert agent is not None
            async with asyncio.TaskGroup() as tasks:
                load = tasks.create_task(run_all(cluster, work))
                await asyncio.sleep(0.2)
                agent.send_signal(number)
                await until_replaced(worker, agent)
            check_answers(load.result(), want)
            await cluster.wait_ready()
        await cluster.wait_baseline(within_s=1 + STEP_S)
        assert [worker.pid for worker in workers] == pids
        assert all(psutil.Process(pid).is_running() for pid in pids)
