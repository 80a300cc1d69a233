"""The weights: dequantised to float32 and written as one safetensors file.

float32 holds every ggml type's values exactly, so nothing is lost. Tensors are
written one at a time; memory stays at the largest one, not the model.
"""

import json
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from diptych.errors import ConfigurationError
from diptych.models.gguf_import.architecture import Architecture
from diptych.models.gguf_import.gguf_file import GGUFFile, TensorInfo
from diptych.progress import Progress

_STAGE = "converting weights"


def write_tensors(
    file: GGUFFile, architecture: Architecture, folder: Path, progress: Progress
) -> None:
    """Write ``model.safetensors`` under ``folder``.

    Raises:
        ConfigurationError: a tensor has no place in the checkpoint or cannot be read.
    """
    tensors = [info for info in file.tensors if info.name not in architecture.config_tensors]
    names = {info.name: architecture.checkpoint_name(info.name) for info in tensors}
    total = sum(info.num_elements for info in tensors)
    done = 0
    with (folder / "model.safetensors").open("wb") as out:
        out.write(_header(tensors, names))
        for info in tensors:
            progress(_STAGE, done / total)
            tensor = architecture.restore(names[info.name], dequantized(file, info))
            out.write(tensor.astype("<f4", copy=False).tobytes())
            done += info.num_elements
    progress(_STAGE, 1.0)


def _header(tensors: list[TensorInfo], names: dict[str, str]) -> bytes:
    """Length and JSON index that begin a safetensors file, padded to 8 bytes."""
    index: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for info in tensors:
        begin, end = end, end + 4 * info.num_elements
        index[names[info.name]] = {
            "dtype": "F32",
            "shape": list(info.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(index).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def dequantized(file: GGUFFile, info: TensorInfo) -> NDArray[np.float32]:
    """The values of a tensor, [*info.shape]; raises ConfigurationError if not readable."""
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
    result: NDArray[np.float32] = values.reshape(info.shape)
    return result
