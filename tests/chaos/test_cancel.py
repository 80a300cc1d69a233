"""Clients that leave, at every stage, while reads are slow: nothing leaks, nobody is disturbed.

Half of the reads start late, the others end late, each by a random time: many of them
land after their pull is over. The pools hold 1.2 times what is asked for at once, on average:
now and then, and while blocks are in quarantine, they are full.
"""

import asyncio
import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from diptych.rpc.channel import open_channel
from diptych.v1 import inference_pb2_grpc
from tests.call import Answer, generate, token_request
from tests.chaos.fault_rig import Rule, breakable_cluster, check_untouched, report, set_rules
from tests.chaos.load import Job, check_answers, jobs, run_all
from tests.cluster import Cluster
from tests.transports import TRANSPORTS

NUM_CANCELS, NUM_CANCELS_LONG = 100, 1000
LATE_S, LATE_S_LONG = 0.5, 5.0
CONCURRENCY = 8
PROMPT_LEN, MAX_TOKENS, BLOCK_SIZE = 320, 48, 16
PREFILLING, TRANSFERRING, DECODING = STAGES = ("prefilling", "transferring", "decoding")
POOL_TO_DEMAND = 1.2


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_cancels_at_every_stage_leak_nothing(
    tiny_model: Path, tmp_path: Path, transport: str, step_s: float, chaos_long: bool
) -> None:
    num_cancels = NUM_CANCELS_LONG if chaos_long else NUM_CANCELS
    late_s = LATE_S_LONG if chaos_long else LATE_S
    survivors = jobs(num_cancels // 4, seed=1, max_tokens=MAX_TOKENS, prompt_len=PROMPT_LEN)
    work = [
        dataclasses.replace(job, max_tokens=MAX_TOKENS)
        for job in jobs(num_cancels, seed=3, prompt_len=PROMPT_LEN)
    ]
    prompts = [len(job.token_ids) for job in (*work, *survivors)]
    sequences = [len(job.token_ids) + job.max_tokens for job in (*work, *survivors)]
    flags = {
        "timers.read-progress-s": str(2 * late_s + 2),
        "transfer.quarantine-max-s": "60",
        "transfer.quarantine-max-ratio": "1",
    }
    with breakable_cluster(
        tmp_path,
        tiny_model,
        transport,
        worker_flags=flags,
        prefill_flags={"num-blocks": str(pool_blocks(prompts))},
        decode_flags={"num-blocks": str(pool_blocks(sequences))},
    ) as cluster:
        await cluster.wait_ready()
        decode = cluster.decode[0]
        undisturbed = await run_all(cluster, survivors, concurrency=4)
        await check_untouched(cluster, step_s)
        before = await idle_counts(cluster)

        await set_rules(decode, slow_reads(late_s))
        ttft_s = statistics.median(answer.timing.ttft_s for answer in undisturbed)
        rng, stages = random.Random(2), dict.fromkeys(STAGES, 0)
        slots, answers = asyncio.Semaphore(CONCURRENCY), [Answer()] * len(survivors)

        async def survive(channel: grpc.aio.Channel, index: int) -> None:
            job = survivors[index]
            async with slots:
                request = token_request(
                    job.token_ids,
                    max_tokens=job.max_tokens,
                    temperature=job.temperature,
                    seed=job.seed,
                    salt="survivor",
                )
                answers[index] = await generate(channel, request, timeout_s=60)

        async with open_channel(cluster.router.address) as channel, asyncio.TaskGroup() as tasks:
            for index, job in enumerate(work):
                stage = STAGES[index % len(STAGES)]
                delay_s = rng.uniform(0, ttft_s if stage == PREFILLING else late_s)
                tasks.create_task(cancel(channel, slots, job, stage, delay_s, stages))
                if index % 4 == 3:
                    tasks.create_task(survive(channel, index // 4))
        print("cancelled:", stages)  # noqa: T201
        assert min(stages.values()) >= num_cancels // 10
        check_answers(answers, undisturbed)

        await set_rules(decode, [])
        deadline_s = time.monotonic() + late_s + 2
        while (await report(decode)).num_reads_unfinished:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.02)
        await check_untouched(cluster, step_s)
        assert decode.metric("diptych_kv_quarantined_blocks_ever") > 0
        assert decode.metric("diptych_kv_agent_teardowns") == 0
        after = await idle_counts(cluster)
        for name, (num_fds, num_tasks) in after.items():
            assert num_fds <= before[name][0] + 3, f"{name}: fds {before[name][0]} -> {num_fds}"
            assert num_tasks <= before[name][1], f"{name}: tasks {before[name][1]} -> {num_tasks}"


def pool_blocks(num_tokens: Sequence[int]) -> int:
    """1.2 times what requests of so many tokens need at once; the largest one fits."""
    blocks = [-(-num // BLOCK_SIZE) for num in num_tokens]
    return max(max(blocks) + 1, int(POOL_TO_DEMAND * CONCURRENCY * statistics.mean(blocks)))


def slow_reads(late_s: float) -> list[Rule]:
    """Every read is late: some start late, others end late."""
    deeds = ("delay", "linger", "delay", "linger", "delay", "linger")
    return [
        {"at": "read", "do": do, "nth": nth, "seconds": 0, "seconds_max": late_s, "times": None}
        for nth, do in enumerate(deeds, start=1)
    ]


async def cancel(
    channel: grpc.aio.Channel,
    slots: asyncio.Semaphore,
    job: Job,
    stage: str,
    delay_s: float,
    stages: dict[str, int],
) -> None:
    """Send ``job`` and leave at that stage; books how far it had come."""
    max_tokens = {PREFILLING: 0, TRANSFERRING: 1, DECODING: 2 + job.seed % (MAX_TOKENS - 2)}[stage]
    loop, num_tokens = asyncio.get_running_loop(), 0
    async with slots:
        request = token_request(job.token_ids, max_tokens=job.max_tokens)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
        try:
            async with asyncio.timeout(delay_s if stage == PREFILLING else None) as limit:
                async for response in call:
                    num_tokens += len(response.delta.token_ids)
                    if stage == TRANSFERRING and limit.when() is None:
                        limit.reschedule(loop.time() + delay_s)
                    if num_tokens > max_tokens and stage != PREFILLING:
                        break
        except TimeoutError:
            pass
        call.cancel()
        stages[STAGES[min(num_tokens, 2)]] += 1


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
