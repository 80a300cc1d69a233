"""Every shape at a block's edge, over a real hand-off: prompt length by what decode has cached."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests import hf_reference
from tests.call import generate, token_request
from tests.cluster import Cluster, running_cluster
from tests.golden_rule import check_exact
from tests.integration.conftest import BLOCK_SIZE, TINY_MAX_LEN
from tests.prompts import prompt
from tests.transports import TRANSPORTS

NUM_TOKENS = 6
LENGTHS = [1, 15, 16, 17, 31, 32, 33, TINY_MAX_LEN - NUM_TOKENS, TINY_MAX_LEN - 2, TINY_MAX_LEN - 1]
EDGES = [
    (length, num_cached)
    for length in LENGTHS
    for num_cached in sorted({0, 1, length // BLOCK_SIZE - 1, length // BLOCK_SIZE})
    if 0 <= num_cached <= length // BLOCK_SIZE
]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=TRANSPORTS)
def cluster(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    flags = {
        "num-blocks": "128",
        "max-model-len": str(TINY_MAX_LEN),
        "block-size": str(BLOCK_SIZE),
        "max-batched-tokens": "64",
        "transfer.transports": request.param,
    }
    with running_cluster(
        tmp_path_factory.mktemp(f"boundaries-{request.param}"),
        str(tiny_llama),
        worker_flags=flags,
        router_flags={"local-prefill-below-tokens": "0"},
    ) as running:
        yield running


@pytest.mark.parametrize(("length", "num_cached"), EDGES)
async def test_exact_at_every_edge(
    cluster: Cluster, channel: grpc.aio.Channel, tiny_llama: Path, length: int, num_cached: int
) -> None:
    """``num_cached`` blocks are none, one, all but one, or all that the prompt fills."""
    token_ids = prompt(length, seed=length * 7 + num_cached)
    salt = f"{length}-{num_cached}"
    if num_cached:
        primer = token_ids[: num_cached * BLOCK_SIZE]
        primed = await generate(channel, token_request(primer, max_tokens=2, salt=salt))
        assert primed.error is None
    num_tokens = min(NUM_TOKENS, TINY_MAX_LEN - length)
    answer = await generate(channel, token_request(token_ids, max_tokens=num_tokens, salt=salt))
    assert answer.error is None
    expected = hf_reference.greedy(tiny_llama, token_ids, num_tokens)
    check_exact(answer.token_ids, expected.token_ids, expected.margins, f"{length} {num_cached}")
    assert answer.usage.num_prompt_tokens == length
    assert answer.usage.num_output_tokens == num_tokens
    transfer = answer.timing.transfer
    if num_tokens > 1:
        assert transfer.num_tokens == length - num_cached * BLOCK_SIZE
    await cluster.wait_baseline(within_s=2)
