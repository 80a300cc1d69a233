"""A model most of whose layers slide, handed over: what pulls left in the cache, and what of it
serves whom; the tokens of one process, whatever lies in the holes."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from diptych.v1 import common_pb2, decode_pb2
from kvtransfer.config import TransferConfig
from tests.engines import load_decoder
from tests.integration.one_process import MAX_BATCHED_TOKENS, NUM_BLOCKS, OneProcess
from tests.integration.worker_rig import (
    BLOCK_SIZE,
    MAX_LEN,
    Router,
    Said,
    Settings,
    Worker,
    decode_worker,
    leased,
    peer_of,
    prefill_worker,
    until_proven,
)
from tests.prompts import prompt
from tests.tiny_model import write_tiny_model

NUM_TOKENS = 8
LONG = prompt(130, seed=1)  # the windows are 32 tokens: two blocks before that of the token


class Pulled(NamedTuple):
    sequence_id: int
    num_cached: int
    stats: common_pb2.TransferStats
    first: int  # token


class Case:
    """One prefill and one decode worker, and the same model in one process."""

    def __init__(self, model: Path, prefill: Worker, decode: Worker) -> None:
        self._prefill = prefill
        self.router = Router(decode)
        self._one_process = OneProcess(load_decoder(model), "float32")
        self._source: decode_pb2.Peer | None = None

    async def open(self, decode: Worker) -> None:
        self._source = await peer_of(self._prefill)
        await self.router.open([self._source])
        await until_proven(decode)

    def want(self, token_ids: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        return self._one_process.greedy([token_ids], num_tokens)[0].token_ids

    async def pull(self, token_ids: list[int], max_tokens: int = NUM_TOKENS) -> Pulled:
        assert self._source is not None
        router = self.router
        sequence_id, num_cached = await router.reserve(
            token_ids, max_tokens=max_tokens, to_pull=True
        )
        lease, ticket, first = await leased(self._prefill, token_ids, router.worker_incarnation)
        await router.bind(sequence_id, self._source, ticket, num_cached)
        stats = (await router.next("proven")).proven.stats
        await lease.close()
        return Pulled(sequence_id, num_cached, stats, first)

    async def handed_over(self, token_ids: list[int]) -> Pulled:
        """Pull and decode; as one process would."""
        pulled = await self.pull(token_ids)
        await self.router.start(pulled.sequence_id, [pulled.first])
        said = await self.router.until_ended(pulled.sequence_id)
        assert [pulled.first, *tokens_of(said)] == self.want(token_ids)
        return pulled


def tokens_of(said: list[Said]) -> list[int]:
    (one,) = said
    return one.token_ids


@asynccontextmanager
async def case_of(
    tmp_path: Path,
    transport: str,
    decode_blocks: int,
    family: str = "gemma3",
    shape: Mapping[str, object] = MappingProxyType({}),
) -> AsyncIterator[Case]:
    model = write_tiny_model(tmp_path / family, family, num_layers=6, shape=shape)
    settings: Settings = {
        "num_blocks": NUM_BLOCKS,
        "max_model_len": MAX_LEN,
        "block_size": BLOCK_SIZE,
        "max_batched_tokens": MAX_BATCHED_TOKENS,
        "transfer": TransferConfig(transports=(transport,)),
    }
    async with (
        prefill_worker(model, tmp_path, settings) as prefill,
        decode_worker(model, tmp_path, settings, num_blocks=decode_blocks) as decode,
    ):
        case = Case(model, prefill, decode)
        await case.open(decode)
        yield case
        await case.router.close()
        await decode.wait_baseline()
        await prefill.wait_baseline()


@pytest.mark.parametrize("transport", ["inline", "nixl"])
async def test_prompts_that_share_a_prefix(tmp_path: Path, transport: str) -> None:
    async with case_of(tmp_path, transport, NUM_BLOCKS) as case:
        first = await case.handed_over(LONG)
        assert first.num_cached == 0
        again = await case.handed_over(LONG)
        assert again.num_cached == 128
        assert again.stats.num_tokens == 2
        longer = await case.handed_over([*LONG, *prompt(30, seed=2)])
        assert longer.num_cached == 128
        other = await case.handed_over([*LONG[:100], *prompt(40, seed=3)])
        assert other.num_cached == 96  # its windows lie behind that
        shorter = await case.handed_over(LONG[:100])  # its windows begin in a hole
        assert shorter.num_cached == 64
        assert (await case.handed_over(LONG[:100])).num_cached == 96
        assert (await case.handed_over(LONG)).num_cached == 128


async def test_a_mistral_of_which_some_layers_slide(tmp_path: Path) -> None:
    """As Ministral: the windows of those layers are handed over, and all of the full ones."""
    whole = ["full_attention"] * 6
    some = ["full_attention", "sliding_attention", "sliding_attention"] * 2
    num_bytes = []
    for types in (whole, some, ["sliding_attention"] * 6):
        shape = {"layer_types": types}
        async with case_of(tmp_path, "inline", NUM_BLOCKS, "mistral", shape) as case:
            pulled = await case.handed_over(LONG)
            assert (await case.handed_over(LONG)).num_cached == 128
            num_bytes.append(pulled.stats.num_bytes)
    assert num_bytes[2] < num_bytes[1] < num_bytes[0]
    assert 3 * num_bytes[1] == num_bytes[0] + 2 * num_bytes[2]


async def test_what_was_to_be_pulled_is_computed_from_where_that_can_be(tmp_path: Path) -> None:
    token_ids = [*LONG[:100], *prompt(40, seed=3)]
    async with case_of(tmp_path, "inline", NUM_BLOCKS) as case:
        await case.handed_over(LONG)
        sequence_id, found = await case.router.reserve(token_ids)
        assert found == 0
        await case.router.release(sequence_id)
        await case.router.until_ended(sequence_id)
        sequence_id, found = await case.router.reserve(
            token_ids, max_tokens=NUM_TOKENS, to_pull=True
        )
        assert found == 96
        await case.router.start(sequence_id, [], compute_missing=True)
        said = await case.router.until_ended(sequence_id)
        assert tokens_of(said) == case.want(token_ids)


async def test_a_whole_hit_computes_its_last_block_again(tmp_path: Path) -> None:
    async with case_of(tmp_path, "inline", NUM_BLOCKS) as case:
        for length, num_cached in ((128, 128), (112, 0)):  # 112 would see a hole from there
            await case.handed_over(LONG[:128])
            sequence_id, found = await case.router.reserve(LONG[:length], max_tokens=NUM_TOKENS)
            assert found == num_cached
            await case.router.start(sequence_id, [], compute_missing=True)
            said = await case.router.until_ended(sequence_id)
            assert tokens_of(said) == case.want(LONG[:length])


async def test_what_is_preempted_after_its_pull_is_computed(tmp_path: Path) -> None:
    num_tokens = 60
    prompts = [prompt(100, seed=seed) for seed in (3, 4)]
    async with case_of(tmp_path, "inline", MAX_LEN // BLOCK_SIZE) as case:
        pulled = [await case.pull(token_ids, num_tokens) for token_ids in prompts]
        for each in pulled:
            await case.router.start(each.sequence_id, [each.first])
        said = await case.router.until_ended(*(each.sequence_id for each in pulled))
        for token_ids, each, one in zip(prompts, pulled, said, strict=True):
            assert [each.first, *one.token_ids] == case.want(token_ids, num_tokens)
        assert sum(one.ended.num_preemptions for one in said if one.ended is not None) > 0
