"""A running batch beside pulls: how much later its tokens are."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, repeat

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.scheduling.step import StepPlan
from tests.gpu import handoff, speed

MAX_DELAY = 0.05
_TOKEN_BYTES = 1 << 17  # of keys and values of Llama-3.1-8B in bfloat16
BATCH = speed.Case("decode", 64, 1024)
MODEL = speed.Model(name="Llama-3.1-8B", num_layers=32, wanted={BATCH: 0.0})
CASES = tuple(
    # 8,192 of its tokens, as blocks of 1 MiB.
    handoff.Case("device", "device", each, num_blocks=8192 * _TOKEN_BYTES >> 20)
    for each in ("nixl", "staged")
)


@dataclass(frozen=True, slots=True)
class Disturbed:
    """Of one case; seconds from a batch's tokens to its next ones, on average."""

    case: str
    way: str  # as the pair says
    message: str  # why there is none
    alone_s: float
    beside_s: float  # while pulls follow each other without a pause
    num_steps: int  # beside them
    pull_s: float
    delay: float  # by how much they are later, as a share
    wanted: float  # at the most
    holds: bool


def check(
    case: handoff.Case,
    model: speed.Model,
    batch: speed.Case,
    backend: Backend,
    dtype: torch.dtype,
    *,
    num_rounds: int = 3,
    num_alone: int = 40,
    round_s: float = 1.5,
) -> Disturbed:
    """In turn without pulls and beside them, for so long; whole steps of both are counted."""
    told = f"{model.name}, {batch}, {case!r}"
    rig = speed.Rig(model, backend, dtype, "none")
    (plan,) = rig.plans(batch)
    try:
        return asyncio.run(
            _check(told, case, rig, plan, str(backend.device), num_rounds, num_alone, round_s)
        )
    except handoff.NotJoinedError as error:
        return Disturbed(told, "", str(error), 0.0, 0.0, 0, 0.0, 0.0, MAX_DELAY, False)


async def _check(
    told: str,
    case: handoff.Case,
    rig: speed.Rig,
    plan: StepPlan,
    device: str,
    num_rounds: int,
    num_alone: int,
    round_s: float,
) -> Disturbed:
    loop = asyncio.get_running_loop()
    alone, beside = list[float](), list[float]()
    pulling_s, num_pulls = 0.0, 0
    with ThreadPoolExecutor(1) as thread:
        async with handoff.joined(case, device) as (reader, pair, request, _):
            await reader.pairs.open_pull(request).run()  # the first is not warm
            for _ in range(num_rounds):
                ends = await loop.run_in_executor(thread, rig.ends, [plan] * num_alone)
                alone += gaps(ends)
                over = threading.Event()
                stepping = loop.run_in_executor(thread, rig.ends, until(over, plan))
                begin_s = loop.time()
                try:
                    while loop.time() - begin_s < round_s:
                        await reader.pairs.open_pull(request).run()
                        num_pulls += 1
                finally:
                    over.set()
                pulling_s += loop.time() - begin_s
                beside += gaps(await stepping)
    alone_s, beside_s = (sum(each) / len(each) for each in (alone, beside))
    delay = beside_s / alone_s - 1
    return Disturbed(
        case=told,
        way=pair.way,
        message=pair.message,
        alone_s=alone_s,
        beside_s=beside_s,
        num_steps=len(beside),
        pull_s=pulling_s / num_pulls,
        delay=delay,
        wanted=MAX_DELAY,
        holds=delay <= MAX_DELAY,
    )


def until(over: threading.Event, plan: StepPlan) -> Iterator[StepPlan]:
    """It again and again, three times at least."""
    yield from repeat(plan, 3)
    while not over.is_set():
        yield plan


def gaps(ends: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(ends)]
