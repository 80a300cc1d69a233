"""Where a block has what: groups of layers one after another."""

from dataclasses import replace

import pytest
import torch

from diptych.engine.backends.torch.kv_access import KVAccess
from diptych.engine.kv.cache import KV_DTYPES, KVBlockLayout, KVCache
from diptych.engine.model.config import ModelConfig
from tests.attention_config import config_of

DTYPES = list(KV_DTYPES.values())


def config_with(*windows: int | None) -> ModelConfig:
    """One layer for each window, of two key-value heads."""
    config = config_of(4, 2, 24, None)
    layers = tuple(replace(config.layers[0], sliding_window=window) for window in windows)
    return replace(config, layers=layers)


@pytest.mark.parametrize("windows", [(None,) * 3, (7,) * 3], ids=str)
def test_a_model_of_one_group_has_its_layers_in_order(windows: tuple[int | None, ...]) -> None:
    layout = KVBlockLayout.of(config_with(*windows), 16, torch.float32)
    assert layout.first_runs == (0, 4, 8)
    assert layout.block_bytes == 3 * 2 * 2 * 16 * 24 * 4 == layout.group_bytes(layout.groups[0])


def test_full_layers_lie_first_and_short_windows_last() -> None:
    layout = KVBlockLayout.of(config_with(8, None, 8, 32, None), 16, torch.bfloat16)
    assert layout.first_runs == (12, 0, 16, 8, 4)
    sizes = [layout.group_bytes(group) for group in layout.groups]
    assert sizes == [8 * layout.run_bytes, 4 * layout.run_bytes, 8 * layout.run_bytes]
    assert sum(sizes) == layout.block_bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_group_of_layers_is_one_run_of_bytes(dtype: torch.dtype) -> None:
    """What is written of a layer is in its group's part of the block, and nowhere else."""
    config = config_with(8, None, 8)
    cache = KVCache(config, 3, 16, dtype)
    access = KVAccess(config, cache, torch.float32)
    slots = access.slot_rows(torch.arange(16, 32))
    full_bytes = cache.layout.group_bytes(cache.layout.groups[0])
    blocks = cache.memory.bytes.view(3, -1)
    access.write(1, slots, torch.ones(16, 2, 2, 24))
    assert blocks[1, :full_bytes].any()
    assert not blocks[1, full_bytes:].any()
    layer, runs = cache.of_layer(1)[1], cache.tensor[1, 0]
    assert torch.equal(layer.flatten().view(torch.uint8), runs.flatten().view(torch.uint8))
    full = blocks[1, :full_bytes].clone()
    access.write(2, slots, torch.ones(16, 2, 2, 24))
    assert torch.equal(blocks[1, :full_bytes], full)
    assert blocks[1, full_bytes:].any()
    assert not blocks[[0, 2]].any()
    assert access.read(2, access.block_rows(torch.tensor([1]))).eq(1).all()
    assert not access.read(0, access.block_rows(torch.tensor([1]))).any()
