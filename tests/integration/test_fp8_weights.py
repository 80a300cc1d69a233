"""Checkpoints in 8-bit floats equal, widened, what transformers makes of the same numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.fp8 import widen
from diptych.engine.model.weights import load_weights
from diptych.engine.runner import Runner
from diptych.errors import ConfigurationError
from tests import hf_reference
from tests.engine_logits import chunk_logits
from tests.engines import CPU, PLAIN, load_decoder
from tests.tiny_model import write_tiny_model

LARGEST = 448.0  # that e4m3 has
TOLERANCE = 1e-4


class Scheme(NamedTuple):
    """One way to store a weight: its section of the config, and how many numbers share a scale."""

    name: str
    section: dict[str, object]
    scale_name: str
    rows: int | None  # None: all
    columns: int | None
    scale_shape: Callable[[Tensor], tuple[int, ...]] = lambda grid: tuple(grid.shape)


def compressed(strategy: str) -> dict[str, object]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


SCHEMES = [
    Scheme("tensor", compressed("tensor"), "weight_scale", None, None, lambda grid: (1,)),
    Scheme("scalar", {"quant_method": "fp8"}, "weight_scale", None, None, lambda grid: ()),
    Scheme("channel", compressed("channel"), "weight_scale", 1, None),
    *(
        Scheme(
            f"blocks of {rows} x {columns}",
            {"quant_method": "fp8", "weight_block_size": [rows, columns]},
            "weight_scale_inv",
            rows,
            columns,
        )
        for rows, columns in ((128, 128), (24, 40))
    ),
]


def quantise(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """As stored, its scales, and what both stand for."""
    rows, columns = scheme.rows or len(weight), scheme.columns or weight.shape[1]
    grid = torch.empty(-(-len(weight) // rows), -(-weight.shape[1] // columns))
    stored, exact = weight.to(torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            grid[i, j] = weight[place].abs().max() / LARGEST
            stored[place] = (weight[place] / grid[i, j]).to(torch.float8_e4m3fn)
            exact[place] = stored[place].float() * grid[i, j]
    return stored, grid.reshape(scheme.scale_shape(grid)), exact


def write_pair(folder: Path, scheme: Scheme) -> tuple[Path, Path]:
    """A model so stored; and the same numbers in float32."""
    small, wide = (write_tiny_model(folder / name, "qwen3") for name in ("small", "wide"))
    tensors, exact = load_file(small / "model.safetensors"), load_file(wide / "model.safetensors")
    for name in [name for name in exact if name.endswith("_proj.weight")]:
        stem = name.removesuffix("weight")
        tensors[name], scale, exact[name] = quantise(exact[name], scheme)
        tensors[stem + scheme.scale_name] = scale
        tensors[stem + "input_scale"] = torch.ones(1)
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(tensors, small / "model.safetensors")
    save_file(exact, wide / "model.safetensors")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.section}))
    return small, wide


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_equals_transformers_on_the_same_numbers(scheme: Scheme, tmp_path: Path) -> None:
    small, wide = write_pair(tmp_path, scheme)
    decoder = load_decoder(small)
    token_ids = [5 + 7 * i % 499 for i in range(60)]
    runner = Runner(decoder, KVCache(decoder.config, 8, 8), CPU)
    got = torch.cat(list(chunk_logits(runner, token_ids, [40, 20], range(8))))
    assert (got - hf_reference.logits(wide, token_ids)).abs().max() < TOLERANCE
    x = torch.eye(decoder.config.hidden_size)
    for ours, theirs in zip(
        load_decoder(small, backend=PLAIN).weights.linears,
        load_decoder(wide, backend=PLAIN).weights.linears,
        strict=True,
    ):
        x = torch.eye(ours.in_features)
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_multiplied_as_they_are_stored(scheme: Scheme, tmp_path: Path) -> None:
    """With quantization fp8: numbers and scales of rows as they are, inputs rounded by rows."""
    small, wide = write_pair(tmp_path, scheme)
    exact = load_file(wide / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    linear = load_decoder(small, quantization="fp8").weights.layers[1].down
    x = torch.randn(5, exact.shape[1], generator=torch.Generator().manual_seed(1))
    rounded = (x / (x.abs().amax(1, keepdim=True) / LARGEST)).to(torch.float8_e4m3fn)
    inputs = rounded.double() * (x.abs().amax(1, keepdim=True).double() / LARGEST)
    # Scales of blocks are no rows': such a weight is rounded anew.
    bound = 1e-5 if scheme.rows in (None, 1) else 0.1
    want = inputs @ exact.double().T
    assert float((linear(x) - want).norm() / want.norm()) < bound


def test_what_lies_beside_the_weights_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widened in pieces, which come out as the whole does."""
    stored = torch.randn(300, 50).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2)
    out, whole = torch.empty(2, 300, 50)
    widen(stored, scale, (128, 32), whole)
    monkeypatch.setattr("diptych.engine.model.fp8._CHUNK_ELEMENTS", 700)
    widen(stored, scale, (128, 32), out)
    assert torch.equal(out, whole)
    assert torch.equal(whole[128:256, 32:], stored[128:256, 32:].float() * scale[1, 1])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weight_scale_inv": None}, "without a scale"),
        ({"weight_scale_inv": torch.ones(3, 3)}, r"scale of \[3, 3\] fits no weight"),
        ({"weight_scale_inv": torch.ones(0)}, r"scale of \[0\] fits no weight"),
        ({"weight_scale_inv": torch.ones(2, dtype=torch.int32)}, "I32, not a float"),
        ({"other_scale": torch.ones(1)}, "does not use"),
        ({"weight": torch.ones(64, 128)}, "does not use: .*weight_scale_inv"),
    ],
)
def test_refused_checkpoints(changes: dict[str, Tensor | None], says: str, tmp_path: Path) -> None:
    small, _ = write_pair(tmp_path, SCHEMES[-1])
    tensors = load_file(small / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(f"model.layers.1.mlp.down_proj.{name}", None)
        if tensor is not None:
            tensors[f"model.layers.1.mlp.down_proj.{name}"] = tensor
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(ConfigurationError, match=says):
        load_decoder(small)


def test_8_bit_floats_that_no_config_tells_of_are_refused(tmp_path: Path) -> None:
    small, wide = write_pair(tmp_path, SCHEMES[0])
    (small / "config.json").write_bytes((wide / "config.json").read_bytes())
    config = ModelConfig.from_folder(small)
    with pytest.raises(ConfigurationError, match="quantization_config"):
        load_weights(small, config, CPU.weights(torch.float32, "none"))
