"""What ``quantization_config`` says of how weights are stored. Immutable; no torch.

Whatever else than 8-bit floats with scales it names is refused: such weights mean nothing
without their method.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diptych.errors import ConfigurationError

_KEY = "quantization_config"
_COMPRESSED_FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Fp8Storage:
    """Linear layers are stored in 8-bit floats (e4m3), each with scales to multiply by.

    A scale is one for the whole weight, one for each row, or one for each block.
    """

    block: tuple[int, int] | None  # rows and columns under one scale; None: no such blocks


def read_storage(config: Mapping[str, Any]) -> Fp8Storage | None:
    """How a model of this config.json is stored; None: as what it is.

    Raises:
        ConfigurationError: names the key and value it cannot follow.
    """
    if not config.get(_KEY):
        return None
    section = config[_KEY]
    _check(isinstance(section, Mapping), "", section)
    method = section.get("quant_method")
    if method == "fp8":
        _check(section.get("fmt") in (None, "e4m3"), "fmt", section.get("fmt"))
        return Fp8Storage(_block(section.get("weight_block_size"), "weight_block_size"))
    _check(method == "compressed-tensors", "quant_method", method)
    return _compressed(section)


def _compressed(section: Mapping[str, Any]) -> Fp8Storage:
    for key in ("sparsity_config", "transform_config"):
        value = section.get(key)
        is_dense = isinstance(value, Mapping) and value.get("format") == "dense"
        _check(not value or is_dense, key, value)
    groups = _object(section, "config_groups")
    _check(bool(groups), "config_groups", groups)
    blocks = set()
    for name in groups:
        where = f"config_groups.{name}"
        group = _object(groups, name, where)
        format_ = group.get("format") or section.get("format")
        _check(format_ in _COMPRESSED_FORMATS, "format", format_)
        blocks.add(_group_block(_object(group, "weights", f"{where}.weights"), f"{where}.weights"))
    blocks.discard(None)
    _check(len(blocks) < 2, "config_groups", section["config_groups"])
    return Fp8Storage(blocks.pop() if blocks else None)


def _group_block(weights: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    for key, wanted in (("type", ["float"]), ("num_bits", [8]), ("symmetric", [True, None])):
        _check(weights.get(key) in wanted, f"{where}.{key}", weights.get(key))
    strategy = weights.get("strategy")
    _check(strategy in ("tensor", "channel", "block"), f"{where}.strategy", strategy)
    if strategy != "block":
        return None
    block = _block(weights.get("block_structure"), f"{where}.block_structure")
    _check(block is not None, f"{where}.block_structure", None)
    return block


def _block(value: object, key: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    _check(len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes), key, value)
    return sizes[0], sizes[1]


def _object(parent: Mapping[str, Any], key: str, path: str | None = None) -> Mapping[str, Any]:
    value = parent.get(key)
    _check(isinstance(value, Mapping), path or key, value)
    return value if isinstance(value, Mapping) else {}


def _check(condition: bool, key: str, value: object) -> None:
    if not condition:
        where = f"{_KEY}.{key}" if key else _KEY
        raise ConfigurationError(
            f"config.json: {where}={value!r} is not supported; weights may be as they are, or "
            "of quant_method fp8 or compressed-tensors (8-bit floats)"
        )
