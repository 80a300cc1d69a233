"""The compact weights beside an imported model's float32 ones."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diptych.engine.model.compact import CompactWeight
from diptych.engine.model.shard import MappedShard, TensorLocation
from diptych.errors import ConfigurationError
from diptych.models.compact import FILE_NAME, HEAD_BYTES, block_size_of

logger = logging.getLogger(__name__)

_NUM_COMPARED_ROWS = 4
_PIECE_BYTES = 1 << 17  # of a weight, so that its floats stay in the processor's cache


class CompactFile:
    """Of one folder; most have none, which is one of no weights."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigurationError: it is malformed."""
        path = folder / FILE_NAME
        self._shard: MappedShard | None = None
        self._locations: dict[str, TensorLocation] = {}
        if path.exists():
            try:
                self._shard = MappedShard(path)
                self._locations = dict(self._shard.index())
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigurationError(f"cannot read {path}: {error}") from error

    def find(self, name: str, floats: Tensor) -> CompactWeight | None:
        """A weight, on the file's pages, to be looked at; None if it is not there.

        floats: [num_rows, num_columns], what it stands for. Some rows are compared, so that
        nothing is taken from before a change of the folder's weights.
        """
        location = self._locations.get(name)
        if self._shard is None or location is None:
            return None
        weight = _of_shape(self._shard.glance(location), floats.shape)
        if weight is None or not _is_alike(weight, floats):
            logger.warning("a compact weight is not that of the model", extra={"tensor": name})
            return None
        return weight

    def fill(self, name: str, out: CompactWeight, block_size: int) -> None:
        """Write a weight that was found, in blocks of this size, straight from the file."""
        assert self._shard is not None
        out.fill(CompactWeight(self._shard.tensor(self._locations[name]), block_size))

    def pieces(self, name: str, block_size: int) -> Iterator[memoryview]:
        """The bytes of the float32 weight that one stands for, some rows at a time. Any thread.

        Pages are given back behind the last one. Not by torch, whose threads are the model's.
        """
        assert self._shard is not None
        location = self._locations[name]
        memory = self._shard.tensor(location).numpy()
        step = max(1, _PIECE_BYTES // memory.shape[1])
        for begin in range(0, len(memory), step):
            rows = memory[begin : begin + step]
            blocks = rows.reshape(len(rows), -1, HEAD_BYTES + block_size)
            heads = np.ascontiguousarray(blocks[..., :HEAD_BYTES]).view(np.float32)
            floats = blocks[..., HEAD_BYTES:].view(np.int8).astype(np.float32)
            floats *= heads[..., :1]
            floats += heads[..., 1:]
            yield floats.data.cast("B")
        self._shard.drop(location)


def _of_shape(memory: Tensor, shape: torch.Size) -> CompactWeight | None:
    if memory.dtype is not torch.uint8 or memory.dim() != 2 or len(memory) != shape[0]:
        return None
    block_size = block_size_of(memory.shape[1], shape[1])
    return None if block_size is None else CompactWeight(memory, block_size)


def _is_alike(weight: CompactWeight, floats: Tensor) -> bool:
    """Whether rows from its beginning to its end have the bits that they should have."""
    numbers = torch.linspace(0, len(floats) - 1, _NUM_COMPARED_ROWS).long()
    rows = weight._replace(memory=weight.memory[numbers]).widened()
    return floats.dtype is torch.float32 and torch.equal(
        rows.view(torch.int32), floats[numbers].view(torch.int32)
    )
