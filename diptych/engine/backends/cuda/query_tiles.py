"""How the chunks of a step are cut into tiles of queries, one for each program. No triton."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from diptych.engine.inputs import PrefillChunk
from diptych.engine.model.parts import Rows


class QueryTiles(NamedTuple):
    """[num_tiles, 4]: first row of the flat batch, rows, position of the first, and where the
    chunk's block table begins among those of all chunks.
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
        return cls(np.concatenate(fields))

    def holding(self, rows: Rows) -> Self:
        """Those that hold one of these rows of the flat batch."""
        begins, counts = self.fields[:, 0, None], self.fields[:, 1, None]
        return type(self)(self.fields[((rows >= begins) & (rows < begins + counts)).any(axis=1)])
