"""Restarts by plan and by accident: all workers in turn, and a router under load."""

import asyncio
import time
from pathlib import Path

import pytest

from tests.call import Answer
from tests.chaos import silence
from tests.chaos.expected import Expected
from tests.chaos.load import (
    FLAGS,
    ROUTER_FLAGS,
    ask_until,
    jobs,
    run_all,
)
from tests.cluster import another_router, running_cluster
from tests.notes import Note

NUM_JOBS = 40
SURVIVORS = 2  # requests at once
SURVIVORS_BLOCKS = 4 * SURVIVORS  # 32 tokens and headroom each
FREED_S = 5.0  # after a router was killed


async def load_until(
    stop: asyncio.Event, address: str, expected: Expected, *, at_once: int
) -> list[Answer]:
    """Keep ``at_once`` requests in flight; the answers, all right."""
    right = []

    def check(index: int, answer: Answer) -> None:
        expected.check(index, answer)
        right.append(answer)

    await ask_until(stop, address, expected.work, check, at_once=at_once)
    return right


@pytest.mark.timeout(240)
async def test_a_rolling_restart_of_all_workers_fails_no_request(
    tiny_model: Path, tmp_path: Path, step_s: float, note: Note
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
        expected = await Expected.learn(cluster, jobs(NUM_JOBS, seed=21))
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            load = tasks.create_task(load_until(stop, cluster.router.address, expected, at_once=4))
            for worker in cluster.workers:
                await asyncio.sleep(0.5)
                begin = time.monotonic()
                code = await asyncio.to_thread(worker.stop)  # SIGTERM, then wait
                assert code == 0, worker.log_tail()
                drained_s = time.monotonic() - begin
                worker.start(listen=worker.address)
                await asyncio.to_thread(worker.wait_listening)
                await cluster.wait_ready()
                note(
                    f"{worker.name}: drained in {drained_s:.1f} s,"
                    f" in use again after {time.monotonic() - begin:.1f} s"
                )
            await asyncio.sleep(0.5)
            stop.set()
        note(f"{len(load.result())} requests, all right")
        assert len(load.result()) >= NUM_JOBS
        await cluster.wait_baseline(within_s=1 + step_s)
        await expected.settle(cluster)


@pytest.mark.timeout(240)
async def test_a_killed_router_is_cleaned_up_after_while_another_serves(
    tiny_model: Path, tmp_path: Path, step_s: float, note: Note
) -> None:
    with (
        running_cluster(
            tmp_path, str(tiny_model), worker_flags=FLAGS, router_flags=ROUTER_FLAGS
        ) as cluster,
        another_router(cluster, tmp_path, tiny_model, ROUTER_FLAGS) as second,
    ):
        await cluster.wait_ready()
        await second.wait_ready()
        short = jobs(NUM_JOBS, seed=22, max_tokens=16, prompt_len=16)
        expected = await Expected.learn(cluster, short)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            served = tasks.create_task(
                load_until(stop, second.router.address, expected, at_once=SURVIVORS)
            )
            orphans = tasks.create_task(
                run_all(cluster, jobs(NUM_JOBS, seed=23, max_tokens=400), concurrency=16)
            )
            await cluster.eventually(
                lambda: all(w.num_held > 2 * SURVIVORS_BLOCKS for w in cluster.decode),
                within_s=20,
                what="the first router's sequences hold blocks",
            )
            cluster.router.kill()
            killed_at = time.monotonic()
            await cluster.eventually(
                lambda: (
                    all(w.num_held <= SURVIVORS_BLOCKS for w in cluster.workers)
                    and cluster.prefill[0].metric("diptych_leases_open") <= SURVIVORS
                ),
                FREED_S,
                "what the killed router held is free",
            )
            note(f"free after {time.monotonic() - killed_at:.2f} s")
            await asyncio.sleep(killed_at + FREED_S - time.monotonic())
            stop.set()
        assert any(answer.error is not None for answer in orphans.result())
        longest_s = silence.of_one(killed_at, served.result())
        after = [answer for answer in served.result() if answer.sent_at > killed_at]
        note(
            f"the other router: {len(after)} requests after it, all right,"
            f" longest silence of one {longest_s:.2f} s"
        )
        assert len(after) >= NUM_JOBS
        assert longest_s < 1 + step_s
        await second.wait_baseline(within_s=1 + step_s)
        await expected.settle(second)
