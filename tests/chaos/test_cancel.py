"""Clients that leave, at every stage: both pools return to their baseline, nothing leaks."""

import asyncio
import random
import time
from pathlib import Path

import grpc
import pytest

from diptych import rpc
from diptych.v1 import inference_pb2_grpc
from tests.call import token_request
from tests.chaos.load import FLAGS, ROUTER_FLAGS, STEP_S, Job, jobs, run_all
from tests.cluster import Cluster, running_cluster

NUM_CANCELS = 200
CONCURRENCY = 8


@pytest.mark.timeout(300)
async def test_cancels_at_every_stage_leak_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with running_cluster(
        tmp_path, str(tiny_model), worker_flags=FLAGS, router_flags=ROUTER_FLAGS
    ) as cluster:
        await cluster.wait_ready()
        undisturbed = await run_all(cluster, jobs(8, seed=1), concurrency=4)
        assert all(answer.error is None for answer in undisturbed)
        longest_s = max(answer.times[-1] - answer.sent_at for answer in undisturbed)
        await cluster.wait_baseline(within_s=1 + STEP_S)
        before = await idle_counts(cluster)

        rng = random.Random(2)
        work = jobs(NUM_CANCELS, seed=3)
        delays = [rng.uniform(0, longest_s) for _ in work]
        slots = asyncio.Semaphore(CONCURRENCY)
        stages: dict[str, int] = {"before first token": 0, "decoding": 0, "finished": 0}
        async with rpc.channel(cluster.router.address) as channel, asyncio.TaskGroup() as tasks:
            for job, delay in zip(work, delays, strict=True):
                tasks.create_task(cancel_after(channel, slots, job, delay, stages))
        print("cancelled at:", stages)  # noqa: T201
        assert stages["before first token"] >= 20
        assert stages["decoding"] >= 20

        await cluster.wait_baseline(within_s=1 + STEP_S)
        after = await idle_counts(cluster)
        for name, (num_fds, num_tasks) in after.items():
            assert num_fds <= before[name][0] + 3, f"{name}: fds {before[name][0]} -> {num_fds}"
            assert num_tasks <= before[name][1], f"{name}: tasks {before[name][1]} -> {num_tasks}"

        again = await run_all(cluster, jobs(8, seed=1), concurrency=4)
        assert [a.token_ids for a in again] == [a.token_ids for a in undisturbed]


async def cancel_after(
    channel: grpc.aio.Channel,
    slots: asyncio.Semaphore,
    job: Job,
    delay_s: float,
    stages: dict[str, int],
) -> None:
    """Send ``job``, leave after ``delay_s``; books how far it had come."""
    async with slots:
        request = token_request(job.token_ids, max_tokens=job.max_tokens)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
        stage = "before first token"
        try:
            async with asyncio.timeout(delay_s):
                async for _ in call:
                    stage = "decoding"
            stage = "finished"
        except TimeoutError:
            call.cancel()
        stages[stage] += 1


async def idle_counts(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """(open fds, asyncio tasks) of each process: the least seen during two quiet seconds."""
    counts: dict[str, tuple[int, int]] = {}
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        for process in cluster.processes:
            num_tasks = int(process.metric("diptych_asyncio_tasks"))
            fds, tasks = counts.get(process.name, (1 << 30, 1 << 30))
            counts[process.name] = (min(fds, process.num_fds()), min(tasks, num_tasks))
        await asyncio.sleep(0.2)
    return counts
