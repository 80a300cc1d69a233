"""How the chunks of a step are cut into tiles of queries, one for each program. No triton."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.engine.inputs import PrefillChunk
from diptych.engine.model.parts import Rows
from diptych.errors import ConfigurationError

_WARP_GROUP_BYTES = 200 << 10  # of shared memory: no device before sm_90 has so much
_SMALL_BYTES = 1 << 10  # of it, for what is reduced over warps


class TileShape(NamedTuple):
    """What a program multiplies at a time: of chunks by eight warps, of single tokens by four."""

    num_queries: int
    num_keys: int
    num_masked_keys: int  # where a window or a cap of scores takes registers of its own
    num_single_keys: int = 64  # of single tokens

    @classmethod
    def of(
        cls, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, max_shared_bytes: int
    ) -> Self:
        """As much as registers hold.

        max_shared_bytes: that the device has for a program. Raises ConfigurationError: too little.

        On an H200, of 4,096 tokens behind as many, 32 heads of 128 on 8 in bfloat16 and blocks of
        32: 128 x 128 came to 410 TFLOP/s, 64 x 64 by four warps to 402, 128 x 64 to 361. Heads of
        256: 128 x 32 to 323, 64 x 64 to 214.
        """
        is_wide, is_narrow = head_dim > 128, head_dim <= 64
        num_copies = 1  # of keys and values in shared memory
        if dtype.itemsize > 2:  # without a matrix unit, so from registers
            num_keys = 32 if is_narrow else 16
            shape = cls(32 if is_wide else 64, num_keys, num_keys, 64 if is_narrow else 16)
        elif max_shared_bytes >= _WARP_GROUP_BYTES:
            # Groups of warps multiply keys where they lie in shared memory.
            num_copies = 2
            num_keys = 128 if kv_dtype.itemsize == 2 else 64
            shape = cls(128, 32, 32, 32) if is_wide else cls(128, num_keys, 64, 64)
        else:
            num_queries = 64 if is_wide or kv_dtype.itemsize == 1 else 128
            num_keys = 64 if is_narrow else 32
            shape = cls(num_queries, num_keys, num_keys, 32 if is_wide else 64)
        num_bytes = shape._num_shared_bytes(head_dim, dtype, num_copies)
        if num_bytes > max_shared_bytes:
            name = str(dtype).removeprefix("torch.")
            raise ConfigurationError(
                f"dtype {name}: attention to heads of {head_dim} needs {num_bytes} bytes of shared "
                f"memory, and this GPU has {max_shared_bytes} for a program"
                + (": set dtype to bfloat16" if dtype.itemsize > 2 else "")
            )
        return shape

    def _num_shared_bytes(self, head_dim: int, dtype: torch.dtype, num_copies: int) -> int:
        """Of chunks at the most: queries, keys and values, weights."""
        width = 1 << (head_dim - 1).bit_length()
        num_rows = self.num_queries + 2 * num_copies * self.num_keys
        num_weights = self.num_queries * self.num_keys
        return dtype.itemsize * (num_rows * width + num_weights) + _SMALL_BYTES


class QueryTiles(NamedTuple):
    """[num_tiles, 4]: first row of the flat batch, rows, position of the first, and where the
    chunk's block table begins among those of all chunks.

    Those with the most keys before their last row come first: what begins last is soon done.
    """

    fields: NDArray[np.int64]

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], size: int) -> Self:
        """size: of a tile, in rows; the last one of a chunk may have fewer."""
        fields, table = [], 0
        for chunk in chunks:
            begins = np.arange(0, chunk.num_tokens, size)
            counts = np.minimum(size, chunk.num_tokens - begins)
            tables = np.full_like(begins, table)
            fields.append(
                np.stack((chunk.begin + begins, counts, chunk.start + begins, tables), axis=1)
            )
            table += len(chunk.block_ids)
        tiles = np.concatenate(fields)
        ends = tiles[:, 1] + tiles[:, 2]
        return cls(tiles[np.argsort(-ends, kind="stable")])

    def holding(self, rows: Rows) -> Self:
        """Those that hold one of these rows of the flat batch."""
        begins, counts = self.fields[:, 0, None], self.fields[:, 1, None]
        return type(self)(self.fields[((rows >= begins) & (rows < begins + counts)).any(axis=1)])
