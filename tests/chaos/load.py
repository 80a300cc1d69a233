"""A deterministic load, and what each of its requests must answer."""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from diptych.rpc.channel import open_channel
from diptych.v1 import inference_pb2
from tests.call import Answer, generate, token_request
from tests.cluster import Cluster

FLAGS = {"num-blocks": "512", "max-model-len": "512", "max-batched-tokens": "64"}
ROUTER_FLAGS = {"local-prefill-below-tokens": "0"}
STEP_S = 0.1  # of the tiny model: 64 tokens take up to 20 ms where four workers share two cores
DEMO_STEP_S = 3.0  # of SmolLM2: 64 tokens took up to 2.5 s, four workers on two busy cores


@dataclass(frozen=True)
class Job:
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int

    def request(self, salt: str = "") -> inference_pb2.GenerateRequest:
        """``salt``: requests of different salts share no cached blocks."""
        return token_request(
            self.token_ids,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            salt=salt,
        )


def jobs(num: int, seed: int, max_tokens: int = 48, prompt_len: int = 320) -> list[Job]:
    """``num`` different requests; half greedy, half sampled."""
    rng = random.Random(seed)
    return [
        Job(
            token_ids=tuple(rng.randrange(3, 480) for _ in range(rng.randint(1, prompt_len))),
            max_tokens=rng.randint(2, max_tokens),
            temperature=rng.choice([0.0, 0.8]),
            seed=rng.getrandbits(63),
        )
        for _ in range(num)
    ]


async def run_all(
    cluster: Cluster,
    work: Sequence[Job],
    *,
    concurrency: int = 8,
    on_answer: Callable[[int], Awaitable[None]] | None = None,
) -> list[Answer]:
    """Run ``work`` with ``concurrency`` at a time; ``on_answer(n)`` after the n-th answer."""
    slots, answers, num_done = asyncio.Semaphore(concurrency), [Answer()] * len(work), 0

    async def one(channel: grpc.aio.Channel, index: int) -> None:
        nonlocal num_done
        async with slots:
            answers[index] = await generate(channel, work[index].request(), timeout_s=60)
        num_done += 1
        if on_answer is not None:
            await on_answer(num_done)

    async with open_channel(cluster.router.address) as channel, asyncio.TaskGroup() as tasks:
        for index in range(len(work)):
            tasks.create_task(one(channel, index), name=f"job-{index}")
    return answers


async def ask_until(
    stop: asyncio.Event,
    address: str,
    work: Sequence[Job],
    on_answer: Callable[[int, Answer], None],
    *,
    at_once: int,
    fresh: bool = False,
    timeout_s: float = 60,
) -> None:
    """Keep ``at_once`` requests of ``work`` in flight, again and again.

    ``on_answer(index, answer)`` after each. ``fresh``: in no cache, however often asked.
    """
    numbers = itertools.count()

    async def client() -> None:
        while not stop.is_set():
            number = next(numbers)
            index = number % len(work)
            request = work[index].request(salt=str(time.monotonic_ns()) if fresh else "")
            on_answer(index, await generate(channel, request, timeout_s=timeout_s))

    async with open_channel(address) as channel, asyncio.TaskGroup() as tasks:
        for number in range(at_once):
            tasks.create_task(client(), name=f"client-{number}")
