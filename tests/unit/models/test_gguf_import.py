"""Importing GGUF twins of tiny models: the same weights and tokens come back."""

import json
import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from diptych.errors import ConfigurationError
from diptych.models.gguf_import import import_gguf
from diptych.models.gguf_import.gguf_file import GGUFFile
from diptych.models.gguf_import.vocabulary import read_vocabulary
from diptych.progress import silent
from diptych.text.tokenizer import Tokenizer
from tests.text_models import SAMPLES, write_gguf
from tests.tiny_model import write_tiny_model

FAMILIES = ("llama", "gemma3")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        write_tiny_model(folder, family=family)
    return folders


def imported(file: Path, folder: Path) -> Path:
    folder.mkdir()
    import_gguf(file, folder, silent)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_model_comes_back(tiny: dict[str, Path], family: str, tmp_path: Path) -> None:
    write_gguf(tiny[family], tmp_path / "m.gguf")
    folder = imported(tmp_path / "m.gguf", tmp_path / "imported")
    want, got = (load_file(f / "model.safetensors") for f in (tiny[family], folder))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == np.float32
        # Gemma's norms went through an addition of 1.
        np.testing.assert_allclose(got[name], tensor, rtol=0, atol=2e-7, err_msg=name)
    configs = [json.loads((f / "config.json").read_text()) for f in (tiny[family], folder)]
    unknown_to_gguf = {"dtype", "layer_types", "query_pre_attn_scalar"}
    for key in set(configs[0]) & set(configs[1]) - unknown_to_gguf:
        if "rope" not in key and "token_id" not in key:
            assert configs[1][key] == configs[0][key], key
    tokenizers = [Tokenizer.from_folder(f) for f in (tiny[family], folder)]
    for text in SAMPLES:
        assert tokenizers[0].encode(text) == tokenizers[1].encode(text)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_quantised_weights_are_what_ggml_says(
    tiny: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    matrix_type = gguf.GGMLQuantizationType[kind]
    write_gguf(tiny["llama"], tmp_path / "m.gguf", matrix_type=matrix_type)
    got = load_file(imported(tmp_path / "m.gguf", tmp_path / "out") / "model.safetensors")
    want = load_file(tiny["llama"] / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    through = gguf.quants.dequantize(gguf.quants.quantize(want[name], matrix_type), matrix_type)
    np.testing.assert_array_equal(got[name], through.astype(np.float32))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "mamba"),
        ("tokenizer.ggml.model", "rwkv"),
        ("tokenizer.ggml.pre", "tomorrow-bpe"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tiny: dict[str, Path], key: str, value: str, tmp_path: Path
) -> None:
    write_gguf(tiny["llama"], tmp_path / "m.gguf", extra=[(key, value)])
    with pytest.raises(ConfigurationError, match=f"'{value}' is not supported"):
        imported(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize("key", ["scale_linear", "scaling.factor"])
@pytest.mark.parametrize(
    ("factor", "scaling"), [(4.0, {"rope_type": "linear", "factor": 4.0}), (1.0, None)]
)
def test_positions_are_scaled_though_no_kind_is_told(
    tiny: dict[str, Path], key: str, factor: float, scaling: object, tmp_path: Path
) -> None:
    """As in files from before it was, of which the oldest have another name for the factor."""
    path = tmp_path / "m.gguf"
    write_gguf(tiny["llama"], path, extra_numbers=[(f"llama.rope.{key}", factor)])
    config = json.loads((imported(path, tmp_path / "out") / "config.json").read_text())
    assert config.get("rope_scaling") == scaling


def test_attention_that_is_scaled_with_positions_is_refused(
    tiny: dict[str, Path], tmp_path: Path
) -> None:
    numbers = [("llama.rope.scaling.attn_factor", 0.9)]
    write_gguf(tiny["llama"], tmp_path / "m.gguf", extra_numbers=numbers)
    with pytest.raises(ConfigurationError, match="attn_factor"):
        imported(tmp_path / "m.gguf", tmp_path / "out")


def test_metadata_of_another_type_is_refused_by_its_key(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "x")
    writer.add_array("some.numbers", [1, 2])
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GGUFFile(tmp_path / "m.gguf") as file:
        wrong = [
            *((read, "a.flag") for read in (file.string, file.integer, file.number, file.strings)),
            *((read, "a.text") for read in (file.integer, file.number, file.strings)),
            *((read, "a.text") for read in (file.numbers, lambda key: file.boolean(key, True))),
            *((read, "some.numbers") for read in (file.string, file.strings)),
        ]
        for read, key in wrong:
            with pytest.raises(ConfigurationError, match=f"metadata '{key}' is not a"):
                read(key)
        with pytest.raises(ConfigurationError, match="metadata 'none' is missing"):
            file.strings("none")
        with pytest.raises(ConfigurationError, match="differ in number"):
            read_vocabulary(file)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_to_what_comes_later_is_refused(
    tiny: dict[str, Path], family: str, tmp_path: Path
) -> None:
    path, key = tmp_path / "m.gguf", f"{family}.attention.causal"
    write_gguf(tiny[family], path, extra_flags=[(key, False)])
    with pytest.raises(ConfigurationError, match=key):
        imported(path, tmp_path / "refused")
    write_gguf(tiny[family], path, extra_flags=[(key, True)])
    imported(path, tmp_path / "out")


def test_a_tensor_without_a_place_is_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    tensors = [("blk.0.attn_sinks.weight", np.zeros(4, np.float32))]
    write_gguf(tiny["llama"], tmp_path / "m.gguf", extra_tensors=tensors)
    with pytest.raises(ConfigurationError, match=r"blk\.0\.attn_sinks\.weight"):
        imported(tmp_path / "m.gguf", tmp_path / "out")


def test_reading_agrees_with_the_gguf_package(tiny: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(tiny["gemma3"], path)
    reader = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        for key, value in file.metadata.items():
            want = reader.fields[key].contents()
            assert (list(value) if isinstance(value, tuple) else value) == want, key
        for info, tensor in zip(file.tensors, reader.tensors, strict=True):
            assert info.name == tensor.name
            assert info.shape == tuple(reversed(tensor.shape.tolist()))
            assert info.offset == tensor.data_offset


@pytest.fixture(scope="module")
def intact(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("intact") / "m.gguf"
    write_gguf(tiny["llama"], path)
    return path


@given(ratio=st.floats(0, 0.999))
@settings(max_examples=40)
def test_a_file_cut_short_is_refused(
    intact: Path, tmp_path_factory: pytest.TempPathFactory, ratio: float
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    (folder / "m.gguf").write_bytes(intact.read_bytes()[: int(ratio * intact.stat().st_size)])
    with pytest.raises(ConfigurationError):
        imported(folder / "m.gguf", folder / "out")


@given(at=st.integers(0, 20_000), byte=st.integers(0, 255))
@settings(max_examples=60)
def test_a_damaged_byte_is_refused_or_harmless(
    intact: Path, tmp_path_factory: pytest.TempPathFactory, at: int, byte: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    damaged = bytearray(intact.read_bytes())
    damaged[at] = byte
    (folder / "m.gguf").write_bytes(damaged)
    with suppress(ConfigurationError):
        imported(folder / "m.gguf", folder / "out")


@pytest.mark.parametrize("byte", [5, 6])
def test_a_matrix_of_more_rows_than_the_file_has_is_refused_before_they_are_counted(
    intact: Path, tmp_path: Path, byte: int
) -> None:
    """One wrong bit makes them more than memory has numbers for."""
    damaged, name = bytearray(intact.read_bytes()), b"blk.0.ffn_up.weight"
    num_rows_at = damaged.index(name) + len(name) + 4 + 8  # behind dimensions and columns
    damaged[num_rows_at + byte] |= 1
    (tmp_path / "m.gguf").write_bytes(damaged)
    with pytest.raises(ConfigurationError, match=r"blk\.0\.ffn_up\.weight"):
        imported(tmp_path / "m.gguf", tmp_path / "out")


def test_a_tensor_that_is_there_twice_is_refused(intact: Path, tmp_path: Path) -> None:
    """One wrong bit makes a layer's number another's: of neighbours one had the rows of both."""
    damaged = intact.read_bytes().replace(b"blk.0.ffn_norm", b"blk.1.ffn_norm")
    (tmp_path / "m.gguf").write_bytes(damaged)
    with pytest.raises(ConfigurationError, match=r"'blk\.1\.ffn_norm\.weight' is there 2 times"):
        imported(tmp_path / "m.gguf", tmp_path / "out")


def written_over(path: Path, behind: bytes, offset: int, number: bytes) -> None:
    """Other bytes, so far behind what there is once in a file."""
    data = bytearray(path.read_bytes())
    assert data.count(behind) == 1
    at = data.index(behind) + len(behind) + offset
    data[at : at + len(number)] = number
    path.write_bytes(data)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_that_says_to_have_layers_without_tensors_takes_no_memory_for_them(
    tiny: dict[str, Path], tmp_path: Path, family: str
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(tiny[family], path)
    kind = 4  # bytes
    written_over(path, f"{family}.block_count".encode(), kind, (10**6).to_bytes(4, "little"))
    with pytest.raises(ConfigurationError, match="says 1000000 layers"):
        imported(path, tmp_path / "out")


@pytest.mark.parametrize(
    "key",
    [
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "gemma3.attention.head_count",
        "gemma3.attention.sliding_window_pattern",
    ],
)
def test_a_count_of_nothing_is_refused_by_its_key(
    tiny: dict[str, Path], tmp_path: Path, key: str
) -> None:
    path, uint32 = tmp_path / "m.gguf", 4
    unsaid = [(key, 1.0)] if key.endswith("_pattern") else []
    write_gguf(tiny[key.partition(".")[0]], path, extra_numbers=unsaid)
    behind = struct.pack("<Q", len(key)) + key.encode()
    written_over(path, behind, 0, struct.pack("<II", uint32, 0))
    with pytest.raises(ConfigurationError, match=f"metadata '{key}' is 0, below 1"):
        imported(path, tmp_path / "out")


@pytest.mark.parametrize("role", ["bos", "eos"])
@pytest.mark.parametrize("number", [-1, 2**20])
def test_a_special_token_that_does_not_exist_is_refused_by_its_key(
    intact: Path, tmp_path: Path, role: str, number: int
) -> None:
    """-1, as files say that there is none, is not the last token."""
    path, key = tmp_path / "m.gguf", f"tokenizer.ggml.{role}_token_id"
    path.write_bytes(intact.read_bytes())
    int32 = 5
    written_over(path, key.encode(), 0, struct.pack("<Ii", int32, number))
    with pytest.raises(ConfigurationError, match=f"'{key}' is {number}, which is none of"):
        imported(path, tmp_path / "out")
