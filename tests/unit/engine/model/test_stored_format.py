"""What a config says of stored weights: what they are, or a refusal by name."""

from typing import Any

import pytest

from diptych.engine.model.stored_format import (
    Fp8Storage,
    GroupedStorage,
    Packing,
    Storage,
    read_storage,
)
from diptych.errors import ConfigurationError

WEIGHTS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
BLOCK = WEIGHTS | {"strategy": "block", "block_structure": [128, 128]}
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": True,
    "sym": False,
    "lm_head": False,
    "meta": {"quantizer": ["some:1.0"]},
}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": ["visual"],
    "backend": "autoawq",
}


def compressed(weights: object, **changes: object) -> dict[str, Any]:
    """As llm-compressor writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        **changes,
    }


@pytest.mark.parametrize(
    ("section", "want"),
    [
        (None, None),
        ({}, None),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Fp8Storage(None)),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": None}, Fp8Storage(None)),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, Fp8Storage((128, 64))),
        (compressed(WEIGHTS), Fp8Storage(None)),
        (compressed(WEIGHTS | {"strategy": "tensor"}, format="naive-quantized"), Fp8Storage(None)),
        (compressed(BLOCK, sparsity_config={"format": "dense"}), Fp8Storage((128, 128))),
        (GPTQ, GroupedStorage(Packing.GPTQ, 4, 128)),
        (GPTQ | {"bits": 8, "group_size": -1}, GroupedStorage(Packing.GPTQ, 8, None)),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, GroupedStorage(Packing.GPTQ_V2, 4, 128)),
        (GPTQ | {"format": "gptq_v2"}, GroupedStorage(Packing.GPTQ_V2, 4, 128)),
        (GPTQ | {"dynamic": {"-:.*gate.*": {}}}, GroupedStorage(Packing.GPTQ, 4, 128)),
        (GPTQ | {"adapter": None, "rotation": None}, GroupedStorage(Packing.GPTQ, 4, 128)),
        (AWQ, GroupedStorage(Packing.AWQ, 4, 128)),
        (AWQ | {"version": "GEMM", "group_size": 64}, GroupedStorage(Packing.AWQ, 4, 64)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True},
            GroupedStorage(Packing.AWQ, 4, 128),
        ),
    ],
)
def test_read(section: object, want: Storage | None) -> None:
    assert read_storage({"quantization_config": section}) == want
    if section is None:
        assert read_storage({}) is None


@pytest.mark.parametrize(
    ("section", "named"),
    [
        *(
            ({"quant_method": method}, rf"quantization_config\.quant_method='{method}'")
            for method in ("bitsandbytes", "mxfp4", "fbgemm_fp8", "hqq")
        ),
        ({"bits": 4}, "quant_method=None"),
        ("fp8", "quantization_config='fp8'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size"),
        (compressed(WEIGHTS, format="pack-quantized"), "format='pack-quantized'"),
        (compressed(WEIGHTS, sparsity_config={"format": "sparse-24"}), "sparsity_config"),
        (compressed(WEIGHTS, transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (compressed(WEIGHTS, config_groups=[]), "config_groups"),
        (compressed(WEIGHTS, config_groups={"group_0": None}), r"config_groups\.group_0=None"),
        (compressed(None), r"group_0\.weights=None"),
        (compressed(WEIGHTS | {"type": "int"}), r"weights\.type='int'"),
        (compressed(WEIGHTS | {"num_bits": 4}), r"weights\.num_bits=4"),
        (compressed(WEIGHTS | {"symmetric": False}), r"weights\.symmetric=False"),
        (compressed(WEIGHTS | {"strategy": "group"}), r"weights\.strategy='group'"),
        (compressed(BLOCK | {"block_structure": None}), "block_structure=None"),
        (GPTQ | {"bits": 3}, "bits=3 is not supported; it may be 4 or 8"),
        (GPTQ | {"bits": True}, "bits=True"),
        (GPTQ | {"bits": None}, "bits=None"),
        (GPTQ | {"group_size": 0}, "group_size=0 .* a number of inputs, or -1"),
        (GPTQ | {"group_size": "128"}, "group_size='128'"),
        (GPTQ | {"group_size": 10**30}, "group_size=10+ .* a number of inputs, or -1"),
        (AWQ | {"group_size": 2**31}, "group_size=2147483648 "),
        ({"quant_method": "fp8", "weight_block_size": [10**30, 1]}, "weight_block_size="),
        (AWQ | {"is_marlin_format": True}, "is_marlin_format=True"),
        (AWQ | {"pack_dtype": "int16"}, "pack_dtype='int16' .* int32"),
        (AWQ | {"checkpoint_format": "gemv"}, "checkpoint_format='gemv' .* gemm"),
        (AWQ | {"format": "marlin"}, "format='marlin' .* gemm"),
        (AWQ | {"dynamic": {"+:a": {"bits": 8}}}, "dynamic='[+]:a'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' .* gptq or gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype='int8'"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic='[+]:.*down.*'"),
        (GPTQ | {"rotation": "hadamard"}, "rotation='hadamard' .* none of that name"),
        (AWQ | {"version": "gemv"}, "version='gemv' .* gemm"),
        (AWQ | {"bits": 8}, "bits=8 .* 4"),
        (AWQ | {"zero_point": False}, "zero_point=False"),
        (AWQ | {"backend": "llm-awq"}, "backend='llm-awq'"),
        (AWQ | {"clip": 0.5}, "clip=0.5"),
    ],
)
def test_refused_by_name(section: object, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        read_storage({"quantization_config": section})
