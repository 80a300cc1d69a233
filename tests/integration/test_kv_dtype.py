"""Caches of other element types: handed over, preempted and reused, the tokens stay the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.engine.model.decoder import Decoder
from diptych.formats import KVDtypeName
from diptych.rpc.channel import open_channel
from diptych.worker.pool_memory import pool_memory
from kvtransfer.memory import HostMemory
from kvtransfer.testing.canaries import Canaries
from tests.call import generate, token_request
from tests.cluster import running_cluster
from tests.engines import load_decoder
from tests.integration.conftest import BLOCK_SIZE, TINY_MAX_LEN
from tests.integration.one_process import MAX_BATCHED_TOKENS, NUM_BLOCKS, OneProcess
from tests.prompts import prompt
from tests.torch_threads import torch_threads

LENGTHS = [16, 33, 70]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Decoder:
    return load_decoder(tiny_llama)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.mark.asyncio
@pytest.mark.parametrize(("dtype", "transport"), [("int8", "nixl"), ("bfloat16", "inline")])
async def test_handed_over_equals_one_process(
    model: Decoder, tiny_llama: Path, tmp_path: Path, dtype: KVDtypeName, transport: str
) -> None:
    """The pair counts as proven only once probe blocks of this layout have crossed."""
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    want = [OneProcess(model, dtype).greedy([p], NUM_TOKENS)[0].token_ids for p in prompts]
    flags = {
        "num-blocks": str(NUM_BLOCKS),
        "max-model-len": str(TINY_MAX_LEN),
        "block-size": str(BLOCK_SIZE),
        "max-batched-tokens": str(MAX_BATCHED_TOKENS),
        "kv-cache-dtype": dtype,
        "transfer.transports": transport,
    }
    router_flags = {"local-prefill-below-tokens": "0"}
    with running_cluster(
        tmp_path, str(tiny_llama), worker_flags=flags, router_flags=router_flags
    ) as cluster:
        await cluster.wait_ready()
        async with open_channel(cluster.router.address) as channel:
            for token_ids, tokens in zip(prompts, want, strict=True):
                answer = await generate(channel, token_request(token_ids, max_tokens=NUM_TOKENS))
                assert answer.error is None
                assert answer.timing.transfer.num_tokens == len(token_ids)
                assert list(answer.token_ids) == tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
def test_preempted_and_reused(model: Decoder, dtype: KVDtypeName) -> None:
    """What is recomputed, and what is found in the prefix cache, is as good as new."""
    prompts = [prompt(length, seed=length) for length in (20, 30, 40)]
    want = [OneProcess(model, dtype).greedy([p], 40)[0].token_ids for p in prompts]
    crowded = OneProcess(model, dtype, num_blocks=10)
    answers = crowded.greedy(prompts, 40)
    assert [answer.token_ids for answer in answers] == want
    assert sum(answer.num_preemptions for answer in answers) > 0

    roomy = OneProcess(model, dtype)
    for token_ids, tokens in zip(prompts, want, strict=True):
        roomy.greedy([token_ids], 1)
        (again,) = roomy.greedy([token_ids], 40)
        assert again.num_cached_tokens >= 16
        assert again.token_ids == tokens


def test_canaries_watch_int8_blocks(model: Decoder) -> None:
    """A stray write into a free block's last scale is noticed, and the engine's own are not."""
    process = OneProcess(model, "int8")
    memory = pool_memory(process.cache)
    assert isinstance(memory, HostMemory)
    canaries = Canaries(process.pool, memory)
    canaries.look()
    want = OneProcess(model, "int8").greedy([prompt(33, seed=33)], NUM_TOKENS)
    assert process.greedy([prompt(33, seed=33)], NUM_TOKENS) == want  # on painted blocks
    canaries.look()
    canaries.look()
    assert (canaries.num_changed, canaries.num_painted) == (0, process.pool.counts().free)
    free = next(b for b in range(NUM_BLOCKS) if process.pool.is_free(b))
    process.cache.memory.bytes[(free + 1) * process.cache.block_bytes - 1] ^= 1
    canaries.look()
    assert canaries.num_changed == 1
