"""What a config says of stored weights: 8-bit floats with scales, or a refusal by name."""

from typing import Any

import pytest

from diptych.engine.model.stored_format import Fp8Storage, read_storage
from diptych.errors import ConfigurationError

WEIGHTS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
BLOCK = WEIGHTS | {"strategy": "block", "block_structure": [128, 128]}


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
    ],
)
def test_read(section: object, want: Fp8Storage | None) -> None:
    assert read_storage({"quantization_config": section}) == want
    if section is None:
        assert read_storage({}) is None


@pytest.mark.parametrize(
    ("section", "named"),
    [
        *(
            ({"quant_method": method}, rf"quantization_config\.quant_method='{method}'")
            for method in ("gptq", "awq", "bitsandbytes", "mxfp4", "fbgemm_fp8")
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
    ],
)
def test_refused_by_name(section: object, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        read_storage({"quantization_config": section})
