"""Caches of other element types are handed over, and those that differ are not."""

from pathlib import Path

import pytest

from diptych import rpc
from tests.call import generate, token_request
from tests.cluster import running_cluster
from tests.integration.conftest import BLOCK_SIZE, TINY_MAX_LEN
from tests.integration.test_boundaries import prompt

LENGTHS = [15, 16, 33, 70]
NUM_TOKENS = 6


async def answers(model: Path, path: Path, dtype: str, transport: str | None) -> list[list[int]]:
    """Greedy tokens; transport None: a decode worker that computes the prompts itself."""
    flags = {
        "num-blocks": "64",
        "max-model-len": str(TINY_MAX_LEN),
        "block-size": str(BLOCK_SIZE),
        "max-batched-tokens": "64",
        "kv-cache-dtype": dtype,
    }
    if transport is not None:
        flags["transfer.transports"] = transport
    with running_cluster(
        path,
        str(model),
        num_prefill=0 if transport is None else 1,
        worker_flags=flags,
        router_flags={"local-prefill-below-tokens": "0"},
    ) as cluster:
        await cluster.wait_ready()
        async with rpc.channel(cluster.router.address) as channel:
            tokens = []
            for length in LENGTHS:
                request = token_request(prompt(length, seed=length), max_tokens=NUM_TOKENS)
                answer = await generate(channel, request)
                assert answer.error is None
                assert (answer.timing.transfer.num_tokens > 0) == (transport is not None)
                tokens.append(list(answer.token_ids))
    return tokens


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
async def test_handed_over_equals_one_process(tiny_llama: Path, tmp_path: Path, dtype: str) -> None:
    local = await answers(tiny_llama, tmp_path / "local", dtype, None)
    for transport in ("inline", "nixl"):
        assert await answers(tiny_llama, tmp_path / transport, dtype, transport) == local
