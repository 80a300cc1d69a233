"""Loading a folder: sharded or not, what is refused, digests, KV memory."""

import json
import mmap
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.engine.backends.base import Backend
from diptych.engine.backends.cpu.linear import packing_works
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.fingerprint import kv_layout
from diptych.engine.model.checkpoint import CheckpointReader
from diptych.engine.model.compact import widened
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.rank_share import RankShare
from diptych.engine.model.weights import load_weights, resolve_dtype
from diptych.errors import ConfigurationError, LayoutMismatchError
from diptych.v1 import common_pb2
from kvtransfer.endpoint import compare_layouts
from tests.engines import CPU, PLAIN
from tests.tiny_model import write_tiny_model

STORE = CPU.weights(torch.float32, "none")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DIFFERS = rf"{HEAD}.* differs from {EMBEDDING}.*tie_word_embeddings.*to false.*remove the tensor"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", "qwen2")


def shard(folder: Path) -> None:
    """Split the weights over two files, as large checkpoints are."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file_name = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    content = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(content)


def change_tensors(folder: Path, **changes: np.ndarray | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_progress_and_shards(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    ratios: list[float] = []
    weights = load_weights(folder, config, STORE, ratios.append)
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1.0
    shard(folder)
    again = load_weights(folder, config, STORE)
    x = torch.linspace(-1, 1, 3 * config.hidden_size).view(3, -1)
    assert torch.equal(again.layers[1].qkv(x), weights.layers[1].qkv(x))
    assert torch.equal(widened(again.embedding), widened(weights.embedding))
    assert len(weights.source.digest) == 32
    assert again.source.digest == weights.source.digest


class LiveBytes(TorchDispatchMode):
    """Counts the memory that torch's operations made and that is still held; files aside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By address: whether it is held no more, and its size. It keeps none of it.
        self._held: dict[int, tuple[Callable[[], bool], int]] = {}
        self.most = 0

    @property
    def now(self) -> int:
        return sum(num_bytes for is_gone, num_bytes in self._held.values() if not is_gone())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in args if isinstance(t, torch.Tensor) and not t.is_mkldnn]
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if isinstance(out, torch.Tensor) and out.is_mkldnn:  # packed: it has no storage to ask
            packed = weakref.ref(out)
            self._hold(id(out), lambda: packed() is None, out.numel() * out.element_size())
        elif isinstance(out, torch.Tensor):
            storage = out.untyped_storage()
            if storage.data_ptr() not in given:
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._hold(storage.data_ptr(), reference.expired, storage.nbytes())
        return out

    def _hold(self, address: int, is_gone: Callable[[], bool], num_bytes: int) -> None:
        self._held[address] = is_gone, num_bytes
        self.most = max(self.most, self.now)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("backend", "dtype", "num_beside"),
    [(PLAIN, torch.float32, 0), (PLAIN, torch.bfloat16, 0), (CPU, torch.bfloat16, 1)],
    ids=["plain", "plain bfloat16", "packed"],
)
def test_a_tensor_goes_straight_to_where_it_stays(
    folder: Path, stored: str, backend: Backend, dtype: torch.dtype, num_beside: int
) -> None:
    """Beside the weights lies that which is being packed, and no second copy of anything."""
    path = folder / "model.safetensors"
    if stored == "bfloat16":
        save_tensors({n: t.bfloat16() for n, t in load_tensors(path).items()}, path)
    config = ModelConfig.from_folder(folder)
    store = backend.weights(dtype, "none")
    packing_works(dtype)  # finds out only once, and not by what is counted
    with LiveBytes() as live:
        weights = load_weights(folder, config, store)
    sizes = [each.in_features * each.out_features * dtype.itemsize for each in weights.linears]
    assert live.now >= widened(weights.embedding).nbytes + sum(sizes)
    beside = live.most - live.now - num_beside * max(sizes)
    assert beside < min(sizes) / 2


class RecordedPages(mmap.mmap):
    """A mapped file that tells what was advised of its pages."""

    advised: ClassVar[list[tuple[int, int, int]]] = []  # advice, first byte, bytes

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        self.advised.append((option, start, length))
        super().madvise(option, start, length)


