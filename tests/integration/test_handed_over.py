"""Each family's shape of attention and of KV, handed over: the tokens of one process."""

from pathlib import Path

import pytest

from diptych.formats import KVDtypeName
from diptych.v1 import common_pb2
from kvtransfer.config import TransferConfig
from tests.engines import load_decoder
from tests.integration.one_process import MAX_BATCHED_TOKENS, NUM_BLOCKS, OneProcess
from tests.integration.worker_rig import (
    BLOCK_SIZE,
    MAX_LEN,
    Router,
    Settings,
    decode_worker,
    leased,
    peer_of,
    prefill_worker,
    until_proven,
)
from tests.prompts import prompt
from tests.tiny_model import write_tiny_model

LENGTHS = (17, 48, 70, 130)  # Mistral's and Gemma 3's windows are 32 tokens
NUM_SEEN = 3  # blocks that hold such a window, wherever in the last one a token is
NUM_TOKENS = 8


def needed_bytes(layout: common_pb2.KVLayout, num_tokens: int) -> int:
    """Every block of full layers, and of those with a window the last ones."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    return sum(
        group.block_bytes * (min(num_blocks, NUM_SEEN) if group.window else num_blocks)
        for group in layout.groups
    )


@pytest.mark.parametrize(
    ("family", "transport", "dtype"),
    [
        ("mistral", "nixl", "float32"),
        ("mistral", "inline", "int8"),
        ("qwen2", "nixl", "bfloat16"),
        ("qwen3", "nixl", "int8"),
        ("qwen3", "inline", "float32"),
        ("gemma2", "nixl", "float32"),
        ("gemma2", "inline", "int8"),
        ("gemma3", "nixl", "float32"),
        ("gemma3", "inline", "int8"),
        ("gemma3", "nixl", "fp8"),
    ],
)
async def test_equals_one_process(
    tmp_path: Path, family: str, transport: str, dtype: KVDtypeName
) -> None:
    model = write_tiny_model(tmp_path / family, family)
    settings: Settings = {
        "num_blocks": NUM_BLOCKS,
        "max_model_len": MAX_LEN,
        "block_size": BLOCK_SIZE,
        "max_batched_tokens": MAX_BATCHED_TOKENS,
        "kv_cache_dtype": dtype,
        "transfer": TransferConfig(transports=(transport,)),
    }
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    one_process = OneProcess(load_decoder(model), dtype)
    want = [one_process.greedy([p], NUM_TOKENS)[0].token_ids for p in prompts]
    async with (
        prefill_worker(model, tmp_path, settings) as prefill,
        decode_worker(model, tmp_path, settings) as decode,
    ):
        router, source = Router(decode), await peer_of(prefill)
        await router.open([source])
        await until_proven(decode)
        layout = (await prefill.state()).layout
        for token_ids, tokens in zip(prompts, want, strict=True):
            sequence_id, num_cached = await router.reserve(token_ids, max_tokens=NUM_TOKENS)
            lease, ticket, first = await leased(prefill, token_ids, router.worker_incarnation)
            await router.bind(sequence_id, source, ticket, num_cached)
            proven = (await router.next("proven")).proven
            assert proven.stats.transport == transport
            assert proven.stats.num_tokens == len(token_ids)
            assert proven.stats.num_bytes == needed_bytes(layout, len(token_ids))
            await lease.close()
            await router.start(sequence_id, [first])
            (said,) = await router.until_ended(sequence_id)
            assert [first, *said.token_ids] == tokens
        await router.close()
        await decode.wait_baseline()
        await prefill.wait_baseline()
