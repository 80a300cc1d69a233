"""A matrix is imported a slice of rows at a time, and comes out as if it had been whole."""

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

from diptych.models.compact import FILE_NAME
from diptych.models.gguf_import.architecture import architecture_of, split_halves
from diptych.models.gguf_import.compact import compacted
from diptych.models.gguf_import.gguf_file import GGUFFile
from diptych.models.gguf_import.tensors import write_tensors
from diptych.progress import silent

NUM_ROWS, NUM_COLUMNS, NUM_HEADS = 12288, 512, 8
EMBEDDING, QUERY = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"


def blocks(num_rows: int) -> NDArray[np.uint8]:
    """Rows of Q8_0."""
    rng = np.random.default_rng(num_rows)
    raw = rng.integers(0, 256, (num_rows * NUM_COLUMNS // 32, 34), dtype=np.uint8)
    raw[:, :2] = np.array([0.01], "<f2").view(np.uint8)
    return raw.reshape(num_rows, -1)


def write(folder: Path, tensors: dict[str, NDArray[np.uint8]]) -> int:
    """Import these; the most memory that this took at once."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    writer.add_head_count(NUM_HEADS)
    for name, raw in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(folder / "m.gguf") as file:
        tracemalloc.start()
        try:
            write_tensors(file, architecture_of(file), folder, silent)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def test_memory_does_not_grow_with_a_matrix_nor_do_its_slices_show(tmp_path: Path) -> None:
    raw, query = blocks(NUM_ROWS), blocks(2048)
    peak = write(tmp_path, {"token_embd.weight": raw, "blk.0.attn_q.weight": query})
    values = dequantize(raw, GGMLQuantizationType.Q8_0)
    assert peak < values.nbytes / 2, "not even the compact form is there at once"
    floats, compacts = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / FILE_NAME)
    assert np.array_equal(floats[EMBEDDING], values)
    whole = compacted(GGMLQuantizationType.Q8_0, raw, values)
    assert whole is not None
    assert np.array_equal(compacts[EMBEDDING], whole)
    query_values = dequantize(query, GGMLQuantizationType.Q8_0)
    assert np.array_equal(floats[QUERY], split_halves(query_values, NUM_HEADS))
    whole = compacted(GGMLQuantizationType.Q8_0, query, query_values)
    assert whole is not None
    assert np.array_equal(compacts[QUERY], split_halves(whole, NUM_HEADS))


@pytest.mark.parametrize("row", [0, NUM_ROWS - 1])
def test_one_row_without_a_compact_form_leaves_none_of_its_matrix(tmp_path: Path, row: int) -> None:
    raw, query = blocks(NUM_ROWS), blocks(2048)
    raw[row, :2] = np.array([np.inf], "<f2").view(np.uint8)
    with np.errstate(all="ignore"):
        write(tmp_path, {"token_embd.weight": raw, "blk.0.attn_q.weight": query})
    assert set(load_file(tmp_path / "model.safetensors")) == {EMBEDDING, QUERY}
    compacts = load_file(tmp_path / FILE_NAME)
    assert set(compacts) == {QUERY}
    assert (tmp_path / FILE_NAME).stat().st_size < 2 * compacts[QUERY].nbytes


def test_a_model_without_compact_forms_has_no_file_of_them(tmp_path: Path) -> None:
    raw = blocks(2048)
    raw[-1, :2] = np.array([np.inf], "<f2").view(np.uint8)
    with np.errstate(all="ignore"):
        write(tmp_path, {"token_embd.weight": raw})
    assert not (tmp_path / FILE_NAME).exists()
