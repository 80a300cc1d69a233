"""A whole cluster on one card: every token that it serves is transformers' best, up to margins.

A prefill worker and two decode workers share the card, each a process of its own, and hand blocks
over as they do in service. In a second round one of the decode workers is killed amid its answers.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from diptych.client import DiptychClient, SamplingOptions
from tests.cluster import Cluster, Process, running_cluster
from tests.gpu.free_running import judged
from tests.gpu.golden import FLOAT32_ERROR, Shape, reference

_SHARE = 0.2  # of the card, for each worker
_PATIENCE_S = 60.0
_MIN_KILLED_AT = 8  # tokens of each answer
_RETRIES = "diptych_retries_total"


@dataclass(frozen=True, slots=True)
class Served:
    """Of one shape, in float32. Margins are of logits."""

    shape: str
    ways: list[str]  # of the pairs, as they say
    num_tokens: int
    furthest: float  # below transformers' best
    margin: float  # that far at the most
    first_token_s: float  # of a prompt that comes alone
    token_s: float  # of one of all answers at once
    killed_token_s: float  # of one of those of which a worker was killed, its loss included
    num_retries: int  # of answers whose worker was killed
    holds: bool  # all have their tokens, some by a retry, and nobody holds a block afterwards


def check(
    shape: Shape,
    device: torch.device,
    *,
    num_seqs: int = 8,
    num_prompt: int = 200,
    num_tokens: int = 64,
) -> Served:
    """num_prompt: tokens of the longest prompt."""
    with tempfile.TemporaryDirectory() as name:
        folder = shape.write(Path(name) / "model")
        flags = {"device": device.type, "dtype": "float32"}
        if device.type == "cuda":
            flags["gpu-memory-utilization"] = str(_SHARE)
        else:
            flags["num-blocks"] = "200"
        with running_cluster(
            Path(name) / "cluster",
            str(folder),
            num_decode=2,
            worker_flags=flags,
        ) as cluster:
            return asyncio.run(
                _check(cluster, shape, folder, device, num_seqs, num_prompt, num_tokens)
            )


async def _check(
    cluster: Cluster,
    shape: Shape,
    folder: Path,
    device: torch.device,
    num_seqs: int,
    num_prompt: int,
    num_tokens: int,
) -> Served:
    await cluster.wait_ready()
    prompts = _prompts(shape, num_seqs, num_prompt)
    async with cluster.client() as client:
        described = await client.cluster()
        await _answers(client, prompts, num_tokens)  # the first are not warm
        alone = _Answer(prompts[-1], num_tokens)
        await alone.run(client)
        begin_s = time.perf_counter()
        texts = await _answers(client, prompts, num_tokens)
        token_s = (time.perf_counter() - begin_s) / num_tokens
        num_retries = cluster.router.metric(_RETRIES)
        begin_s = time.perf_counter()
        texts += await _answers(client, prompts, num_tokens, cluster.decode[0])
        killed_token_s = (time.perf_counter() - begin_s) / num_tokens
        num_retries = int(cluster.router.metric(_RETRIES) - num_retries)
    await cluster.wait_baseline(_PATIENCE_S)
    asked = [text[:-1] for text in texts]
    truth = torch.cat(reference(folder, asked, num_tokens, torch.float32, device))
    found = judged(shape, torch.float32, texts, truth, 2 * FLOAT32_ERROR)
    return Served(
        shape=shape.name,
        ways=sorted({f"{pair.transport}: {pair.way}" for pair in described.pairs}),
        num_tokens=found.num_tokens,
        furthest=found.furthest,
        margin=found.margin,
        first_token_s=alone.first_token_s,
        token_s=token_s,
        killed_token_s=killed_token_s,
        num_retries=num_retries,
        holds=found.holds and num_retries > 0,
    )


def _prompts(shape: Shape, num_seqs: int, num_prompt: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    lengths = [num_prompt * (number + 1) // num_seqs for number in range(num_seqs)]
    return [
        torch.randint(5, shape.vocab_size, (length,), generator=generator).tolist()
        for length in lengths
    ]


class _Answer:
    """To one prompt: greedy, of so many tokens."""

    def __init__(self, prompt: Sequence[int], num_tokens: int) -> None:
        self._prompt, self._num_tokens = list(prompt), num_tokens
        self.token_ids: list[int] = []
        self.first_token_s = 0.0
        self.is_under_way = asyncio.Event()  # for long enough to be broken off

    async def run(self, client: DiptychClient) -> list[int]:
        """The prompt and what follows it."""
        options = SamplingOptions(temperature=0.0, max_tokens=self._num_tokens, ignore_eos=True)
        begin_s = time.perf_counter()
        async for chunk in client.generate(token_ids=self._prompt, options=options):
            if chunk.token_ids and not self.token_ids:
                self.first_token_s = time.perf_counter() - begin_s
            self.token_ids += chunk.token_ids
            if len(self.token_ids) >= _MIN_KILLED_AT:
                self.is_under_way.set()
        assert len(self.token_ids) == self._num_tokens, "an answer is whole"
        return self._prompt + self.token_ids


async def _answers(
    client: DiptychClient,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    victim: Process | None = None,
) -> list[list[int]]:
    """All at once; ``victim`` is killed when each is under way."""
    answers = [_Answer(prompt, num_tokens) for prompt in prompts]
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(_PATIENCE_S):
        texts = [tasks.create_task(answer.run(client)) for answer in answers]
        if victim is not None:
            for answer in answers:
                await answer.is_under_way.wait()
            victim.kill()
    return [text.result() for text in texts]
