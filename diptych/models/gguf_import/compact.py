"""The compact form of a GGUF tensor, see :mod:`diptych.models.compact`.

Most types of ggml are such blocks, packed tighter: here only their scales and offsets are
found, by type; the whole numbers follow from these and the values. Nothing is believed
unchecked: a tensor whose compact form has not its bits has none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K
from numpy.typing import NDArray

from diptych.models.compact import HEAD_BYTES

_Floats = NDArray[np.float32]
_Bytes = NDArray[np.uint8]
_SLICE_NUMBERS = 1 << 16  # made at a time, so that they stay in the processor's cache


class _Heads(NamedTuple):
    """Of every block of 16 or 32 numbers; the offset is that which adds nothing if it has none."""

    scales: _Floats
    offsets: _Floats


def _halves(raw: _Bytes, place: int) -> _Floats:
    """The 16-bit float there, of each block of ggml's. raw: [blocks, bytes]"""
    return np.ascontiguousarray(raw[:, place : place + 2]).view("<f2").astype(np.float32)


def _one_scale(raw: _Bytes) -> _Heads:
    scales = _halves(raw, 0)
    return _Heads(scales, np.full_like(scales, -0.0))


def _scale_and_offset(raw: _Bytes) -> _Heads:
    return _Heads(_halves(raw, 0), _halves(raw, 2))


def _packed_scales(raw: _Bytes) -> _Heads:
    scales, minima = Q4_K.get_scale_min(raw[:, 4:16])
    return _Heads(
        _halves(raw, 0) * scales.astype(np.float32), -(_halves(raw, 2) * minima.astype(np.float32))
    )


def _signed_scales(raw: _Bytes) -> _Heads:
    scales = _halves(raw, 208) * np.ascontiguousarray(raw[:, 192:208]).view(np.int8)
    return _Heads(scales, np.full_like(scales, -0.0))


_HEADS: dict[GGMLQuantizationType, Callable[[_Bytes], _Heads]] = {
    GGMLQuantizationType.Q4_0: _one_scale,
    GGMLQuantizationType.Q4_1: _scale_and_offset,
    GGMLQuantizationType.Q5_0: _one_scale,
    GGMLQuantizationType.Q5_1: _scale_and_offset,
    GGMLQuantizationType.Q8_0: _one_scale,
    GGMLQuantizationType.Q4_K: _packed_scales,
    GGMLQuantizationType.Q5_K: _packed_scales,
    GGMLQuantizationType.Q6_K: _signed_scales,
}


def compacted(kind: GGMLQuantizationType, raw: _Bytes, values: _Floats) -> _Bytes | None:
    """Rows in compact form; None where there is none that stands for just these values.

    raw: [num_rows, bytes], as ggml keeps them; values: [num_rows, num_columns].
    """
    if kind not in _HEADS:
        return None
    _, bytes_of_ggml = GGML_QUANT_SIZES[kind]
    num_rows, num_columns = values.shape
    step = max(1, _SLICE_NUMBERS // num_columns)
    slices = []
    for first in range(0, num_rows, step):
        rows = raw[first : first + step].reshape(-1, bytes_of_ggml)
        heads = _HEADS[kind](rows)
        blocks = values[first : first + step].reshape(heads.scales.size, -1)
        made = _blocks(heads, blocks)
        if made is None:
            return None
        slices.append(made.reshape(len(values[first : first + step]), -1))
    return np.concatenate(slices)


def _blocks(heads: _Heads, values: _Floats) -> _Bytes | None:
    """values: [blocks, numbers of one]."""
    scales, offsets = heads.scales.reshape(-1, 1), heads.offsets.reshape(-1, 1)
    if not (np.isfinite(scales).all() and np.isfinite(offsets).all()):
        return None
    divisors = np.where(scales == 0, np.float32(1), scales)
    with np.errstate(all="ignore"):  # what is too large for a byte is found below
        numbers = values - offsets
        np.rint(np.divide(numbers, divisors, out=numbers), out=numbers)
        small = numbers.astype(np.int8)
        nothing = scales[:, 0] == 0  # a zero has the sign of its product
        is_other = np.signbit(values[nothing]) != np.signbit(scales[nothing])
        small[nothing] = -is_other.astype(np.int8)
        np.multiply(small, scales, out=numbers)
        np.add(numbers, offsets, out=numbers)
    is_same = np.array_equal(numbers.view(np.uint32), values.view(np.uint32))
    if not (is_same and _are_exact(scales, small)):
        return None
    made: NDArray[Any] = np.empty((len(values), HEAD_BYTES + values.shape[1]), np.uint8)
    made[:, :HEAD_BYTES] = np.hstack([scales, offsets]).astype("<f4").view(np.uint8)
    made[:, HEAD_BYTES:] = small.view(np.uint8)
    return made


def _are_exact(scales: _Floats, numbers: NDArray[np.int8]) -> bool:
    """Whether products of these lose nothing: there are as many zeros at the end of a scale as
    its numbers have digits, all binary. scales: [blocks, 1]; numbers: [blocks, numbers of one].
    """
    bits = scales.view(np.uint32) | np.uint32(1 << 23)  # what is 0 does no harm
    lowest_ones = bits & (~bits + np.uint32(1))
    largest = np.maximum(numbers.max(1), ~numbers.min(1))
    return bool((largest[:, None] < lowest_ones.astype(np.int64)).all())
