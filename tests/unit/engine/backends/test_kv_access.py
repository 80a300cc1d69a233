"""What is written into the cache, and what of it is read, in every element type."""

import pytest
import torch

from diptych.engine.backends.cpu.kv_writer import KVWriter
from diptych.engine.backends.torch.kv_access import KVAccess
from diptych.engine.kv.cache import KV_DTYPES, KVBlockLayout, KVCache
from tests.attention_config import config_of

CONFIG = config_of(4, 2, 24, window=None)


def writer_of(access: KVAccess) -> KVWriter:
    writer = KVWriter.of(access)
    assert writer is not None
    return writer


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("head_dim", [5, 24, 64])
def test_int8_blocks(block_size: int, head_dim: int) -> None:
    """Scales lie behind their own run's elements, at multiples of 4 bytes."""
    layout = KVBlockLayout.of(config_of(4, 2, head_dim, None), block_size, torch.int8)
    assert 0 <= layout.scales_offset - block_size * head_dim < 4
    assert layout.scales_offset % 4 == layout.run_bytes % 4 == 0
    assert layout.run_bytes == layout.scales_offset + 4 * block_size
    assert layout.block_bytes == 8 * layout.run_bytes


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_int8_error_is_bounded_per_token_and_head(block_size: int) -> None:
    cache = KVCache(CONFIG, 12, block_size, torch.int8)
    access = KVAccess(CONFIG, cache, torch.float32)
    slots = torch.randperm(12 * block_size)[: 6 * block_size]
    kv = torch.randn(len(slots), 2, 2, 24)
    kv[0] *= 1e6  # an outlier, whose neighbours must not notice
    kv[1] = 0
    access.write(1, access.slot_rows(slots), kv)
    everything = access.read(1, access.block_rows(torch.arange(12)))
    got = everything[:, :, slots].permute(2, 0, 1, 3)
    error = (got - kv).abs().amax(-1)
    assert (error <= kv.abs().amax(-1) / 254 * (1 + 1e-5)).all()
    untouched = torch.ones(12 * block_size, dtype=torch.bool)
    untouched[slots] = False
    assert not everything[:, :, untouched].any()
    assert not access.read(0, access.block_rows(torch.arange(12))).any()


def test_fp8_error_is_bounded_by_each_number() -> None:
    """Beyond the largest there is all are that one; what is no number stays none."""
    cache = KVCache(CONFIG, 2, 16, torch.float8_e4m3fn)
    access = KVAccess(CONFIG, cache, torch.float32)
    kv = torch.randn(32, 2, 2, 24) * torch.logspace(-12, 2, 32)[:, None, None, None]
    kv[0, 0, 0, :7] = torch.tensor([448.0, 460.0, 500.0, -1e30, torch.inf, -torch.inf, torch.nan])
    access.write(0, access.slot_rows(torch.arange(32)), kv)
    got = access.read(0, access.block_rows(torch.arange(2))).permute(2, 0, 1, 3)
    assert got[0, 0, 0, :4].tolist() == [448.0, 448.0, 448.0, -448.0]
    assert got[0, 0, 0, 4:7].isnan().all()
    want = kv[1:].clamp(-448.0, 448.0)
    assert ((got[1:] - want).abs() <= (want.abs() / 16).clamp(min=2**-10)).all()


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_compiled_writer_writes_torchs_bits(block_size: int) -> None:
    """Tiny and huge numbers, zeros, and what is no number included."""
    torch.manual_seed(2)
    slots = torch.randperm(40)[:36]
    kv = torch.randn(36, 2, 2, 24) * torch.logspace(-40, 35, 36)[:, None, None, None]
    kv[3] = 0
    kv[4, 0, 1, 7], kv[5, 1, 0, 0], kv[6, 0, 0, 23] = torch.nan, torch.inf, -torch.inf
    blocks = []
    for compiled in (True, False):
        cache = KVCache(CONFIG, 40, block_size, torch.int8)
        access = KVAccess(CONFIG, cache, torch.float32)
        write = writer_of(access) if compiled else access.write
        write(1, access.slot_rows(slots), kv)
        blocks.append(cache.memory.bytes)
    assert blocks[0].any()
    assert torch.equal(*blocks)


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=str)
def test_a_block_carries_all_that_it_holds(dtype: torch.dtype) -> None:
    """Its bytes, copied to another pool and place, read the same."""
    source, target = (KVCache(CONFIG, 3, 16, dtype) for _ in range(2))
    access = KVAccess(CONFIG, source, torch.float32)
    access.write(0, access.slot_rows(torch.arange(16, 32)), torch.randn(16, 2, 2, 24))
    blocks, copies = (c.memory.bytes.view(3, c.block_bytes) for c in (source, target))
    copies[2] = blocks[1]
    there = KVAccess(CONFIG, target, torch.float32)
    want = access.read(0, access.block_rows(torch.tensor([1])))
    assert want.any()
    assert torch.equal(there.read(0, there.block_rows(torch.tensor([2]))), want)


@pytest.mark.parametrize("num_rows", [1, 5, 200])
def test_the_compiled_writer_writes_what_torch_does(num_rows: int) -> None:
    kv = torch.randn(num_rows, 2, 2, 24)
    slots = torch.randperm(16 * 16)[:num_rows]
    pools = []
    for compiled in (True, False):
        cache = KVCache(CONFIG, 16)
        access = KVAccess(CONFIG, cache, torch.float32)
        write = writer_of(access) if compiled else access.write
        write(1, access.slot_rows(slots), kv)
        pools.append(cache.tensor)
    assert pools[0].any()
    assert torch.equal(*pools)
