"""The weights: dequantised to float32 and written as one safetensors file.

float32 holds every ggml type's values exactly, so nothing is lost. Most also hold in a
quarter to a third of that, which is written beside it for whoever reads it so. Matrices are
converted and written a slice of rows at a time; memory does not grow with them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from diptych.errors import ConfigurationError
from diptych.models.compact import FILE_NAME
from diptych.models.gguf_import.architecture import Architecture
from diptych.models.gguf_import.compact import compacted
from diptych.models.gguf_import.gguf_file import GGUFFile, TensorInfo
from diptych.models.gguf_import.tensor_file import TensorFile
from diptych.progress import Progress

_STAGE = "converting weights"
_SLICE_NUMBERS = 1 << 18  # made at a time
_PLAIN = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2"}


def write_tensors(
    file: GGUFFile, architecture: Architecture, folder: Path, progress: Progress
) -> None:
    """Write ``model.safetensors`` and, if there are any, the compact weights under ``folder``.

    Raises:
        ConfigurationError: a tensor has no place in the checkpoint or cannot be read.
    """
    tensors = [info for info in file.tensors if info.name not in architecture.config_tensors]
    names = {info.name: architecture.checkpoint_name(info.name) for info in tensors}
    total = sum(info.num_elements for info in tensors)
    done = 0
    with (
        TensorFile(folder / "model.safetensors", list(names.values())) as floats,
        TensorFile(folder / FILE_NAME, list(names.values())) as compacts,
    ):
        for info in tensors:
            progress(_STAGE, done / total)
            name = names[info.name]
            if len(info.shape) == 2:  # what is restored are whole rows, put in another order
                stored = _Stored(file, info)  # the file has all of them
                order = architecture.restore(name, np.arange(info.shape[0]))
                _write_matrix(stored, order, name, floats, compacts)
            else:
                tensor = architecture.restore(name, dequantized(file, info))
                floats.add(name, tensor.astype("<f4", copy=False))
            done += info.num_elements
    if not compacts.num_tensors:
        (folder / FILE_NAME).unlink()
    progress(_STAGE, 1.0)


def dequantized(file: GGUFFile, info: TensorInfo) -> NDArray[np.float32]:
    """The values of a tensor, [*info.shape]; raises ConfigurationError if not readable."""
    stored = _Stored(file, info)
    return stored.rows(np.arange(len(stored.raw))).values.reshape(info.shape)


class _Rows(NamedTuple):
    """Some of a tensor's."""

    kind: GGMLQuantizationType
    raw: NDArray[np.uint8]  # [rows, bytes of one], as in the file
    values: NDArray[np.float32]  # [rows, numbers of one]


class _Stored:
    """A tensor in its file, as rows of its last dimension. Its methods raise ConfigurationError."""

    def __init__(self, file: GGUFFile, info: TensorInfo) -> None:
        self._path, self._info = file.path, info
        with self._read():
            self._kind = GGMLQuantizationType(info.quantization)
            elements_per_block, block_bytes = GGML_QUANT_SIZES[self._kind]
            rows, self.num_columns = info.num_elements // info.shape[-1], info.shape[-1]
            if self.num_columns % elements_per_block:
                raise ValueError(f"rows of {self.num_columns} elements")
            row_bytes = self.num_columns // elements_per_block * block_bytes
            raw = np.frombuffer(file.data, np.uint8, rows * row_bytes, info.offset)
            self.raw = raw.reshape(rows, row_bytes)

    def rows(self, numbers: NDArray[np.int64]) -> _Rows:
        """Those with these numbers."""
        raw = self.raw[numbers]
        with self._read():
            if self._kind in _PLAIN:
                values = raw.view(_PLAIN[self._kind]).astype(np.float32)
            else:
                values = dequantize(raw, self._kind)
        return _Rows(self._kind, raw, values.reshape(len(numbers), self.num_columns))

    @contextmanager
    def _read(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, NotImplementedError, KeyError) as error:
            info = self._info
            raise ConfigurationError(
                f"{self._path}: tensor {info.name!r} (type {info.quantization}): {error}"
            ) from None


def _write_matrix(
    stored: _Stored, order: NDArray[np.int64], name: str, floats: TensorFile, compacts: TensorFile
) -> None:
    """Its rows in this order, and their compact form if they all have one."""
    has_compact = True
    step = max(1, _SLICE_NUMBERS // stored.num_columns)
    for first in range(0, len(order), step):
        rows = stored.rows(order[first : first + step])
        floats.add(name, rows.values.astype("<f4", copy=False))
        if not has_compact:
            continue
        compact = compacted(*rows)
        if compact is None:
            compacts.drop(name)
            has_compact = False
        else:
            compacts.add(name, compact)
