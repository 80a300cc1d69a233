"""What ``quantization_config`` says of how weights are stored. Immutable; no torch.

Weights in 8-bit floats with scales, and in whole numbers by groups. Whatever else it names is
refused: such weights mean nothing without their method.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from diptych.errors import ConfigurationError

_KEY = "quantization_config"
_COMPRESSED_FORMATS = ("float-quantized", "naive-quantized")
_BITS = (4, 8)
_MAX_INPUTS = 2**31 - 1  # no layer has more
_SUPPORTED = (
    "weights may be as they are, or of quant_method fp8, gptq, awq, or compressed-tensors "
    "(8-bit floats)"
)


@dataclass(frozen=True, slots=True)
class Fp8Storage:
    """Linear layers are stored in 8-bit floats (e4m3), each with scales to multiply by.

    A scale is one for the whole weight, one for each row, or one for each block.
    """

    block: tuple[int, int] | None  # rows and columns under one scale; None: no such blocks

    def __str__(self) -> str:
        return "8-bit floats"


class Packing(enum.Enum):
    """Whose way it is to pack whole numbers into words of 32 bits."""

    GPTQ = "gptq"  # of a column's rows, zeros less one
    GPTQ_V2 = "gptq_v2"  # the same, zeros as they are
    AWQ = "awq"  # of a row's columns, even ones first


@dataclass(frozen=True, slots=True)
class GroupedStorage:
    """Linear layers are stored as whole numbers, whose groups share a scale and a zero.

    A group is of one output's inputs: consecutive ones, or those that the checkpoint says.
    """

    packing: Packing
    bits: int  # of a number
    group_size: int | None  # inputs; None: all

    def __str__(self) -> str:
        return f"{self.packing.value}, {self.bits} bits"


Storage: TypeAlias = Fp8Storage | GroupedStorage

# How the numbers were found and by whom, and what some programs shall do with them: nothing of
# it changes what the numbers mean. So do "sym" and "desc_act": zeros and groups are stored.
_NOTES = {
    "act_group_aware", "auto_dataset", "backend", "batch_size", "block_name_to_quantize", "bits",
    "cache_block_outputs", "cache_examples_on_gpu", "cache_features", "checkpoint_format",
    "damp_auto_increment", "damp_percent", "dataset", "desc_act", "disable_exllama", "do_fuse",
    "dynamic", "exllama_config", "format", "fuse_max_seq_len", "group_size", "is_marlin_format",
    "lm_head", "max_input_length", "meta", "model_file_base_name", "model_name_or_path",
    "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "modules_to_fuse", "modules_to_not_convert", "mse", "offload_to_disk", "offload_to_disk_path",
    "pack_dtype", "pack_impl", "pad_token_id", "q_group_size", "quant_method", "quantizer",
    "static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama",
    "use_fused_attention", "version", "w_bit", "zero_point",
}  # fmt: skip


def read_storage(config: Mapping[str, Any]) -> Storage | None:
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
        _check(section.get("fmt") in (None, "e4m3"), "fmt", section.get("fmt"), "e4m3")
        return Fp8Storage(_block(section.get("weight_block_size"), "weight_block_size"))
    if method == "gptq":
        return _gptq(section)
    if method == "awq":
        return _awq(section)
    _check(method == "compressed-tensors", "quant_method", method)
    return _compressed(section)


def _gptq(section: Mapping[str, Any]) -> GroupedStorage:
    _refuse_unknown(section)
    format_key = "checkpoint_format" if section.get("checkpoint_format") else "format"
    name = section.get(format_key) or "gptq"
    _check(name in ("gptq", "gptq_v2"), format_key, name, "gptq or gptq_v2")
    _check_packed(section)
    return GroupedStorage(Packing(name), _number_of_bits(section, "bits"), _group_size(section))


def _awq(section: Mapping[str, Any]) -> GroupedStorage:
    _refuse_unknown(section)
    for key in ("version", "format", "checkpoint_format"):
        version = section.get(key) or "gemm"
        _check(str(version).lower() == "gemm", key, version, "gemm")
    _check_packed(section)
    _check(section.get("backend") != "llm-awq", "backend", "llm-awq", "others")
    _check(section.get("zero_point", True) is True, "zero_point", section.get("zero_point"), "true")
    bits_key = "bits" if "bits" in section else "w_bit"
    _check(section.get(bits_key) == 4, bits_key, section.get(bits_key), "4")
    return GroupedStorage(Packing.AWQ, 4, _group_size(section))


def _check_packed(section: Mapping[str, Any]) -> None:
    """What would make other words of it, or other layers than those that are left as they are."""
    _check(not section.get("is_marlin_format"), "is_marlin_format", True, "false")
    word = section.get("pack_dtype")
    _check(word in (None, "int32"), "pack_dtype", word, "int32")
    dynamic = section.get("dynamic") or {}
    _check(isinstance(dynamic, Mapping), "dynamic", dynamic, "an object")
    for pattern in dynamic:
        _check(str(pattern).startswith("-:"), "dynamic", pattern, 'patterns that begin with "-:"')


def _refuse_unknown(section: Mapping[str, Any]) -> None:
    for key, value in section.items():
        _check(key in _NOTES or not value, key, value, "none of that name")


def _number_of_bits(section: Mapping[str, Any], key: str) -> int:
    bits = section.get(key)
    _check(type(bits) is int and bits in _BITS, key, bits, " or ".join(map(str, _BITS)))
    return int(section[key])


def _group_size(section: Mapping[str, Any]) -> int | None:
    key = "q_group_size" if "q_group_size" in section else "group_size"
    size = section.get(key, 128)
    is_count = type(size) is int and (0 < size <= _MAX_INPUTS or size == -1)
    _check(is_count, key, size, "a number of inputs, or -1 for all")
    return None if size == -1 else int(size)


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
    are_counts = all(type(size) is int and 0 < size <= _MAX_INPUTS for size in sizes)
    _check(len(sizes) == 2 and are_counts, key, value)
    return sizes[0], sizes[1]


def _object(parent: Mapping[str, Any], key: str, path: str | None = None) -> Mapping[str, Any]:
    value = parent.get(key)
    _check(isinstance(value, Mapping), path or key, value)
    return value if isinstance(value, Mapping) else {}


def _check(condition: bool, key: str, value: object, wanted: str | None = None) -> None:
    """wanted: what the key may be; None: it is not only the key that is in the way."""
    if not condition:
        where = f"{_KEY}.{key}" if key else _KEY
        may_be = f"it may be {wanted}" if wanted else _SUPPORTED
        raise ConfigurationError(f"config.json: {where}={value!r} is not supported; {may_be}")
