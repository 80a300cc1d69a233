"""A GGUF tensor's compact form stands for its values, bit for bit, or there is none."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from diptych.engine.model.compact import CompactWeight
from diptych.models.compact import BLOCK_SIZES, HEAD_BYTES, block_size_of, row_bytes
from diptych.models.gguf_import.compact import compacted

# Where each type's 16-bit floats lie in a block, and how many numbers share one of our scales.
TYPES = {
    "Q4_0": ((0,), 32),
    "Q4_1": ((0, 2), 32),
    "Q5_0": ((0,), 32),
    "Q5_1": ((0, 2), 32),
    "Q8_0": ((0,), 32),
    "Q4_K": ((0, 2), 32),
    "Q5_K": ((0, 2), 32),
    "Q6_K": ((208,), 16),
}
NUM_ROWS, NUM_COLUMNS = 300, 512  # more numbers than are made at a time


def random_rows(name: str) -> tuple[GGMLQuantizationType, NDArray[np.uint8]]:
    """Any bytes, but for the floats: these are numbers of either sign."""
    kind = GGMLQuantizationType[name]
    size, num_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(len(name))
    raw = rng.integers(0, 256, (NUM_ROWS * NUM_COLUMNS // size, num_bytes), dtype=np.uint8)
    for place in TYPES[name][0]:
        floats = rng.normal(0, 0.02, (len(raw), 1)).astype("<f2")
        raw[:, place : place + 2] = floats.view(np.uint8)
    return kind, raw.reshape(NUM_ROWS, -1)


@pytest.mark.parametrize("name", TYPES)
def test_bits_are_those_of_the_float32_weight(name: str) -> None:
    kind, raw = random_rows(name)
    values = dequantize(raw, kind)
    rows = compacted(kind, raw, values)
    assert rows is not None
    block_size = block_size_of(rows.shape[1], NUM_COLUMNS)
    assert block_size == TYPES[name][1]
    weight = CompactWeight(torch.from_numpy(rows), block_size)
    assert weight.shape == (NUM_ROWS, NUM_COLUMNS)
    assert np.array_equal(weight.widened().numpy().view(np.uint32), values.view(np.uint32))
    # In smaller blocks it stands for the same.
    smaller = CompactWeight(
        torch.empty(NUM_ROWS, row_bytes(NUM_COLUMNS, 16), dtype=torch.uint8), 16
    )
    smaller.fill(weight)
    assert torch.equal(smaller.widened(), weight.widened())
    assert torch.equal(smaller.rows(7, 9).widened(), weight.widened()[7:9])


@pytest.mark.parametrize("name", TYPES)
def test_one_other_bit_is_seen(name: str) -> None:
    kind, raw = random_rows(name)
    values = dequantize(raw, kind)
    values.view(np.uint32)[-1, -1] ^= 1
    assert compacted(kind, raw, values) is None


def test_a_product_that_would_be_rounded_is_seen() -> None:
    """It would have these bits here, and others in a loop that rounds once."""
    kind, raw = random_rows("Q6_K")
    raw.reshape(-1, 210)[:, 192:208] = 127
    raw.reshape(-1, 210)[:, 208:210] = np.array([2047 / 1024], "<f2").view(np.uint8)
    scale = np.float32(2047 / 1024 * 127)  # eighteen digits, of twenty-four
    for number, has_one in ((63, True), (65, False), (127, False), (-64, True), (-65, False)):
        values = np.full((NUM_ROWS, NUM_COLUMNS), scale * np.float32(number))
        assert (compacted(kind, raw, values) is not None) == has_one, number


def test_zeros_keep_their_signs() -> None:
    kind, raw = random_rows("Q8_0")
    raw[:, 2:34] = 0  # a first block of nothing, under scales of either sign
    values = dequantize(raw, kind)
    assert np.signbit(values[:, :32]).any()
    assert not np.signbit(values[:, :32]).all()
    rows = compacted(kind, raw, values)
    assert rows is not None
    widened = CompactWeight(torch.from_numpy(rows), 32).widened().numpy()
    assert np.array_equal(np.signbit(widened), np.signbit(values))


@pytest.mark.parametrize("broken", [np.inf, np.nan])
def test_what_is_no_number_has_none(broken: float) -> None:
    kind, raw = random_rows("Q8_0")
    raw[5, 0:2] = np.array([broken], "<f2").view(np.uint8)
    assert compacted(kind, raw, dequantize(raw, kind)) is None


def test_other_types_have_none() -> None:
    values = np.zeros((1, 256), np.float32)
    for kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q2_K):
        assert compacted(kind, np.zeros((1, 84), np.uint8), values) is None


def test_sizes_of_rows() -> None:
    for size in BLOCK_SIZES:
        assert row_bytes(512, size) == 512 // size * (HEAD_BYTES + size)
        assert block_size_of(row_bytes(512, size), 512) == size
    assert block_size_of(512, 512) is None
    assert block_size_of(row_bytes(32, 32), 31) is None
