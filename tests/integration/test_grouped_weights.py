"""GPTQ and AWQ checkpoints equal, bit for bit, the float32 model that they stand for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from diptych.engine.backends.base import Backend
from diptych.engine.backends.cpu.linear import compact_works, make_linear
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.compact import CompactWeight, Weight
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.rank_share import RankShare
from diptych.engine.model.weights import load_weights
from diptych.engine.runner import Runner
from diptych.errors import ConfigurationError
from tests import hf_reference
from tests.engine_logits import chunk_logits
from tests.engines import CPU, PLAIN, load_decoder
from tests.grouped_weights import Scheme, rewrite_config, write_pair

TOLERANCE = 1e-4
SCHEMES = [
    Scheme("gptq", symmetric=True),
    Scheme("gptq", group_size=64),
    Scheme("gptq", group_size=-1),
    Scheme("gptq", act_order=True),
    Scheme("gptq", bits=8, symmetric=True),
    Scheme("gptq", bits=8),
    Scheme("gptq_v2", group_size=24),
    Scheme("gptq_v2", bits=8, group_size=16, act_order=True),
    Scheme("awq"),
    Scheme("awq", group_size=-1),
]
DOWN = "model.layers.1.mlp.down_proj."


def assert_same(small: Path, wide: Path, backend: Backend) -> None:
    """All linear layers, on all inputs there are."""
    ours, theirs = (load_decoder(folder, backend=backend).weights for folder in (small, wide))
    assert torch.equal(ours.embedding, theirs.embedding)  # type: ignore[arg-type]
    for one, other in zip(ours.linears, theirs.linears, strict=True):
        x = torch.eye(one.in_features)
        assert torch.equal(one(x), other(x))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_same_bits_as_of_float_weights(scheme: Scheme, tmp_path: Path) -> None:
    small, wide = write_pair(tmp_path, scheme)
    for backend in (CPU, PLAIN):
        assert_same(small, wide, backend)


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[3], SCHEMES[8]], ids=str)
def test_equals_transformers_on_the_same_numbers(scheme: Scheme, tmp_path: Path) -> None:
    small, wide = write_pair(tmp_path, scheme, "qwen2" if scheme.symmetric else "llama")
    decoder = load_decoder(small)
    token_ids = [5 + 7 * i % 499 for i in range(60)]
    runner = Runner(decoder, KVCache(decoder.config, 8, 8), CPU)
    got = torch.cat(list(chunk_logits(runner, token_ids, [40, 20], range(8))))
    assert (got - hf_reference.logits(wide, token_ids)).abs().max() < TOLERANCE


@pytest.mark.skipif(not compact_works(), reason="needs AVX-512, or AVX2 and FMA")
@pytest.mark.parametrize("scheme", [*SCHEMES[:6], *SCHEMES[8:]], ids=str)
def test_kept_compact_where_a_compact_weight_has_the_same_bits(
    scheme: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, _ = write_pair(tmp_path, scheme)
    kept: list[Weight] = []

    def make(weight: Weight, bias: torch.Tensor | None) -> object:
        kept.append(weight)
        return make_linear(weight, bias)

    monkeypatch.setattr("diptych.engine.backends.cpu.backend.make_linear", make)
    load_decoder(small)
    are_compact = {isinstance(weight, CompactWeight) for weight in kept[:-1]}  # but the head
    is_kept = not scheme.act_order and (scheme.bits == 4 or scheme.symmetric)
    assert are_compact == {is_kept}


def test_unpacked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in (Scheme("gptq", act_order=True), Scheme("awq"), Scheme("gptq", symmetric=True)):
        small, wide = write_pair(tmp_path / str(scheme), scheme)
        monkeypatch.setattr("diptych.engine.model.stored_groups._CHUNK_ELEMENTS", 1000)
        assert_same(small, wide, CPU)


def test_a_zero_that_was_borrowed_for(tmp_path: Path) -> None:
    """Packers take one from whole words: of a zero of 0 the next number is less by one more."""
    small, wide = write_pair(tmp_path, Scheme("gptq"))
    tensors, exact = (load_file(folder / "model.safetensors") for folder in (small, wide))
    words = tensors[DOWN + "qzeros"].view(np.uint32)
    zeros = words + np.uint32(0x11111111)
    first = (zeros & 15).astype(np.int64)  # of every eighth row, to become 0
    words[:] = (zeros & ~np.uint32(15)) - np.uint32(0x11111111)
    scales = tensors[DOWN + "scales"].astype(np.float32)
    exact[DOWN + "weight"][::8] += np.repeat(first * scales[:, ::8], 32, axis=0).T
    for folder, content in ((small, tensors), (wide, exact)):
        save_file(content, folder / "model.safetensors")
    decoders = [load_decoder(folder, backend=PLAIN) for folder in (small, wide)]
    one, other = (decoder.weights.layers[1].down(torch.eye(128)) for decoder in decoders)
    assert (one - other).abs().max() < 1e-6


def test_layers_that_were_left_as_they_are(tmp_path: Path) -> None:
    """And biases of zeros that packers add to layers without any."""
    small, wide = write_pair(tmp_path, Scheme("awq"))
    tensors, exact = (load_file(folder / "model.safetensors") for folder in (small, wide))
    for part in ("qweight", "qzeros", "scales"):
        del tensors[DOWN + part]
    tensors[DOWN + "weight"] = exact[DOWN + "weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float16)
    tensors["model.layers.0.mlp.down_proj.bias"] = np.zeros(64, np.float16)
    save_file(tensors, small / "model.safetensors")
    assert_same(small, wide, CPU)
    tensors["model.layers.0.mlp.down_proj.bias"][3] = 1
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"does not use: .*down_proj\.bias"):
        load_decoder(small)


def test_a_rank_reads_its_part(tmp_path: Path) -> None:
    """Of which groups and words may end elsewhere than its own."""

    class OneOfTwo:
        share = RankShare(1, 2)

        def sum(self, x: torch.Tensor) -> None:
            """Nothing of the other one's."""

        def share_first(self, x: torch.Tensor) -> None:
            """Nothing of the other one's."""

        def gather(self, part: torch.Tensor) -> torch.Tensor:
            return part

    small, wide = write_pair(tmp_path, Scheme("gptq", group_size=128))
    config = ModelConfig.from_folder(small)
    ours, theirs = (
        load_weights(folder, config, PLAIN.weights(torch.float32, "none"), ranks=OneOfTwo())
        for folder in (small, wide)
    )
    for one, other in zip(ours.linears, theirs.linears, strict=True):
        x = torch.eye(one.in_features)
        assert torch.equal(one(x), other(x))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"qzeros": None}, "down_proj.weight in .*: qzeros is missing"),
        (
            {"scales": np.ones((3, 64), np.float16)},
            r"scales is torch.float16 \[3, 64\], not \[4, 64\]",
        ),
        ({"scales": np.ones((4, 64), np.int32)}, "scales is torch.int32"),
        ({"qweight": np.ones((16, 64), np.int16)}, "I16"),
        ({"g_idx": np.full(128, 4, np.int32)}, "g_idx names groups that there are not"),
        ({"g_idx": np.zeros(64, np.int32)}, r"g_idx is torch.int32 \[64\], not \[128\]"),
        ({"perm": np.zeros(64, np.int32)}, "does not use: .*perm"),
    ],
)
def test_refused_checkpoints(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    small, _ = write_pair(tmp_path, Scheme("gptq"))
    tensors = load_file(small / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(DOWN + name, None)
        if tensor is not None:
            tensors[DOWN + name] = tensor
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(ConfigurationError, match=says):
        load_decoder(small)


def test_whole_numbers_that_no_config_tells_of_are_refused(tmp_path: Path) -> None:
    small, _ = write_pair(tmp_path, Scheme("gptq"))
    rewrite_config(small, None)
    with pytest.raises(ConfigurationError, match=r"lacks the tensor .*q_proj\.weight"):
        load_decoder(small)
