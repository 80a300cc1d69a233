"""Clients that leave, at every stage, while reads are slow: nothing leaks, nobody is disturbed.

Half of the reads start late, the others end late, each by a random time: many of them
land after their pull is over. The pools hold 1.2 times what is asked for at once, on average:
now and then, and while blocks are in quarantine, they are full. After each round, when the last
read has landed, everything must be as it was before the first.
"""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from diptych.rpc.channel import open_channel
from diptych.v1 import inference_pb2_grpc
from tests.call import generate, token_request
from tests.chaos.expected import Expected
from tests.chaos.fault_rig import Rule, breakable_cluster, check_untouched, report, set_rules
from tests.chaos.load import Job, jobs
from tests.chaos.open_things import check_no_more, open_things
from tests.cluster import Cluster
from tests.notes import Note
from tests.transports import TRANSPORTS

NUM_ROUNDS, NUM_ROUNDS_LONG = 4, 40
CANCELS_A_ROUND, SURVIVORS_A_ROUND = 25, 6
LATE_S, LATE_S_LONG = 0.5, 5.0
CONCURRENCY = 8
PROMPT_LEN, MAX_TOKENS, BLOCK_SIZE = 320, 48, 16
PREFILLING, TRANSFERRING, DECODING = STAGES = ("prefilling", "transferring", "decoding")
POOL_TO_DEMAND = 1.2


@dataclass
class Leavers:
    """The clients that leave, and those that stay beside them."""

    work: Sequence[Job]  # of those that leave, for all rounds
    survivors: Expected
    late_s: float  # of a read, at the most
    ttft_s: float  # undisturbed
    rng: random.Random
    stages: Counter[str]  # how far those that left had come

    async def round(self, cluster: Cluster, number: int) -> None:
        """Cancel a round's requests while the survivors run, each of whom is answered."""
        slots = asyncio.Semaphore(CONCURRENCY)
        first = number * CANCELS_A_ROUND
        async with open_channel(cluster.router.address) as channel, asyncio.TaskGroup() as tasks:
            for index, job in enumerate(self.work[first : first + CANCELS_A_ROUND]):
                stage = STAGES[index % len(STAGES)]
                tasks.create_task(self._leave(channel, slots, job, stage))
                if index % 4 == 3:
                    chosen = self.rng.randrange(len(self.survivors.work))
                    tasks.create_task(self._stay(channel, slots, chosen, f"{number}-{index}"))

    async def _stay(
        self, channel: grpc.aio.Channel, slots: asyncio.Semaphore, index: int, salt: str
    ) -> None:
        async with slots:
            request = self.survivors.work[index].request(salt=salt)
            self.survivors.check(index, await generate(channel, request, timeout_s=60))

    async def _leave(
        self, channel: grpc.aio.Channel, slots: asyncio.Semaphore, job: Job, stage: str
    ) -> None:
        """Send ``job`` and leave at that stage; books how far it had come."""
        last = {PREFILLING: 0, TRANSFERRING: 1, DECODING: 2 + job.seed % (MAX_TOKENS - 2)}[stage]
        delay_s = self.rng.uniform(0, self.ttft_s if stage == PREFILLING else self.late_s)
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
                        if num_tokens > last and stage != PREFILLING:
                            break
            except TimeoutError:
                pass
            call.cancel()
            self.stages[STAGES[min(num_tokens, 2)]] += 1


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_cancels_at_every_stage_leak_nothing(
    tiny_model: Path, tmp_path: Path, transport: str, step_s: float, chaos_long: bool, note: Note
) -> None:
    num_rounds = NUM_ROUNDS_LONG if chaos_long else NUM_ROUNDS
    late_s = LATE_S_LONG if chaos_long else LATE_S
    staying = jobs(SURVIVORS_A_ROUND * 4, seed=1, max_tokens=MAX_TOKENS, prompt_len=PROMPT_LEN)
    leaving = [
        replace(job, max_tokens=MAX_TOKENS)
        for job in jobs(num_rounds * CANCELS_A_ROUND, seed=3, prompt_len=PROMPT_LEN)
    ]
    with crowded_cluster(tmp_path, tiny_model, transport, [*staying, *leaving], late_s) as cluster:
        await cluster.wait_ready()
        decode = cluster.decode[0]
        survivors = await Expected.learn(cluster, staying, concurrency=4)
        await check_untouched(cluster, step_s)
        before = await open_things(cluster)
        ttft_s = statistics.median(answer.timing.ttft_s for answer in survivors.answers)
        leavers = Leavers(leaving, survivors, late_s, ttft_s, random.Random(2), Counter())
        for number in range(num_rounds):
            await set_rules(decode, slow_reads(late_s))
            await leavers.round(cluster, number)
            await set_rules(decode, [])
            await until_read(cluster, late_s + 2)
            await check_untouched(cluster, step_s)
        note(f"cancelled over {transport}: {dict(leavers.stages)}")
        assert min(leavers.stages[stage] for stage in STAGES) >= len(leaving) // 10
        assert decode.metric("diptych_kv_quarantined_blocks_ever") > 0
        assert decode.metric("diptych_kv_agent_teardowns") == 0
        check_no_more(before, await open_things(cluster))
        await survivors.settle(cluster)


@contextmanager
def crowded_cluster(
    work: Path, model: Path, transport: str, load: Sequence[Job], late_s: float
) -> Iterator[Cluster]:
    """Pools a little larger than what the load needs at once; quarantines are waited for."""
    flags = {
        "timers.read-progress-s": str(2 * late_s + 2),
        "transfer.quarantine-max-s": "60",
        "transfer.quarantine-max-ratio": "1",
    }
    prompts = [len(job.token_ids) for job in load]
    sequences = [len(job.token_ids) + job.max_tokens for job in load]
    with breakable_cluster(
        work,
        model,
        transport,
        worker_flags=flags,
        prefill_flags={"num-blocks": str(pool_blocks(prompts))},
        decode_flags={"num-blocks": str(pool_blocks(sequences))},
    ) as cluster:
        yield cluster


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


async def until_read(cluster: Cluster, within_s: float) -> None:
    """Wait until every read has landed."""
    deadline_s = time.monotonic() + within_s
    while (await report(cluster.decode[0])).num_reads_unfinished:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)
