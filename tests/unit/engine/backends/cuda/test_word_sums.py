"""Digests of blocks on a device, interpreted: the bits of the host's."""

from tests.triton_interpreter import INTERPRETED

# isort: split
import mmap
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.engine.backends.cuda import kv_memory
from diptych.engine.backends.cuda.kv_memory import CudaKVMemory, add_up
from diptych.engine.inputs import build_inputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.rank_share import RankShare
from diptych.engine.scheduling.step import Chunk, StepPlan
from diptych.word_sums import Sums, Words, total
from diptych.worker.device_pool import DevicePool
from diptych.worker.device_rank_pools import DeviceRankPools
from diptych.worker.pool_memory import pool_memory, rank_pools
from kvtransfer.block_shares import BlockShare
from kvtransfer.digest import Coverage, block_digest, share_words, words_of
from kvtransfer.host_sums import sums_of
from kvtransfer.memory import HostMemory
from tests.attention_config import config_of

HOST = torch.device("cpu")


class Memory(CudaKVMemory):
    """A device's, on the host, where nothing has to be waited for."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, HOST)
        self.num_waits = 0

    def synchronise(self) -> None:
        self.num_waits += 1


def noise(num_words: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_words)
    return torch.randint(-(2**62), 2**62, (num_words,), generator=generator) * 3


@settings(max_examples=25, deadline=None)
@given(
    # Around the edges of a line, of a tile and of a program's part.
    num_words=st.sampled_from([1, 7, 8, 9, 256, 1023, 1024, 1025, 2048, 4100]),
    blocks=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4100)), min_size=1, max_size=3),
    seed=st.sampled_from([0, 0, 5, 2**64 - 1]),
)
def test_bits_are_the_hosts(num_words: int, blocks: list[tuple[int, int]], seed: int) -> None:
    """Blocks in no order, some cut short, all of them or some lines."""
    memory = noise(5 * num_words)
    host = HostMemory(memory.numpy().view(np.uint8), 8 * num_words)
    ids = [block_id for block_id, _ in blocks]
    sizes = [8 * min(count, num_words) for _, count in blocks]
    coverages = [Coverage(seed, 3 + i, size) for i, size in enumerate(sizes)]
    asked = words_of([8 * num_words * block_id for block_id in ids], sizes, coverages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_memory, "_NUM_TILES", 2)  # so that a block has several programs
        found = add_up(memory, asked).numpy().view(np.uint64).tolist()
    got = tuple(Sums(*each).digest(size) for each, size in zip(found, sizes, strict=True))
    assert got == host.digests(ids, coverages)


def test_a_pool_on_a_device_digests_what_a_step_wrote() -> None:
    """By way of the pool, as the transfer asks it; no byte is copied out."""
    config, size = config_of(2, 1, 16, None), 8
    memories: list[Memory] = []

    def allocate(num_bytes: int) -> Memory:
        memories.append(Memory(num_bytes))
        return memories[0]

    cache = KVCache(config, 6, size, torch.float32, allocate)
    chunk = Chunk(token_ids=tuple(range(20)), start=0, block_table=(4, 1, 5), sample=None)
    inputs = build_inputs(StepPlan(chunks=(chunk,)), size)
    q, kv = torch.randn(20, 2, 16), torch.randn(20, 2, 1, 16)
    step = INTERPRETED.attention(config, cache, torch.float32).begin_step(inputs)
    step(0, q, kv, torch.empty_like(q))
    pool = DevicePool(cache)
    content = {i: pool.read([i], 0, cache.block_bytes) for i in (4, 1, 5)}
    assert all(any(block) for block in content.values())
    num_waits = memories[0].num_waits
    for seed in (0, 9):
        part = Coverage(seed, 7, cache.block_bytes // 2)
        coverages = dict(zip((4, 1, 5), (Coverage(seed, 5), Coverage(seed, 6), part), strict=True))
        wanted = [block_digest(content[i], each) for i, each in coverages.items()]
        assert list(pool.digests(list(coverages), list(coverages.values()))) == wanted
    assert memories[0].num_waits == num_waits, "a digest waits for no step in flight"
    assert pool.digests([], []) == ()


@pytest.mark.parametrize("seed", [0, 9])
def test_ranks_on_devices_digest_what_the_host_does(seed: int) -> None:
    """Whole blocks and parts of them, in memory of two devices; no byte is copied out."""
    config, ids = config_of(4, 2, 8, None), [4, 0, 5]
    whole = KVCache(config, 6, 4)
    whole.memory.bytes.copy_(noise(whole.num_bytes // 8).view(torch.uint8))
    own = [KVCache(RankShare(rank, 2).of(config), 6, 4, allocate=Memory) for rank in (0, 1)]
    for rank, cache in enumerate(own):
        cache.tensor.copy_(whole.tensor[:, :, :, rank : rank + 1])
    ranks = rank_pools(own[0], [own[1].memory])
    assert isinstance(ranks, DeviceRankPools)
    size = whole.block_bytes
    coverages = [Coverage(seed, 7), Coverage(seed, 8, size // 2), Coverage(seed, 9, size)]
    assert ranks.digests(ids, coverages) == pool_memory(whole).digests(ids, coverages)
    assert [cache.memory.num_waits for cache in own if isinstance(cache.memory, Memory)] == [0, 0]
    assert ranks.digests([], []) == ()


@pytest.mark.parametrize("seed", [0, 9])
@pytest.mark.parametrize("num_stretches", [2, 4])
def test_what_a_rank_gives_to_a_digest_is_the_hosts(seed: int, num_stretches: int) -> None:
    share = BlockShare(1, 2, 384)
    memory = noise(3 * 4 * 48)
    host = HostMemory(memory.numpy().view(np.uint8), 4 * 384)
    ids = [2, 0]
    coverages = [Coverage(seed, 3 + i, num_stretches * 768) for i in range(2)]
    asked = share_words([block_id * host.block_bytes for block_id in ids], coverages, share)
    found = add_up(memory, asked.words).numpy().view(np.uint64).tolist()
    sums = iter(Sums(*each) for each in found)
    got = [total(islice(sums, num)).digest(7) for num in asked.num_runs]
    assert got == [each.digest(7) for each in host.share_sums(ids, coverages, share)]


def test_words_beyond_what_32_bits_can_count(tmp_path: Path) -> None:
    begin, path = 2**31 + 5, tmp_path / "pool"
    path.touch()
    with path.open("r+b") as file:
        file.truncate(8 * (begin + 64))  # of which only what is touched exists
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.int64)
    memory[begin:] = noise(64)
    (found,) = add_up(memory, Words(np.array([begin]), np.array([64]), None)).numpy()
    wanted = sums_of(memoryview(noise(64).numpy().tobytes()))
    assert Sums(*found.view(np.uint64).tolist()).digest(512) == wanted.digest(512)
