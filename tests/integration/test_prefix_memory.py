"""What the router remembers of a decode worker's cache ends with what the cache holds."""

from pathlib import Path

from diptych.rpc.channel import open_channel
from diptych.v1 import inference_pb2
from tests.call import generate, token_request
from tests.cluster import running_cluster
from tests.prompts import prompt

# A pool of 200 MiB has as many blocks of SmolLM2 (720 KiB); the tiny model's are smaller, which
# placement does not know.
POOL_BLOCKS = 200 * 1024 // 720
PROMPT_LEN = 500
NUM_PROMPTS = 12  # of 32 blocks each: more than the pool holds


async def test_a_prompt_that_was_forgotten_is_prefilled_by_a_prefill_worker(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Not by the decode worker that once had it: it would compute all of it between its steps."""
    flags = {"num-blocks": str(POOL_BLOCKS), "max-model-len": "640"}
    with running_cluster(tmp_path, str(tiny_llama), worker_flags=flags) as cluster:
        await cluster.wait_ready()
        async with open_channel(cluster.router.address) as channel:
            for seed in [*range(1, NUM_PROMPTS + 1), 1]:
                request = token_request(prompt(PROMPT_LEN, seed), max_tokens=4)
                answer = await generate(channel, request)
                assert answer.error is None, answer.error
                assert answer.timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED, seed
                assert answer.timing.transfer.num_tokens == PROMPT_LEN, seed
        assert cluster.decode[0].metric("diptych_local_prefills_total") == 0
        await cluster.wait_baseline(within_s=2)
