"""Requests of a cluster that the chart made, while something is done to its pods."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from diptych.client import Chunk, DiptychClient, FinishReason, SamplingOptions
from tests.deploy.kubelet import RunningPod
from tests.deploy.local_cluster import metric

_WITHIN_S = 180.0
_OPTIONS = SamplingOptions(max_tokens=8, ignore_eos=True)
_NUMBERS = itertools.count()


class Answer(NamedTuple):
    """What one request brought."""

    prompt: str
    text: str
    last: Chunk


async def ask(client: DiptychClient, prompt: str | None = None) -> Answer:
    """One answer to a prompt that is new and long enough to be shipped; whole, or an error."""
    if prompt is None:
        prompt = f"Number {next(_NUMBERS)}. " + "A door opens and somebody comes in. " * 12
    parts = [chunk async for chunk in client.generate(prompt, options=_OPTIONS, timeout_s=90)]
    assert parts[-1].finish_reason is FinishReason.LENGTH
    assert sum(len(part.token_ids) for part in parts) == _OPTIONS.max_tokens
    return Answer(prompt, "".join(part.text for part in parts), parts[-1])


async def eventually(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Raises AssertionError: it never did."""
    try:
        async with asyncio.timeout(_WITHIN_S):
            while not await holds():
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise AssertionError(f"not within {_WITHIN_S} s: {what}") from None


async def routers_know(routers: Sequence[RunningPod], role: str, number: int) -> None:
    """Wait until each of them has so many ready workers of the role."""

    async def know() -> bool:
        known = [await metric(r, "diptych_router_workers_ready", role=role) for r in routers]
        return known == [number] * len(routers)

    await eventually(know, f"every router knows {number} {role} workers")


@asynccontextmanager
async def load(address: str, num_clients: int = 2) -> AsyncIterator[list[Answer]]:
    """Clients that ask without a pause, and never twice for the same answer.

    At least four requests are answered before the body runs, and four after it.
    """
    answers: list[Answer] = []
    is_over = asyncio.Event()

    async def ask_on() -> None:
        async with DiptychClient(address, retries=0) as client:
            while not is_over.is_set():
                answers.append(await ask(client))

    async def more() -> None:
        wanted = len(answers) + 4

        async def are_there() -> bool:
            return len(answers) >= wanted

        await eventually(are_there, "requests are answered")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_clients):
            tasks.create_task(ask_on())
        await more()
        yield answers
        await more()
        is_over.set()


def decoded_on(answers: list[Answer]) -> set[str]:
    """By which workers, by address."""
    return {answer.last.timing.decode_worker for answer in answers if answer.last.timing}


def prefilled_on(answers: list[Answer]) -> set[str]:
    """By which workers; none where the decode worker did it."""
    return {answer.last.timing.prefill_worker for answer in answers if answer.last.timing} - {""}