def test_pages_of_the_file_are_given_back_as_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the system's cache is no memory of this process."""
    monkeypatch.setattr("mmap.mmap", RecordedPages)
    load_weights(folder, ModelConfig.from_folder(folder), PLAIN.weights(torch.float32, "none"))
    advised: dict[tuple[int, int], list[int]] = {}
    for option, *pages in RecordedPages.advised:
        advised.setdefault((pages[0], pages[1]), []).append(option)
    for options in advised.values():  # asked for, once or more, and then given back
        assert set(options[:-1]) == {mmap.MADV_WILLNEED}
        assert options[-1] == mmap.MADV_DONTNEED
    assert (
        sum(length for _, length in advised) > 0.9 * (folder / "model.safetensors").stat().st_size
    )


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "lacks the tensor model.layers.1.mlp.up_proj"),
        ("model.norm.weight", np.zeros(3, np.float32), r"is \[3\], expected \[64\]"),
        ("model.norm.weight", np.zeros(64, np.int8), "is I8"),
        ("model.layers.0.self_attn.o_proj.bias", np.zeros(64, np.float32), "does not use"),
        ("model.layers.7.input_layernorm.weight", np.zeros(64, np.float32), "does not use"),
    ],
)
def test_refused_checkpoints(folder: Path, name: str, tensor: np.ndarray | None, says: str) -> None:
    change_tensors(folder, **{name: tensor})
    with pytest.raises(ConfigurationError, match=says):
        load_weights(folder, ModelConfig.from_folder(folder), STORE)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_checkpoint_of_the_decoder_alone(folder: Path, is_sharded: bool) -> None:
    """As AutoModel saves one: no name has the whole model's prefix, and there is no head."""
    change_config(folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors")
    whole = load_weights(folder, ModelConfig.from_folder(folder), STORE)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "model.safetensors")
    if is_sharded:
        shard(folder)
    weights = load_weights(folder, ModelConfig.from_folder(folder), STORE)
    assert torch.equal(widened(weights.embedding), widened(whole.embedding))
    assert torch.equal(weights.final_norm, whole.final_norm)
    change_config(folder, tie_word_embeddings=False)
    with pytest.raises(ConfigurationError, match=r"lacks the tensor lm_head\.weight$"):
        load_weights(folder, ModelConfig.from_folder(folder), STORE)


