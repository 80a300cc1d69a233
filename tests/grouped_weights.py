"""Checkpoints of whole numbers by groups, packed as GPTQ and AWQ are, and what they stand for.

Written from the formats' descriptions, a number at a time, in numpy: nothing of the engine's.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.tiny_model import write_tiny_model

Floats = NDArray[np.float32]
Words = NDArray[np.int32]


class Scheme(NamedTuple):
    """How the linear layers of a model are stored."""

    method: str  # gptq, gptq_v2 or awq
    bits: int = 4
    group_size: int = 32  # inputs; -1: all
    symmetric: bool = False
    act_order: bool = False  # inputs of a group are anywhere
    own_orders: bool = False  # those of layers that have one input, too

    @property
    def section(self) -> dict[str, Any]:
        """Of config.json."""
        both = {"bits": self.bits, "group_size": self.group_size}
        if self.method == "awq":
            return both | {"quant_method": "awq", "version": "gemm", "zero_point": True}
        return both | {
            "quant_method": "gptq",
            "checkpoint_format": self.method,
            "sym": self.symmetric,
            "desc_act": self.act_order,
            "lm_head": False,
            "damp_percent": 0.1,
            "true_sequential": True,
            "meta": {"quantizer": ["some:1.0"]},
        }


class Packed(NamedTuple):
    """One weight."""

    tensors: dict[str, NDArray[Any]]  # by the last part of their names
    exact: Floats  # what they stand for


def pack(weight: Floats, scheme: Scheme, rng: np.random.Generator) -> Packed:
    """weight: [num_rows, num_columns]."""
    num_columns = weight.shape[1]
    size = num_columns if scheme.group_size == -1 else scheme.group_size
    group_of = np.arange(num_columns, dtype=np.int32) // size
    if scheme.act_order:
        rng.shuffle(group_of)
    top = 2**scheme.bits - 1
    scales = np.zeros((group_of.max() + 1, len(weight)), np.float16)
    zeros = np.zeros(scales.shape, np.int64)
    for group in range(len(scales)):
        part = weight[:, group_of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if scheme.symmetric:
            scales[group] = 2 * np.abs(part).max(1) / top
            zeros[group] = (top + 1) // 2
        else:
            scales[group] = (high - low) / top
            zeros[group] = np.clip(np.rint(-low / scales[group]), 1, top)
    steps = scales.astype(np.float32)[group_of].T
    offsets = zeros[group_of].T
    numbers = np.clip(np.rint(weight / steps) + offsets, 0, top).astype(np.int64)
    exact = (steps * (numbers - offsets).astype(np.float32)).astype(np.float32)
    if scheme.method == "awq":
        order: tuple[int, ...] = (
            0,
            2,
            4,
            6,
            1,
            3,
            5,
            7,
        )  # the columns of a word, from its lowest bits on
        words = {"qweight": packed(numbers.T, 4, order), "qzeros": packed(zeros, 4, order)}
    else:
        order = tuple(range(32 // scheme.bits))
        words = {
            "qweight": np.ascontiguousarray(packed(numbers, scheme.bits, order).T),
            "qzeros": packed(zeros - (scheme.method == "gptq"), scheme.bits, order),
            "g_idx": group_of,
        }
    return Packed({**words, "scales": scales}, exact)


def packed(numbers: NDArray[np.int64], bits: int, order: tuple[int, ...]) -> Words:
    """[rows, columns] -> [rows, columns / numbers of a word]."""
    rows, columns = numbers.shape
    words = np.zeros((rows, columns // len(order)), np.int64)
    for place, column in enumerate(order):
        words |= numbers[:, column :: len(order)] << bits * place
    return words.astype(np.uint32).view(np.int32)


def write_pair(
    folder: Path, scheme: Scheme, family: str = "llama", **sizes: Any
) -> tuple[Path, Path]:
    """A tiny model so stored; and the same numbers in float32."""
    small, wide = (write_tiny_model(folder / name, family, **sizes) for name in ("small", "wide"))
    tensors, exact = load_file(small / "model.safetensors"), load_file(wide / "model.safetensors")
    rng = np.random.default_rng(3)
    for name in [name for name in exact if name.endswith("_proj.weight")]:
        stem = name.removesuffix("weight")
        weight = tensors.pop(name)
        if not scheme.own_orders:  # as packers have it: by what is known of an input
            rng = np.random.default_rng(weight.shape[1])
        found = pack(weight, scheme, rng)
        tensors |= {stem + part: tensor for part, tensor in found.tensors.items()}
        exact[name] = found.exact
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    save_file(exact, wide / "model.safetensors", metadata={"format": "pt"})
    rewrite_config(small, scheme.section)
    return small, wide


def rewrite_config(folder: Path, section: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
