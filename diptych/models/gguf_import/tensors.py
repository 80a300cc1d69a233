"""The weights: dequantised to float32 and written as one safetensors file.

float32 holds every ggml type's values exactly, so nothing is lost. Most also hold in a
quarter to a third of that, which is written beside it for whoever reads it so. Tensors are
written one at a time; memory stays at the largest one, not the model.
"""

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
            name, rows = names[info.name], _read(file, info)
            tensor = architecture.restore(name, rows.values.reshape(info.shape))
            floats.add(name, tensor.astype("<f4", copy=False))
            compact = compacted(*rows) if len(info.shape) == 2 else None
            if compact is not None:  # what is restored are whole rows, put in another order
                compacts.add(name, architecture.restore(name, compact))
            done += info.num_elements
    if not compacts.num_tensors:
        (folder / FILE_NAME).unlink()
    progress(_STAGE, 1.0)


def dequantized(file: GGUFFile, info: TensorInfo) -> NDArray[np.float32]:
    """The values of a tensor, [*info.shape]; raises ConfigurationError if not readable."""
    return _read(file, info).values.reshape(info.shape)


class _Rows(NamedTuple):
    """A tensor as rows of its last dimension."""

    kind: GGMLQuantizationType
    raw: NDArray[np.uint8]  # [rows, bytes of one], as in the file
    values: NDArray[np.float32]  # [rows, numbers of one]


def _read(file: GGUFFile, info: TensorInfo) -> _Rows:
    """Raises ConfigurationError."""
    try:
        kind = GGMLQuantizationType(info.quantization)
        elements_per_block, block_bytes = GGML_QUANT_SIZES[kind]
        rows, columns = info.num_elements // info.shape[-1], info.shape[-1]
        if columns % elements_per_block:
            raise ValueError(f"rows of {columns} elements")
        row_bytes = columns // elements_per_block * block_bytes
        raw = np.frombuffer(file.data, np.uint8, rows * row_bytes, info.offset)
        plain = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2"}
        if kind in plain:
            values = raw.view(plain[kind]).astype(np.float32)
        else:
            values = dequantize(raw.reshape(rows, row_bytes), kind)
    except (ValueError, NotImplementedError, KeyError) as error:
        raise ConfigurationError(
            f"{file.path}: tensor {info.name!r} (type {info.quantization}): {error}"
        ) from None
    return _Rows(kind, raw.reshape(rows, row_bytes), values.reshape(rows, columns))
