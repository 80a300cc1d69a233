"""How chunks are cut into tiles."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from diptych.engine.backends.cuda.query_tiles import QueryTiles
from diptych.engine.inputs import PrefillChunk

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
    assert found == expected


@given(LENGTHS, st.sets(st.integers(0, 120), max_size=6))
def test_only_tiles_that_hold_a_row_are_kept(
    lengths: list[tuple[int, int]], rows: set[int]
) -> None:
    tiles = QueryTiles.of(chunks_of(lengths), 8)
    kept = tiles.holding(np.array(sorted(rows), np.int64)).fields.tolist()
    wanted = [tile for tile in tiles.fields.tolist() if rows & set(range(tile[0], sum(tile[:2])))]
    assert kept == wanted
