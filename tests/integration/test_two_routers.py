"""Two routers over the same workers: a worker is killed, or one of the routers, or a client.

With ``--hypothesis-profile long`` 200 streams are cut at random moments, half of them by their
router's end and half by their client's. An answer has to be that of an undisturbed call, by the
golden rule: what runs beside it differs, and with it the rounding.
"""

import asyncio
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from diptych.client import Chunk, DiptychClient
from diptych.rpc.channel import open_channel
from diptych.v1 import inference_pb2
from tests.call import Answer, generate, token_request
from tests.cluster import Cluster, Process, another_router, running_cluster
from tests.golden_rule import MARGIN, Run, check_exact_later
from tests.integration.printing_client import asking
from tests.notes import Note

IS_LONG = settings.get_current_profile_name() == "long"
FLAGS = {"num-blocks": "128", "max-model-len": "512"}
ROUTER_FLAGS = {"local-prefill-below-tokens": "0"}
NUM_REQUESTS = 4  # of each router at once
REQUEST = token_request(range(3, 67), max_tokens=400)
NUM_STREAMS = 20
NUM_OF_CLIENT = 10 if IS_LONG else 4  # streams
NUM_KILLS_OF_ROUTER, NUM_KILLS_OF_CLIENT = (5, 10) if IS_LONG else (1, 1)