@pytest.fixture
def tied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose head is its embedding, and is stored all the same; compared in pieces."""
    monkeypatch.setattr("diptych.engine.model.checkpoint._PIECE_NUMBERS", 1000)
    change_config(folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    change_tensors(folder, **{HEAD: tensors[EMBEDDING]})
    return folder


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_head_that_is_the_embedding(tied: Path, is_sharded: bool) -> None:
    """It is read to see that, and not kept."""
    if is_sharded:
        shard(tied)
    config = ModelConfig.from_folder(tied)
    ratios: list[float] = []
    with LiveBytes() as live:
        weights = load_weights(tied, config, PLAIN.weights(torch.float32, "none"), ratios.append)
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1.0
    sizes = [each.in_features * each.out_features * 4 for each in weights.linears]
    assert live.most - live.now < min(sizes) / 2
    assert weights.head.out_features == config.vocab_size


@pytest.mark.parametrize("row", [0, 255, 256, 511])
def test_another_head_than_a_tied_one_is_refused(tied: Path, row: int) -> None:
    """Both are there: transformers takes the stored one, whatever the config says."""
    head = load_file(tied / "model.safetensors")[HEAD].copy()
    head[row, 63] += 1
    change_tensors(tied, **{HEAD: head})
    with pytest.raises(ConfigurationError, match=DIFFERS):
        load_weights(tied, ModelConfig.from_folder(tied), STORE)
    change_config(tied, tie_word_embeddings=False)
    weights = load_weights(tied, ModelConfig.from_folder(tied), STORE)
    x = torch.linspace(-1, 1, 64)[None]
    assert torch.allclose(weights.head(x), x @ torch.from_numpy(head).T, atol=1e-4)


@pytest.mark.parametrize(
    "head", [np.zeros((512, 32), np.float32), np.zeros(512, np.float32), np.zeros((512, 64), "i1")]
)
def test_a_tied_head_of_another_shape_or_type_is_refused(tied: Path, head: np.ndarray) -> None:
    change_tensors(tied, **{HEAD: head})
    with pytest.raises(ConfigurationError, match=DIFFERS):
        load_weights(tied, ModelConfig.from_folder(tied), STORE)


def test_a_tied_head_of_fewer_bits_is_another_one_where_that_shows(tied: Path) -> None:
    path = tied / "model.safetensors"
    tensors = load_tensors(path)
    save_tensors(tensors | {HEAD: tensors[HEAD].bfloat16()}, path)
    config = ModelConfig.from_folder(tied)
    load_weights(tied, config, PLAIN.weights(torch.bfloat16, "none"))
    with pytest.raises(ConfigurationError, match=DIFFERS):
        load_weights(tied, config, STORE)
    save_tensors(tensors | {HEAD: tensors[HEAD].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(ConfigurationError, match=DIFFERS):
        load_weights(tied, config, STORE)


def test_a_tied_head_in_whole_numbers_is_another_one(tied: Path) -> None:
    words = dict.fromkeys(("qweight", "qzeros", "scales"), np.zeros((8, 512), np.int32))
    change_tensors(tied, **{HEAD: None}, **{f"lm_head.{part}": w for part, w in words.items()})
    section = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    change_config(tied, quantization_config=section)
    with pytest.raises(ConfigurationError, match=DIFFERS):
        load_weights(tied, ModelConfig.from_folder(tied), STORE)


def test_a_head_beside_no_embedding(tied: Path) -> None:
    change_tensors(tied, **{EMBEDDING: None})
    with pytest.raises(ConfigurationError, match=f"lacks the tensor {EMBEDDING}$"):
        load_weights(tied, ModelConfig.from_folder(tied), STORE)


def test_each_rank_compares_the_rows_that_it_reads(tied: Path) -> None:
    head = load_file(tied / "model.safetensors")[HEAD].copy()
    head[300, 5] += 1
    change_tensors(tied, **{HEAD: head})
    differ = []
    for rank in range(2):
        reader = CheckpointReader(
            tied,
            torch.float32,
            torch.device("cpu"),
            lambda ratio: None,
            share=RankShare(rank, 2),
        )
        differ.append(reader.differ(HEAD, EMBEDDING, 512, 64))
    assert differ == [False, True]


def test_weights_of_two_models_in_one_folder(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    shard(folder)
    config = ModelConfig.from_folder(folder)
    load_weights(folder, config, STORE)
    (folder / "model.safetensors").write_bytes(whole)
    both = r"both model\.safetensors and model\.safetensors\.index\.json.*: remove one"
    with pytest.raises(ConfigurationError, match=both):
        load_weights(folder, config, STORE)
    index = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    content = json.dumps({"weight_map": index})
    (folder / "model.safetensors.index.json").write_text(content)
    load_weights(folder, config, STORE)


@pytest.mark.parametrize("is_absolute", [True, False])
def test_an_index_names_no_files_outside_of_its_folder(folder: Path, is_absolute: bool) -> None:
    """Whoever made a model says nothing of what else is on this machine, such as a pipe."""
    shard(folder)
    config, path = ModelConfig.from_folder(folder), folder / "model.safetensors.index.json"
    (folder / "model-1.safetensors").rename(folder.parent / "model-1.safetensors")
    name = f"{folder.parent if is_absolute else '..'}/model-1.safetensors"
    path.write_text(path.read_text().replace("model-1.safetensors", name))
    with pytest.raises(ConfigurationError, match=rf"index\.json names '{name}', which is not in"):
        load_weights(folder, config, STORE)


def test_unreadable_files(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    deep = b"[" * 10_000
    nested = len(deep).to_bytes(8, "little") + deep
    for content in (b"", b"\xff" * 100, whole[:-1], nested):
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match="cannot read the weights"):
            load_weights(folder, config, STORE)
    path.unlink()
    with pytest.raises(ConfigurationError, match="cannot read the weights"):
        load_weights(folder, config, STORE)


@pytest.mark.parametrize(
    "sizes",
    [
        {"shape": [128.0]},
        {"shape": [True, 128]},
        {"shape": [-1, -128]},
        {"data_offsets": [0.0, 512.0]},
    ],
)
def test_a_header_whose_sizes_are_no_counts_is_refused_by_the_tensors_name(
    folder: Path, sizes: dict[str, list[float]]
) -> None:
    path, name = folder / "model.safetensors", "model.norm.weight"
    whole = path.read_bytes()
    first = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:first])
    header[name] |= sizes
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + whole[first:])
    with pytest.raises(ConfigurationError, match=f"{name} has sizes that are no counts"):
        load_weights(folder, ModelConfig.from_folder(folder), STORE)


def test_resolve_dtype(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    assert resolve_dtype("auto", config, CPU.auto_dtype) is torch.float32
    assert resolve_dtype("bfloat16", config, CPU.auto_dtype) is torch.bfloat16
    with pytest.raises(ConfigurationError, match="float8"):
        resolve_dtype("float8", config, CPU.auto_dtype)


@pytest.mark.parametrize(
    ("stored", "on_a_device"),
    [("bfloat16", torch.bfloat16), ("float16", torch.float32), ("float32", torch.float32)],
)
def test_auto_is_the_models_own_where_the_device_computes_in_it(
    folder: Path, stored: str, on_a_device: torch.dtype
) -> None:
    config = replace(ModelConfig.from_folder(folder), checkpoint_dtype=stored)
    device = TorchBackend(torch.device("meta"))
    assert resolve_dtype("auto", config, device.auto_dtype) is on_a_device
    assert resolve_dtype("auto", config, CPU.auto_dtype) is torch.float32
    assert resolve_dtype("float32", config, device.auto_dtype) is torch.float32


def test_kv_memory(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    cache = KVCache(config, num_blocks=5, block_size=4)
    assert cache.tensor.shape == (5, 2, 2, 2, 4, 16)
    assert cache.block_bytes * 5 == cache.num_bytes == cache.tensor.nbytes
    assert cache.memory.bytes.data_ptr() == cache.tensor.data_ptr()
    assert not cache.tensor.any()
    cache.tensor[3] = 1.5
    blocks = cache.memory.bytes.view(5, cache.block_bytes)
    assert blocks[3].view(torch.float32).tolist() == [1.5] * (cache.block_bytes // 4)
    assert not blocks[[0, 1, 2, 4]].any()
    with pytest.raises(ValueError, match="positive"):
        KVCache(config, 0)
    with pytest.raises(ConfigurationError, match="memory"):
        KVCache(config, 2**45)


def test_layout(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    cache = KVCache(config, 2, block_size=4, dtype=torch.bfloat16)
    layout = kv_layout(config, cache, "abc", torch.float32)
    assert (layout.model_digest, layout.dtype, layout.block_size) == ("abc", "bfloat16", 4)
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (2, 2, 16)
    assert layout.block_bytes == cache.block_bytes
    assert (layout.tensor_parallel_rank, layout.tensor_parallel_size) == (0, 1)
    part = KVCache(RankShare(1, 2).of(config), 2, block_size=4, dtype=torch.bfloat16)
    assert 2 * part.block_bytes == cache.block_bytes
    shared = kv_layout(config, part, "abc", torch.float32, num_ranks=2)
    assert shared.tensor_parallel_size == 2
    shared.tensor_parallel_size = 1
    assert shared == layout, "it tells of whole blocks"


def test_layout_of_groups(tmp_path: Path) -> None:
    """Two sliding layers before a full one, which lies first in a block."""
    config = ModelConfig.from_folder(write_tiny_model(tmp_path, "gemma3", sliding_window=20))
    cache = KVCache(config, 2, block_size=4, dtype=torch.int8)
    layout = kv_layout(config, cache, "abc", torch.float32)
    full, sliding = layout.groups
    assert (full.kind, full.window) == (common_pb2.KV_KIND_FULL, 0)
    assert (sliding.kind, sliding.window) == (common_pb2.KV_KIND_SLIDING, 20)
    assert [list(group.layers) for group in layout.groups] == [[2], [0, 1]]
    assert {(g.num_kv_heads, g.head_dim, g.dtype) for g in layout.groups} == {(2, 32, "int8")}
    assert full.block_bytes * 3 == sliding.block_bytes * 3 // 2 == cache.block_bytes


def test_workers_that_compute_otherwise_are_no_pair(folder: Path) -> None:
    """Even on caches of one element type: what they put into them differs."""
    config = ModelConfig.from_folder(folder)
    cache = KVCache(config, 2, dtype=torch.int8)
    reader, source = (
        kv_layout(config, cache, "abc", dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    with pytest.raises(LayoutMismatchError, match=r"^compute_dtype: .*'bfloat16'.*'float32'"):
        compare_layouts(reader, source)
