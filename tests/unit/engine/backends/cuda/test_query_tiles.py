"""How chunks are cut into tiles."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diptych.engine.backends.cuda.query_tiles import QueryTiles, TileShape
from diptych.engine.inputs import PrefillChunk
from diptych.errors import ConfigurationError

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=5)


def chunks_of(lengths: list[tuple[int, int]]) -> list[PrefillChunk]:
    """Of so many tokens, after so many, one chunk behind the other from row 3 on."""
    chunks, begin = [], 3
    for num_tokens, start in lengths:
        block_ids = torch.arange((start + num_tokens + 7) // 8)
        chunks.append(PrefillChunk(begin, num_tokens, start, block_ids))
        begin += num_tokens
    return chunks


@given(LENGTHS, st.integers(1, 16))
def test_each_row_is_in_one_tile_at_its_position(lengths: list[tuple[int, int]], size: int) -> None:
    chunks, found = chunks_of(lengths), []
    for first_row, num_rows, position, table in QueryTiles.of(chunks, size).fields.tolist():
        assert 1 <= num_rows <= size
        found += [(first_row + i, position + i, table) for i in range(num_rows)]
    expected, table = [], 0
    for chunk in chunks:
        expected += [(chunk.begin + i, chunk.start + i, table) for i in range(chunk.num_tokens)]
        table += len(chunk.block_ids)
    assert sorted(found) == expected


@given(LENGTHS, st.integers(1, 16))
def test_tiles_that_may_see_most_come_first(lengths: list[tuple[int, int]], size: int) -> None:
    """Others of as many keys in the order of their rows."""
    tiles = QueryTiles.of(chunks_of(lengths), size).fields.tolist()
    assert tiles == sorted(tiles, key=lambda tile: (-(tile[1] + tile[2]), tile[0]))


H100, A100, SMALLEST = 227 << 10, 163 << 10, 99 << 10  # bytes of shared memory for a program


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_what_is_multiplied_fits(head_dim: int, kv_dtype: torch.dtype) -> None:
    """Queries, and keys and values of two tiles, one of which is read meanwhile."""
    shapes = {
        limit: TileShape.of(head_dim, torch.bfloat16, kv_dtype, limit)
        for limit in (H100, A100, SMALLEST)
    }
    for limit, shape in shapes.items():
        num_keys = max(shape.num_keys, shape.num_masked_keys)
        assert head_dim * (2 * shape.num_queries + 4 * num_keys * kv_dtype.itemsize) <= limit
    assert shapes[A100] == shapes[SMALLEST]
    assert shapes[H100].num_keys >= shapes[A100].num_keys


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "limit", "shape"),
    [
        (128, torch.bfloat16, torch.bfloat16, H100, (128, 128, 64, 64)),
        (128, torch.float16, torch.int8, H100, (128, 64, 64, 64)),
        (256, torch.bfloat16, torch.bfloat16, H100, (128, 32, 32, 32)),
        (128, torch.bfloat16, torch.bfloat16, A100, (128, 32, 32, 64)),
        (64, torch.bfloat16, torch.float8_e4m3fn, A100, (64, 64, 64, 64)),
        (64, torch.float32, torch.float32, H100, (64, 32, 32, 64)),
        (128, torch.float32, torch.bfloat16, A100, (64, 16, 16, 16)),
        (256, torch.float32, torch.float32, SMALLEST, (32, 16, 16, 16)),
        (256, torch.bfloat16, torch.bfloat16, SMALLEST, (64, 32, 32, 32)),
    ],
)
def test_tiles_are_as_large_as_registers_hold(
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    limit: int,
    shape: tuple[int, int, int, int],
) -> None:
    assert TileShape.of(head_dim, dtype, kv_dtype, limit) == shape


@pytest.mark.parametrize(
    ("dtype", "limit", "ends"),
    [
        (torch.bfloat16, H100, "for a program"),
        (torch.bfloat16, SMALLEST, "for a program"),
        (torch.float32, SMALLEST, "set dtype to bfloat16"),
    ],
    ids=str,
)
def test_heads_for_which_no_tile_fits_are_refused(
    dtype: torch.dtype, limit: int, ends: str
) -> None:
    name = str(dtype).removeprefix("torch.")
    says = f"^dtype {name}: .* heads of 512 needs .* this GPU has {limit} .*{ends}$"
    with pytest.raises(ConfigurationError, match=says):
        TileShape.of(512, dtype, dtype, limit)


@given(LENGTHS, st.sets(st.integers(0, 120), max_size=6))
def test_only_tiles_that_hold_a_row_are_kept(
    lengths: list[tuple[int, int]], rows: set[int]
) -> None:
    tiles = QueryTiles.of(chunks_of(lengths), 8)
    kept = tiles.holding(np.array(sorted(rows), np.int64)).fields.tolist()
    wanted = [tile for tile in tiles.fields.tolist() if rows & set(range(tile[0], sum(tile[:2])))]
    assert kept == wanted