@pytest.fixture(scope="module")
def first(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(
        tmp_path_factory.mktemp("cluster"),
        str(tiny_llama),
        num_decode=2,
        worker_flags=FLAGS,
        router_flags=ROUTER_FLAGS,
    ) as cluster:
        yield cluster


@pytest.fixture
def second(first: Cluster, tiny_llama: Path, tmp_path: Path) -> Iterator[Cluster]:
    with another_router(first, tmp_path, tiny_llama, ROUTER_FLAGS) as cluster:
        yield cluster


class Undisturbed:
    """What a request is answered with where nobody is killed."""

    def __init__(self, cluster: Cluster, request: inference_pb2.GenerateRequest) -> None:
        self.num_ties = 0
        """Near ties that were decided otherwise."""
        self._cluster = cluster
        self._request = request

    async def check(self, token_ids: Sequence[int], text: str) -> Answer:
        """Byte for byte, but behind a near tie, from where on it is asked again; the last call."""
        last = whole = await self._ask(())

        async def go_on(prefix: Sequence[int]) -> Run:
            nonlocal last
            last = await self._ask(prefix)
            return Run(last.token_ids, last.margins)

        run = Run(whole.token_ids, whole.margins)
        ties = await check_exact_later(token_ids, run, "a stream", go_on)
        self.num_ties = len(ties)
        assert text.endswith(last.text) if ties else text.encode() == whole.text.encode()
        return last

    async def _ask(self, emitted: Sequence[int]) -> Answer:
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.emitted_token_ids[:] = emitted
        async with open_channel(self._cluster.router.address) as channel:
            answer = await generate(channel, request)
        assert answer.error is None
        return answer


class Stream:
    """An answer as the client has it so far."""

    def __init__(self, number: int) -> None:
        """Prompts, stop strings and temperatures differ; the routers draw the seeds."""
        self.request = token_request(
            range(3 + number, 43 + number), max_tokens=80, temperature=0.8 * (number % 3)
        )
        self.request.sampling.stop.extend(["never to be seen", "e "][: number % 4])
        self.chunks: list[Chunk] = []
        self.num_chunks_amid = 10
        self.num_ties = 0

    async def run(self, client: DiptychClient) -> None:
        async for chunk in client.stream(self.request, timeout_s=60):
            self.chunks.append(chunk)

    @property
    def is_amid(self) -> bool:
        """Or has ended."""
        return len(self.chunks) >= self.num_chunks_amid or any(
            chunk.finish_reason for chunk in self.chunks
        )

    @property
    def num_resumed(self) -> int:
        usage = self.chunks[-1].usage
        assert usage is not None
        return usage.num_resumed_tokens

    async def check(self, cluster: Cluster) -> None:
        """Asked as a whole with the same seed, the answer is the same."""
        self.request.sampling.seed = self.chunks[0].seed
        token_ids = [t for chunk in self.chunks for t in chunk.token_ids]
        margins = [m for chunk in self.chunks for m in chunk.margins]
        undisturbed = Undisturbed(cluster, self.request)
        text = "".join(chunk.text for chunk in self.chunks)
        last = await undisturbed.check(token_ids, text)
        num_before = len(margins) - len(last.margins)
        assert margins[num_before:] == pytest.approx(last.margins, abs=1e-3)
        self.num_ties = undisturbed.num_ties
        if self.num_ties:
            assert min(margins[:num_before]) < MARGIN, "it was no near tie here"
        assert self.chunks[-1].finish_reason == last.finish_reason
        assert self.chunks[-1].stop_match == last.finished.stop


@pytest.mark.parametrize("turn", range(NUM_KILLS_OF_ROUTER))
async def test_streams_of_a_killed_router_go_on_at_the_other(
    first: Cluster, second: Cluster, turn: int, note: Note
) -> None:
    for router in (first, second):
        await router.wait_ready()
    streams = [Stream(number) for number in range(NUM_STREAMS)]
    if turn:  # the first one is as it ever was
        for stream in streams:
            stream.num_chunks_amid = random.Random(turn).randint(2, 40)
    async with (
        DiptychClient(f"{second.router.address},{first.router.address}") as client,
        asyncio.TaskGroup() as tasks,
    ):
        asking = [tasks.create_task(stream.run(client)) for stream in streams]
        while sum(stream.is_amid for stream in streams) < NUM_STREAMS // 2:
            await asyncio.sleep(0.001)
        second.router.kill()
        await asyncio.wait(asking)
    assert sum(stream.num_resumed > 0 for stream in streams) >= NUM_STREAMS // 4
    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(stream.check(first))
    num_resumed = sum(stream.num_resumed > 0 for stream in streams)
    num_ties = sum(stream.num_ties for stream in streams)
    told = f"{len(streams)} streams of a killed router equal, but for {num_ties} near ties"
    note(f"{told}; {num_resumed} of them resumed")
    await first.wait_baseline(within_s=5)


class Printed:
    """What a killed client had printed of one answer."""

    def __init__(self, number: int) -> None:
        self.stream = Stream(number)
        self.seed: int | None = None
        self.token_ids: list[int] = []
        self.text = ""

    def add(self, seed: int, token_ids: list[int], text: str) -> None:
        self.seed = seed
        self.token_ids += token_ids
        self.text += text

    async def go_on(self, cluster: Cluster) -> None:
        """Another client gets the rest, and both have what an undisturbed one gets."""
        request = self.stream.request
        if self.seed is not None:
            request.sampling.seed = self.seed
        request.emitted_token_ids.extend(self.token_ids)
        async with open_channel(cluster.router.address) as channel:
            rest = await generate(channel, request)
        assert rest.error is None
        request.sampling.seed = rest.started.seed
        undisturbed = Undisturbed(cluster, request)
        last = await undisturbed.check(self.token_ids + rest.token_ids, self.text + rest.text)
        assert rest.finish_reason == last.finish_reason
        self.stream.num_ties = undisturbed.num_ties


@pytest.mark.parametrize("turn", range(NUM_KILLS_OF_CLIENT))
async def test_what_a_killed_client_had_another_continues(
    first: Cluster, turn: int, note: Note
) -> None:
    await first.wait_ready()
    answers = [Printed(turn * NUM_OF_CLIENT + number) for number in range(NUM_OF_CLIENT)]
    num_lines = random.Random(turn).randint(NUM_OF_CLIENT, 25 * NUM_OF_CLIENT)
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.integration.printing_client"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(asking(first.router.address, [each.stream.request for each in answers]))
        await client.stdin.drain()
        for _ in range(num_lines):
            if not (line := await client.stdout.readline()):
                break  # all have ended: words come together where the machine is slow
            number, *told = json.loads(line)
            answers[number].add(*told)
    finally:
        client.kill()
        await client.wait()
    await first.wait_baseline(within_s=5)  # nobody computes for one who is gone
    async with asyncio.TaskGroup() as tasks:
        for answer in answers:
            tasks.create_task(answer.go_on(first))
    num_cut = sum(bool(answer.token_ids) for answer in answers)
    num_ties = sum(answer.stream.num_ties for answer in answers)
    told = f"{len(answers)} streams of a killed client equal, but for {num_ties} near ties"
    note(f"{told}; {num_cut} of them cut amid")
    await first.wait_baseline(within_s=5)


async def ask(cluster: Cluster) -> Answer:
    async with open_channel(cluster.router.address) as channel:
        return await generate(channel, REQUEST)


def num_running(worker: Process) -> float:
    return worker.metric("diptych_sequences_running")


async def test_both_go_on_when_a_worker_dies_and_nothing_leaks(
    first: Cluster, second: Cluster
) -> None:
    routers = (first, second)
    for worker in first.decode:
        await first.start_again(worker)
    for router in routers:
        await router.wait_ready()
    whole = await ask(first)
    assert len(whole.token_ids) == 400
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask(each)) for each in routers * NUM_REQUESTS]
        await first.eventually(
            lambda: sum(map(num_running, first.decode)) == len(asking),
            within_s=20,
            what="all run",
        )
        max(first.decode, key=num_running).kill()
    for task in asking:
        answer = task.result()
        assert answer.error is None
        assert answer.token_ids == whole.token_ids
    assert sum(each.router.metric('diptych_retries_total{action="') for each in routers) > 0
    assert not any(each.router.metric("diptych_router_requests_placed") for each in routers)
    await first.wait_baseline(within_s=5)
