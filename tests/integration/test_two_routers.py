"""Two routers over the same workers, one of which is killed."""

import asyncio
from pathlib import Path

from diptych.rpc.channel import open_channel
from tests.call import Answer, generate, token_request
from tests.cluster import Cluster, Process, another_router, running_cluster

FLAGS = {"num-blocks": "128", "max-model-len": "512"}
ROUTER_FLAGS = {"local-prefill-below-tokens": "0"}
NUM_REQUESTS = 4  # of each router at once
REQUEST = token_request(range(3, 67), max_tokens=400)


async def ask(cluster: Cluster) -> Answer:
    async with open_channel(cluster.router.address) as channel:
        return await generate(channel, REQUEST)


def num_running(worker: Process) -> float:
    return worker.metric("diptych_sequences_running")


async def test_both_go_on_when_a_worker_dies_and_nothing_leaks(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with (
        running_cluster(
            tmp_path, str(tiny_llama), num_decode=2, worker_flags=FLAGS, router_flags=ROUTER_FLAGS
        ) as first,
        another_router(first, tmp_path, tiny_llama, ROUTER_FLAGS) as second,
    ):
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
