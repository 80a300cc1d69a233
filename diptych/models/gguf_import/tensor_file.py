"""Writing a safetensors file one tensor at a time, of which nobody says before how many.

Nor how many rows one has: these come in slices.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_DTYPES = {np.dtype("<f4"): "F32", np.dtype("u1"): "U8"}
_ENTRY_BYTES = 256  # at the most, of one tensor in the index, its name aside


class _Entry(NamedTuple):
    """As the index has it."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class TensorFile:
    """A context manager; the file is whole when it ends."""

    def __init__(self, path: Path, names: list[str]) -> None:
        """names: of all tensors that may come."""
        self._file = path.open("wb")
        self._index: dict[str, _Entry] = {}
        # The index comes first, and is written last into the room that is left for it.
        self._index_bytes = sum(_ENTRY_BYTES + len(json.dumps(name)) for name in names)
        self._index_bytes += _ENTRY_BYTES + -(self._index_bytes + _ENTRY_BYTES) % 8
        self._file.seek(8 + self._index_bytes)
        self._num_bytes = 0

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if error is None:
                entries = {name: entry._asdict() for name, entry in self._index.items()}
                index = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
                assert len(index) <= self._index_bytes
                self._file.seek(0)
                self._file.write(self._index_bytes.to_bytes(8, "little"))
                self._file.write(index.ljust(self._index_bytes))

    @property
    def num_tensors(self) -> int:
        return len(self._index)

    def add(self, name: str, rows: NDArray[Any]) -> None:
        """A tensor, or the next rows of the one that was added last: float32 or uint8."""
        data = np.ascontiguousarray(rows)
        entry = self._index.get(name)
        if entry is None:
            entry = _Entry(_DTYPES[data.dtype], [0, *rows.shape[1:]], [self._num_bytes] * 2)
            self._index[name] = entry
        assert entry.data_offsets[1] == self._num_bytes, "another one was begun"
        self._file.write(data.data)
        self._num_bytes += data.nbytes
        entry.shape[0] += len(rows)
        entry.data_offsets[1] = self._num_bytes

    def drop(self, name: str) -> None:
        """The tensor that was added last, if it has this name, is not to be in the file."""
        entry = self._index.pop(name, None)
        if entry is not None:
            assert entry.data_offsets[1] == self._num_bytes, "another one was begun"
            self._num_bytes = entry.data_offsets[0]
            self._file.seek(8 + self._index_bytes + self._num_bytes)
            self._file.truncate()
