"""A cache of the host and one of a device, to the transfer: the same bytes."""

import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from diptych.engine.kv.cache import KVCache, block_bytes
from diptych.engine.kv.memory import HostKVMemory, KVMemory
from diptych.engine.model.rank_share import RankShare
from diptych.errors import ConfigurationError, DeviceLostError
from diptych.word_sums import Sums, Words
from diptych.worker.device_pool import DevicePool
from diptych.worker.device_rank_pools import DeviceRankPools
from diptych.worker.pool_memory import pool_memory, rank_pools
from kvtransfer.block_shares import BlockShare
from kvtransfer.digest import Coverage
from kvtransfer.memory import DeviceCopies, HostMemory, PoolMemory
from kvtransfer.rank_pools import RankPools
from tests.attention_config import config_of
from tests.device_on_host import DeviceOnHost

CONFIG = config_of(2, 1, 8, window=None)
NUM_BLOCKS, BLOCK_SIZE = 6, 4
BLOCK_BYTES = block_bytes(CONFIG, BLOCK_SIZE, torch.float32)


class FakeDevice(DeviceOnHost):
    """Counts how often it is waited for, and may be lost."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_waits = 0
        self.lost = False

    def synchronise(self) -> None:
        self.num_waits += 1
        if self.lost:
            raise DeviceLostError("broken")

    def word_sums(self, words: Words) -> list[Sums]:
        if self.lost:
            raise RuntimeError("what it was asked for before")
        return super().word_sums(words)


class SlowPool(DevicePool):
    """Whose copies end when they may, or fail."""

    is_held = False
    refusal: Exception | None = None  # at once
    error: Exception | None = None

    def copy_out(
        self,
        block_ids: Sequence[int],
        staging: HostMemory,
        slots: Sequence[int],
        num_bytes: int | None = None,
        share: BlockShare | None = None,
    ) -> Callable[[], bool]:
        if self.refusal is not None:
            raise self.refusal
        begun = super().copy_out(block_ids, staging, slots, num_bytes, share)

        def is_over() -> bool:
            if self.error is not None:
                raise self.error
            return not self.is_held and begun()

        return is_over


def filled(cache: KVCache) -> KVCache:
    bits = torch.arange(cache.num_bytes).mul_(7).remainder_(251)
    cache.memory.bytes.copy_(bits)
    return cache


def pools() -> tuple[PoolMemory, PoolMemory]:
    host = filled(KVCache(CONFIG, NUM_BLOCKS, BLOCK_SIZE))
    device = filled(KVCache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, allocate=FakeDevice))
    return pool_memory(host), pool_memory(device)


def test_what_a_pool_says_of_itself() -> None:
    host, device = pools()
    assert isinstance(host, HostMemory)
    assert isinstance(device, DevicePool)
    assert (host.memory_kind, device.memory_kind) == ("DRAM", "VRAM")
    assert host.shared_fd is not None
    assert device.shared_fd is None
    assert (host.block_bytes, host.num_blocks) == (device.block_bytes, device.num_blocks)
    assert device.base_address % 16 == 0
    assert device.device_id == 0


def of_two_ranks(
    block_size: int, dtype: torch.dtype, allocate: Callable[[int], KVMemory] = HostKVMemory
) -> tuple[RankPools, PoolMemory]:
    """A model's whole blocks, and the same in two caches of half of its heads."""
    config = config_of(4, 2, 8, window=None)
    whole = filled(KVCache(config, NUM_BLOCKS, block_size, dtype))
    own = [
        KVCache(RankShare(rank, 2).of(config), NUM_BLOCKS, block_size, dtype, allocate)
        for rank in (0, 1)
    ]
    for rank, cache in enumerate(own):
        cache.tensor.copy_(whole.tensor[:, :, :, rank : rank + 1])
    return rank_pools(own[0], [own[1].memory]), pool_memory(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_ranks_caches_are_whole_blocks_together(dtype: torch.dtype) -> None:
    ranks, whole = of_two_ranks(4, dtype)
    assert (ranks.block_bytes, ranks.num_blocks) == (whole.block_bytes, NUM_BLOCKS)
    everything = range(NUM_BLOCKS), 0, NUM_BLOCKS * whole.block_bytes
    assert ranks.read(*everything) == whole.read(*everything)
    covered = [Coverage()] * NUM_BLOCKS
    assert ranks.digests(range(NUM_BLOCKS), covered) == whole.digests(range(NUM_BLOCKS), covered)
    assert all(part.shared_fd is not None for part in ranks.parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_on_devices_are_told_as_one_pool_of_the_host(dtype: torch.dtype) -> None:
    ranks, whole = of_two_ranks(4, dtype, FakeDevice)
    assert isinstance(ranks, DeviceRankPools)
    assert isinstance(ranks, DeviceCopies)
    assert (ranks.memory_kind, ranks.block_bytes) == ("VRAM", whole.block_bytes)
    assert len({part.base_address for part in ranks.parts}) == 2
    ids, size = [4, 0, 5], whole.block_bytes
    for begin, end in itertools.combinations((0, 1, size - 1, size + 3, 3 * size), 2):
        assert ranks.read(ids, begin, end) == whole.read(ids, begin, end)
    ranks.write([3, 1], 5, bytes(range(200)) * 5)
    whole.write([3, 1], 5, bytes(range(200)) * 5)
    for seed in (0, 9):
        covered = [Coverage(seed, 7), Coverage(seed, 8, size // 2), Coverage(seed, 9)]
        assert ranks.digests([3, 1, 2], covered) == whole.digests([3, 1, 2], covered)
    assert ranks.digests([], []) == ()


def test_whole_blocks_of_ranks_on_devices_are_staged() -> None:
    ranks, whole = of_two_ranks(4, torch.float32, FakeDevice)
    assert isinstance(ranks, DeviceRankPools)
    size = whole.block_bytes
    before = [whole.read([n], 0, size) for n in range(NUM_BLOCKS)]
    staging = ranks.new_staging(3)
    assert (staging.num_blocks, staging.block_bytes) == (3, size)
    assert ranks.copy_out([4, 1], staging, [2, 0])()
    assert [bytes(staging.block(slot)) for slot in (2, 0)] == [before[4], before[1]]
    assert ranks.copy_in(staging, [2], [5], size // 2)()
    assert ranks.read([5], 0, size) == before[4][: size // 2] + before[5][size // 2 :]


def slow_ranks() -> tuple[DeviceRankPools, list[SlowPool]]:
    config = config_of(4, 2, 8, window=None)
    own = [
        KVCache(RankShare(rank, 2).of(config), NUM_BLOCKS, 4, allocate=FakeDevice)
        for rank in (0, 1)
    ]
    pools = [SlowPool(cache) for cache in own]
    return DeviceRankPools(pools, 2 * own[0].layout.run_bytes), pools


def test_copies_of_ranks_are_over_when_all_are() -> None:
    """Also where one has failed: the others still write."""
    ranks, pools = slow_ranks()
    staging = ranks.new_staging(1)
    is_over = ranks.copy_out([0], staging, [0])
    pools[1].is_held = True
    assert not is_over()
    pools[1].is_held = False
    assert is_over()
    pools[1].is_held = True
    is_over = ranks.copy_out([0], staging, [0])
    pools[0].error = RuntimeError("gone")
    assert not is_over()
    pools[1].is_held = False
    with pytest.raises(RuntimeError, match="gone"):
        is_over()


def test_copies_that_a_rank_cannot_begin_fail_when_the_others_are_over() -> None:
    ranks, pools = slow_ranks()
    pools[0].is_held = True
    pools[1].refusal = RuntimeError("gone")
    is_over = ranks.copy_out([0], ranks.new_staging(1), [0])
    assert not is_over()
    pools[0].is_held = False
    with pytest.raises(RuntimeError, match="gone"):
        is_over()


def test_heads_of_odd_sizes_are_not_shared() -> None:
    with pytest.raises(ConfigurationError, match=r"^tensor_parallel: 2 ranks cannot share the 64 "):
        of_two_ranks(1, torch.float32)


def test_blocks_are_copied_to_staging_blocks_and_back() -> None:
    _, pool = pools()
    assert isinstance(pool, DevicePool)
    before = [pool.read([n], 0, BLOCK_BYTES) for n in range(NUM_BLOCKS)]
    staging = pool.new_staging(3)
    assert (staging.memory_kind, staging.num_blocks, staging.block_bytes) == (
        "DRAM", 3, BLOCK_BYTES,
    )  # fmt: skip
    assert staging.shared_fd is not None
    assert pool.copy_out([4, 1], staging, [2, 0])()
    assert bytes(staging.block(2)) == before[4]
    assert bytes(staging.block(0)) == before[1]
    assert pool.copy_in(staging, [2, 0], [5, 3], 10)()
    assert pool.read([5], 0, BLOCK_BYTES) == before[4][:10] + before[5][10:]
    assert pool.read([3], 0, BLOCK_BYTES) == before[1][:10] + before[3][10:]
    for wrong in ([NUM_BLOCKS], [-1]):
        with pytest.raises(IndexError):
            pool.copy_out(wrong, staging, [0])


def test_a_copy_tells_that_the_device_is_lost() -> None:
    cache = filled(KVCache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, allocate=FakeDevice))
    pool = DevicePool(cache)
    staging = pool.new_staging(1)
    assert isinstance(cache.memory, FakeDevice)
    cache.memory.lost = True
    with pytest.raises(DeviceLostError):
        pool.copy_out([0], staging, [0])
    assert pool.lost is not None


def test_reads_and_digests_are_those_of_the_host() -> None:
    host, device = pools()
    block_ids, size = [4, 0, 5], host.block_bytes
    edges = (0, 1, size - 1, size, size + 3, 2 * size, 3 * size)
    for begin, end in itertools.combinations(edges, 2):
        assert device.read(block_ids, begin, end) == host.read(block_ids, begin, end)
    coverages = [Coverage(7, place) for place in range(3)]
    assert device.digests(block_ids, coverages) == host.digests(block_ids, coverages)
    assert device.digests([], []) == ()


def test_writes_are_those_of_the_host_and_done_when_they_return() -> None:
    memory: list[FakeDevice] = []

    def allocate(num_bytes: int) -> FakeDevice:
        memory.append(FakeDevice(num_bytes))
        return memory[0]

    host = KVCache(CONFIG, NUM_BLOCKS, BLOCK_SIZE)
    device = KVCache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, allocate=allocate)
    for payload, offset in ((b"abc", 0), (bytes(range(200)), 5), (b"", 0)):
        num_waits = memory[0].num_waits
        for cache in (host, device):
            pool_memory(cache).write([3, 1], offset, payload)
        assert memory[0].num_waits == num_waits + 1
        assert torch.equal(host.memory.bytes, device.memory.bytes)
    assert host.memory.bytes.any()


def test_beyond_the_pool() -> None:
    for pool in pools():
        for wrong in (-1, NUM_BLOCKS):
            with pytest.raises(IndexError):
                pool.read([wrong], 0, 1)
            with pytest.raises(IndexError):
                pool.write([wrong], 0, b"x")
            with pytest.raises(IndexError):
                pool.digests([wrong], [Coverage(0, 0)])
        with pytest.raises(IndexError, match="1 bytes too many"):
            pool.write([0], 1, bytes(pool.block_bytes))


def read(pool: PoolMemory) -> None:
    pool.read([0], 0, 1)


def write(pool: PoolMemory) -> None:
    pool.write([0], 0, b"x")


def digest(pool: PoolMemory) -> None:
    pool.digests([0], [Coverage(0, 0)])


@pytest.mark.parametrize("use", [read, write, digest])
def test_a_pool_knows_when_its_device_is_lost(use: Callable[[PoolMemory], None]) -> None:
    device = FakeDevice(NUM_BLOCKS * BLOCK_BYTES)
    pool = DevicePool(KVCache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, allocate=lambda _: device))
    use(pool)
    assert pool.lost is None
    device.lost = True
    with pytest.raises(DeviceLostError, match="broken"):
        use(pool)
    assert pool.lost is not None


@pytest.mark.parametrize(("lost", "raised"), [(False, RuntimeError), (True, DeviceLostError)])
def test_an_error_of_the_device_is_looked_into(
    monkeypatch: pytest.MonkeyPatch, lost: bool, raised: type[Exception]
) -> None:
    def fail(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        raise RuntimeError("no room")

    device = FakeDevice(NUM_BLOCKS * BLOCK_BYTES)
    pool = DevicePool(KVCache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, allocate=lambda _: device))
    device.lost = lost
    monkeypatch.setattr(torch.Tensor, "to", fail)
    with pytest.raises(raised):
        write(pool)
    assert (pool.lost is not None) is lost


class PinningDevice(FakeDevice):
    """It knows which buffers it copies from and to by itself."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.pinned: set[int] = set()
        self.num_mapped = 0  # of those that were unpinned, when they were

    def pin(self, buffer: memoryview) -> Callable[[], None]:
        address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        self.pinned.add(address)

        def unpin() -> None:
            self.pinned.remove(address)
            self.num_mapped += is_mapped(address)

        return unpin


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in ranges)


def test_staging_blocks_are_pinned_no_longer_than_they_are_mapped() -> None:
    device = PinningDevice(NUM_BLOCKS * BLOCK_BYTES)
    pool = DevicePool(KVCache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, allocate=lambda _: device))
    staging = [pool.new_staging(num_blocks) for num_blocks in (2, 3)]
    assert device.pinned == {each.base_address for each in staging}
    del pool, staging
    gc.collect()
    assert not device.pinned
    assert device.num_mapped == 2
