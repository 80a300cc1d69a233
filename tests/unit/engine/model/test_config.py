"""config.json in the spellings of transformers 4 and 5, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from diptych.engine.model.config import ModelConfig
from diptych.engine.model.layer_config import Activation, RopeConfig, RopeType
from diptych.errors import ConfigurationError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "query_pre_attn_scalar": 64,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.sliding_window for layer in config.layers]


def test_llama() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert config.head_dim == 64
    assert config.num_layers == 3
    assert config.attention_scale == 64**-0.5
    assert config.embedding_scale == 1.0
    assert config.tied_embeddings
    assert config.activation is Activation.SILU
    assert config.checkpoint_dtype == "bfloat16"
    extras = (config.qk_norm, config.qkv_bias, config.output_bias, config.post_norms)
    assert extras == (False, False, False, False)
    assert {layer.rope for layer in config.layers} == {RopeConfig(theta=100000.0)}
    assert windows(config) == [None] * 3


def test_defaults_of_silent_configs() -> None:
    assert not ModelConfig.from_hf(LLAMA | {"tie_word_embeddings": None}).tied_embeddings
    silent = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_hf(silent).num_kv_heads == 9
    assert ModelConfig.from_hf(LLAMA | {"model_type": "qwen3"}).head_dim == 128
    assert ModelConfig.from_hf(GEMMA).tied_embeddings


def test_gemma() -> None:
    config = ModelConfig.from_hf(GEMMA)
    assert config.qk_norm
    assert config.post_norms
    assert config.norm_offset == 1.0
    assert config.attention_scale == 64**-0.5
    assert config.embedding_scale == 640**0.5
    assert config.activation is Activation.GELU_TANH
    assert windows(config) == [512] * 5 + [None, 512]
    assert config.layers[0].rope == RopeConfig(theta=10_000.0)
    assert config.layers[5].rope == RopeConfig(theta=1_000_000.0)


def test_gemma_2() -> None:
    """Neither cap is in a config that says nothing of it; one that says null has none."""
    gemma = GEMMA | {"model_type": "gemma2", "query_pre_attn_scalar": 224}
    config = ModelConfig.from_hf(gemma)
    assert not config.qk_norm
    assert config.post_norms
    assert config.norm_offset == 1.0
    assert config.tied_embeddings
    assert config.attention_scale == 224**-0.5
    assert config.embedding_scale == 640**0.5
    assert config.activation is Activation.GELU_TANH
    assert (config.score_softcap, config.logit_softcap) == (50.0, 30.0)
    assert windows(config) == [512, None] * 3 + [512]
    assert {layer.rope for layer in config.layers} == {RopeConfig(theta=10_000.0)}
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    uncapped = ModelConfig.from_hf(gemma | none)
    assert (uncapped.score_softcap, uncapped.logit_softcap) == (None, None)
    own = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10}
    capped = ModelConfig.from_hf(gemma | own)
    assert (capped.score_softcap, capped.logit_softcap) == (20.0, 10.0)


@pytest.mark.parametrize(
    "spelling",
    [
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
        {
            "layer_types": [FULL if i % 2 else SLIDING for i in range(7)],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                SLIDING: {"rope_type": "default", "rope_theta": 2e4},
            },
        },
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_gemma_spellings(spelling: dict[str, Any]) -> None:
    config = ModelConfig.from_hf(GEMMA | spelling)
    assert windows(config) == [512, None, 512, None, 512, None, 512]
    assert config.layers[0].rope == RopeConfig(theta=2e4)
    assert config.layers[1].rope == RopeConfig(5e5, RopeType.LINEAR, 8.0)


def test_llama3_rope_in_both_spellings() -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    want = RopeConfig(100000.0, RopeType.LLAMA3, 8.0, 1.0, 4.0, 4096)
    for spelling in (
        {"rope_scaling": scaling | {"rope_type": "llama3"}},
        {"rope_scaling": scaling | {"type": "llama3"}},
        {
            "rope_theta": None,
            "rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 1e5},
        },
    ):
        assert ModelConfig.from_hf(LLAMA | spelling).layers[0].rope == want


def test_yarn() -> None:
    """As the makers of Qwen have it added to their config, whose context it leaves as it was."""
    config = ModelConfig.from_hf(LLAMA | {"rope_scaling": YARN, "max_position_embeddings": 40960})
    rope = config.layers[0].rope
    assert (rope.rope_type, rope.factor, rope.original_max_position) == (RopeType.YARN, 4.0, 32768)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert config.max_position == 131072
    longer = LLAMA | {"rope_scaling": YARN, "max_position_embeddings": 200_000}
    assert ModelConfig.from_hf(longer).max_position == 200_000
    of_model = LLAMA | {"rope_scaling": YARN, "original_max_position_embeddings": 4096}
    assert ModelConfig.from_hf(of_model).layers[0].rope.original_max_position == 4096


def test_windows_of_mistral_and_qwen() -> None:
    mistral = LLAMA | {"model_type": "mistral"}
    assert windows(ModelConfig.from_hf(mistral)) == [4096] * 3
    assert windows(ModelConfig.from_hf(mistral | {"sliding_window": None})) == [None] * 3
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 2}
    assert windows(ModelConfig.from_hf(qwen)) == [None] * 3
    assert windows(ModelConfig.from_hf(qwen | {"use_sliding_window": True})) == [None, None, 64]
    typed = qwen | {"use_sliding_window": True, "layer_types": [FULL, SLIDING, FULL]}
    assert windows(ModelConfig.from_hf(typed)) == [None, 64, None]


def test_mistral_with_types_of_layers() -> None:
    """As Ministral has them, which transformers makes of such a Mistral; null: all slide."""
    mistral = LLAMA | {"model_type": "mistral", "sliding_window": 64}
    typed = mistral | {"layer_types": [FULL, SLIDING, SLIDING]}
    assert windows(ModelConfig.from_hf(typed)) == [None, 64, 64]
    assert windows(ModelConfig.from_hf(mistral | {"layer_types": None})) == [64] * 3
    silent = {key: value for key, value in typed.items() if key != "sliding_window"}
    assert windows(ModelConfig.from_hf(silent)) == [None, 4096, 4096]
    full = {"layer_types": [FULL] * 3, "sliding_window": None}
    assert windows(ModelConfig.from_hf(mistral | full)) == [None] * 3
    for wrong, named in (
        ({"sliding_window": None}, "sliding layers without sliding_window"),
        ({"layer_types": [FULL]}, "layer_types"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            ModelConfig.from_hf(typed | wrong)


def test_llama_has_no_types_of_layers() -> None:
    assert windows(ModelConfig.from_hf(LLAMA | {"layer_types": [SLIDING] * 3})) == [None] * 3


@pytest.mark.parametrize(
    ("family", "of_queries", "of_output", "of_mlp"),
    [
        ("llama", True, True, True),
        ("mistral", False, False, False),
        ("qwen2", True, False, False),
        ("qwen3", True, True, False),
        ("gemma2", True, True, False),
        ("gemma3_text", True, True, False),
    ],
)
def test_biases_are_those_that_the_family_has(
    family: str, of_queries: bool, of_output: bool, of_mlp: bool
) -> None:
    """Whatever its config says: transformers reads these keys in some families alone."""
    said = {"model_type": family, "attention_bias": True, "mlp_bias": True}
    config = ModelConfig.from_hf(GEMMA | said)
    biases = (config.qkv_bias, config.output_bias, config.mlp_bias)
    assert biases == (of_queries, of_output, of_mlp)
    silent = ModelConfig.from_hf(GEMMA | {"model_type": family})
    biases = (silent.qkv_bias, silent.output_bias, silent.mlp_bias)
    assert biases == (family == "qwen2", False, False)


def test_keys_that_say_the_usual() -> None:
    want = ModelConfig.from_hf(LLAMA | {"rope_scaling": LINEAR})
    for is_causal in (True, None):
        said = LLAMA | {"rope_scaling": LINEAR, "is_causal": is_causal}
        assert ModelConfig.from_hf(said) == want
    for partial in (1, 1.0, None):
        whole = LINEAR | {"partial_rotary_factor": partial}
        assert ModelConfig.from_hf(LLAMA | {"rope_scaling": whole}) == want
        said = LLAMA | {"rope_scaling": LINEAR, "partial_rotary_factor": partial}
        assert ModelConfig.from_hf(said) == want


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        (LINEAR, LINEAR),
        (LINEAR | {"rope_theta": 1e5}, LINEAR),
        (LINEAR, {"type": "linear", "factor": 4}),
        ({"rope_theta": 1e5}, LINEAR),
        ({"partial_rotary_factor": None}, LINEAR),
        ({"rope_theta": 1e5}, LINEAR | {"rope_theta": 1e5}),
    ],
)
def test_both_spellings_of_one_rope(parameters: dict[str, Any], scaling: dict[str, Any]) -> None:
    config = ModelConfig.from_hf(LLAMA | {"rope_parameters": parameters, "rope_scaling": scaling})
    assert config.layers[0].rope == RopeConfig(1e5, RopeType.LINEAR, 4.0)


@pytest.mark.parametrize(
    ("parameters", "scaling", "key"),
    [
        ({"rope_type": "default"}, LINEAR, "rope_type"),
        (LINEAR, {"rope_type": "default"}, "rope_type"),
        (LINEAR, LINEAR | {"factor": 8.0}, "factor"),
        (LINEAR, {"type": "linear"}, "factor"),
        ({"rope_theta": 5e5}, LINEAR, "rope_theta"),
        ({"rope_theta": 1e5}, LINEAR | {"rope_theta": 5e5}, "rope_theta"),
    ],
)
def test_two_ropes_in_one_config_are_refused(
    parameters: dict[str, Any], scaling: dict[str, Any], key: str
) -> None:
    """Of which transformers 5 would take the second one, all of it."""
    both = LLAMA | {"rope_parameters": parameters, "rope_scaling": scaling}
    with pytest.raises(ConfigurationError, match=f"rope_parameters and rope_scaling .* {key}"):
        ModelConfig.from_hf(both)


def test_two_ropes_of_one_type_of_layers_are_refused() -> None:
    """Transformers puts the one for all into that of full layers."""
    full, sliding = {"rope_theta": 1e6}, {"rope_theta": 1e4}
    gemma = GEMMA | {"rope_parameters": {FULL: full | LINEAR, SLIDING: sliding}}
    same = ModelConfig.from_hf(gemma | {"rope_scaling": LINEAR})
    assert same == ModelConfig.from_hf(gemma)
    assert same.layers[5].rope == RopeConfig(1e6, RopeType.LINEAR, 4.0)
    bare = GEMMA | {"rope_parameters": {FULL: full, SLIDING: sliding}}
    for wrong in (bare | {"rope_scaling": LINEAR}, gemma | {"rope_scaling": {"factor": 8.0}}):
        with pytest.raises(ConfigurationError, match="rope_parameters and rope_scaling"):
            ModelConfig.from_hf(wrong)


def test_layers_before_the_window_in_any_spelling() -> None:
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}
    for silent in (qwen, qwen | {"max_window_layers": None}):
        assert windows(ModelConfig.from_hf(silent)) == [None] * 3  # the first 28
    assert windows(ModelConfig.from_hf(qwen | {"max_window_layers": 0})) == [64] * 3
    for wrong in ("all", -1, True, 1.5):
        with pytest.raises(ConfigurationError, match="max_window_layers"):
            ModelConfig.from_hf(qwen | {"max_window_layers": wrong})


def test_the_text_part_of_a_model_with_images() -> None:
    """As the 4B folder has it: what transformers takes anyway is not written down."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}
    config = ModelConfig.from_hf(whole | {"vision_config": {"hidden_size": 1152}})
    assert config.is_text_part
    assert config.model_type == "gemma3_text"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_position) == (262208, 131072)
    assert (config.hidden_size, config.num_layers) == (2560, 34)
    assert config.tied_embeddings
    assert config.checkpoint_dtype == "bfloat16"
    assert windows(config)[:6] == [1024] * 5 + [None]
    assert config.layers[5].rope == RopeConfig(1_000_000.0, RopeType.LINEAR, 8.0)
    assert config.layers[0].rope == RopeConfig(10_000.0)
    for wrong, named in (
        (whole | {"text_config": None}, "text_config"),
        (whole | {"text_config": text | {"model_type": "mamba"}}, "mamba"),
        (whole | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (whole | {"text_config": text | {"is_causal": False}}, "is_causal"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            ModelConfig.from_hf(wrong)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "None"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": YARN | {"factor": 1e300}}, "factor=1e.300"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "truncate"),
        ({"rope_scaling": YARN | {"beta_fast": 1}}, "beta_fast=1"),
        ({"rope_scaling": YARN | {"attention_factor": -1}}, "attention_factor"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "original_max"),
        ({"rope_scaling": YARN | {"beta_fast": 1e308}}, r"beta_fast=1e\+308"),
        ({"rope_scaling": YARN | {"beta_slow": 1e-308}}, "beta_slow=1e-308"),
        ({"rope_scaling": YARN | {"factor": 1e-308}}, "factor=1e-308"),
        ({"rope_scaling": YARN | {"attention_factor": 1e39}}, "attention_factor=1e"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta"),
        ({"rope_scaling": LINEAR | {"factor": 1e-39}}, "factor=1e-39"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor=1.0 is not above"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 8}}, "above low_freq_factor=8.0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "relu"}, "relu"),
        ({"num_key_value_heads": 2}, "9 heads"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"hidden_size": 64}, "head_dim=7"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 0.5}, "hidden_size"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"hidden_size": math.nan}, "hidden_size"),
        ({"hidden_size": math.inf}, "hidden_size"),
        ({"hidden_size": -576}, "hidden_size"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_theta": 1e-308}, "rope_theta=1e-308"),
        ({"rope_parameters": {"rope_theta": math.nan}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"final_logit_softcapping": math.nan}, "final_logit_softcapping"),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping"),
        ({"final_logit_softcapping": "high"}, "final_logit_softcapping"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not .* of llama"),
        ({"is_causal": False}, "is_causal=False"),
        ({"is_causal": 0}, "is_causal=0"),
    ],
)
def test_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        ModelConfig.from_hf(LLAMA | change)


def test_refused_layer_types() -> None:
    wrong: tuple[object, ...] = ([FULL], ["linear_attention"] * 7, 7, [[]] * 7)
    for kinds in wrong:
        with pytest.raises(ConfigurationError, match="layer_types"):
            ModelConfig.from_hf(GEMMA | {"layer_types": kinds})


def test_from_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    path = tmp_path / "config.json"
    for broken in ("{", "[]"):
        path.write_text(broken)
        with pytest.raises(ConfigurationError):
            ModelConfig.from_folder(tmp_path)
    path.write_text(json.dumps(LLAMA))
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_hf(LLAMA)
