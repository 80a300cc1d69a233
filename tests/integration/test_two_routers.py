"""Two routers over the same workers: a worker is killed, or one of the routers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.client import Chunk, DiptychClient
from diptych.rpc.channel import open_channel
from tests.call import Answer, generate, token_request
from tests.cluster import Cluster, Process, another_router, running_cluster

FLAGS = {"num-blocks": "128", "max-model-len": "512"}
ROUTER_FLAGS = {"local-prefill-below-tokens": "0"}
NUM_REQUESTS = 4  # of each router at once
REQUEST = token_request(range(3, 67), max_tokens=400)
NUM_STREAMS = 20


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


class Stream:
    """An answer as the client has it so far."""

    def __init__(self, number: int) -> None:
        """Prompts, stop strings and temperatures differ; the routers draw the seeds."""
        self.request = token_request(
            range(3 + number, 43 + number), max_tokens=80, temperature=0.8 * (number % 3)
        )
        self.request.sampling.stop.extend(["never to be seen", "e "][: number % 4])
        self.chunks: list[Chunk] = []

    async def run(self, client: DiptychClient) -> None:
        async for chunk in client.stream(self.request, timeout_s=60):
            self.chunks.append(chunk)

    @property
    def is_amid(self) -> bool:
        """Or has ended."""
        return len(self.chunks) >= 10 or any(chunk.finish_reason for chunk in self.chunks)

    @property
    def num_resumed(self) -> int:
        usage = self.chunks[-1].usage
        assert usage is not None
        return usage.num_resumed_tokens

    async def check(self, cluster: Cluster) -> None:
        """Asked as a whole with the same seed, the answer is the same, byte for byte."""
        self.request.sampling.seed = self.chunks[0].seed
        async with open_channel(cluster.router.address) as channel:
            whole = await generate(channel, self.request)
        assert whole.error is None
        assert [t for chunk in self.chunks for t in chunk.token_ids] == whole.token_ids
        assert [m for chunk in self.chunks for m in chunk.margins] == pytest.approx(
            whole.margins, abs=1e-3
        )
        assert "".join(chunk.text for chunk in self.chunks).encode() == whole.text.encode()
        assert self.chunks[-1].finish_reason == whole.finish_reason
        assert self.chunks[-1].stop_match == whole.finished.stop


async def test_streams_of_a_killed_router_go_on_at_the_other(
    first: Cluster, second: Cluster
) -> None:
    for router in (first, second):
        await router.wait_ready()
    streams = [Stream(number) for number in range(NUM_STREAMS)]
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
