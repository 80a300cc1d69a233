"""Routers know what is in the workers' prefix caches, and place by that."""

from pathlib import Path

from diptych.rpc.channel import open_channel
from diptych.v1 import inference_pb2
from tests.call import Answer, generate, token_request
from tests.cluster import Cluster, another_router, running_cluster
from tests.prompts import prompt
from tests.waiting import until

# A pool of 200 MiB has as many blocks of SmolLM2 (720 KiB); the tiny model's are smaller, which
# placement does not know.
POOL_BLOCKS = 200 * 1024 // 720
PROMPT_LEN = 500
NUM_PROMPTS = 12  # of 32 blocks each: more than the pool holds


async def ask(cluster: Cluster, seed: int) -> Answer:
    async with open_channel(cluster.router.address) as channel:
        answer = await generate(channel, token_request(prompt(PROMPT_LEN, seed), max_tokens=4))
    assert answer.error is None, answer.error
    return answer


def knows_all(cluster: Cluster) -> bool:
    """Whether the router knows as many blocks as are cached; nobody holds any."""
    num_cached = sum(worker.blocks()["cached"] for worker in (*cluster.prefill, *cluster.decode))
    return cluster.router.metric("diptych_router_cached_blocks") == num_cached > POOL_BLOCKS


async def test_a_prompt_that_was_evicted_is_prefilled_by_a_prefill_worker(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Not by the decode worker that once had it: it would compute all of it between its steps.

    And one that is there is not prefilled again, whichever router it came through.
    """
    flags = {"num-blocks": str(POOL_BLOCKS), "max-model-len": "640"}
    with running_cluster(tmp_path, str(tiny_llama), worker_flags=flags) as cluster:
        await cluster.wait_ready()
        for seed in [*range(1, NUM_PROMPTS + 1), 1]:
            answer = await ask(cluster, seed)
            assert answer.timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED, seed
            assert answer.timing.transfer.num_tokens == PROMPT_LEN, seed
        assert cluster.decode[0].metric("diptych_local_prefills_total") == 0
        with another_router(cluster, tmp_path, tiny_llama, {}) as second:
            await second.wait_ready()
            for each in (cluster, second):
                await until(lambda each=each: knows_all(each), 30)  # type: ignore[misc]
            again = await ask(second, 1)
            assert again.timing.kv_path == inference_pb2.KV_PATH_LOCAL
            assert cluster.decode[0].metric("diptych_local_prefills_total") == 1
            evicted = await ask(second, 2)
            assert evicted.timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED
            assert evicted.timing.transfer.num_tokens == PROMPT_LEN
            assert cluster.decode[0].metric("diptych_local_prefills_total") == 1
        await cluster.wait_baseline(within_s=2)
