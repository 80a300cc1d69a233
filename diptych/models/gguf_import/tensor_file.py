"""Writing a safetensors file one tensor at a time, of which nobody says before how many."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DTYPES = {np.dtype("<f4"): "F32", np.dtype("u1"): "U8"}
_ENTRY_BYTES = 256  # at the most, of one tensor in the index, its name aside


class TensorFile:
    """A context manager; the file is whole when it ends."""

    def __init__(self, path: Path, names: list[str]) -> None:
        """names: of all tensors that may come."""
        self._file = path.open("wb")
        self._index: dict[str, object] = {"__metadata__": {"format": "pt"}}
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
                index = json.dumps(self._index).encode()
                assert len(index) <= self._index_bytes
                self._file.seek(0)
                self._file.write(self._index_bytes.to_bytes(8, "little"))
                self._file.write(index.ljust(self._index_bytes))

    @property
    def num_tensors(self) -> int:
        return len(self._index) - 1

    def add(self, name: str, tensor: NDArray[Any]) -> None:
        """tensor: float32 or uint8."""
        data = np.ascontiguousarray(tensor)
        end = self._num_bytes + data.nbytes
        self._index[name] = {
            "dtype": _DTYPES[data.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._num_bytes, end],
        }
        self._file.write(data.data)
        self._num_bytes = end
