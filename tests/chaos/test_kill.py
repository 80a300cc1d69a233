"""Workers die or freeze under load: every request still ends with the right tokens."""

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.call import Answer
from tests.chaos.load import FLAGS, ROUTER_FLAGS, STEP_S, check_answers, jobs, run_all
from tests.cluster import Cluster, Process, running_cluster

NUM_JOBS = 60
NOTICED_S = 5.0


async def undisturbed(cluster: Cluster) -> list[Answer]:
    answers = await run_all(cluster, jobs(NUM_JOBS, seed=11))
    assert all(answer.error is None for answer in answers)
    await cluster.wait_baseline(within_s=1 + STEP_S)
    return answers


async def when_busy(worker: Process) -> None:
    """Wait until ``worker`` holds blocks for somebody."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        blocks = worker.blocks()
        if blocks["leased"] or blocks["running"]:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{worker.name} is never busy")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_sigkill_under_load(tiny_model: Path, tmp_path: Path, role: str) -> None:
    with running_cluster(
        tmp_path,
        str(tiny_model),
        num_prefill=2,
        num_decode=2,
        worker_flags=FLAGS,
        router_flags=ROUTER_FLAGS,
    ) as cluster:
        await cluster.wait_ready()
        want = await undisturbed(cluster)
        victim = getattr(cluster, role)[0]
        async with asyncio.TaskGroup() as tasks:
            load = tasks.create_task(run_all(cluster, jobs(NUM_JOBS, seed=11)))
            await asyncio.sleep(0.3)
            await when_busy(victim)
            victim.kill()
        check_answers(load.result(), want)
        await cluster.wait_baseline(within_s=1 + STEP_S)

        # The same address comes back as another incarnation and is used again.
        victim.start(listen=victim.address)
        victim.wait_listening()
        await cluster.wait_ready()
        check_answers(await run_all(cluster, jobs(NUM_JOBS, seed=11)), want)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_stopped_worker_is_noticed_and_failed_over(
    tiny_model: Path, tmp_path: Path, role: str
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
        want = await undisturbed(cluster)
        victim = getattr(cluster, role)[0]
        async with asyncio.TaskGroup() as tasks:
            load = tasks.create_task(run_all(cluster, jobs(NUM_JOBS, seed=11)))
            await asyncio.sleep(0.3)
            await when_busy(victim)
            victim.signal(signal.SIGSTOP)
        answers = load.result()
        check_answers(answers, want)
        longest_s = max(answer.longest_gap_s for answer in answers)
        print(f"longest silence of a stream: {longest_s:.2f} s")  # noqa: T201
        assert longest_s <= NOTICED_S + 2 * STEP_S
        victim.signal(signal.SIGCONT)
        await cluster.wait_ready()
        await cluster.wait_baseline(within_s=NOTICED_S + STEP_S)
        check_answers(await run_all(cluster, jobs(NUM_JOBS, seed=11)), want)
