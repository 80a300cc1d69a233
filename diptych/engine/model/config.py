"""What a checkpoint's ``config.json`` says about its decoder, and nothing inferred.

Reads the spellings of transformers 4 and 5. Whatever would change the result and
is not understood here is refused by name. Immutable; no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.engine.model.config_reader import ConfigReader
from diptych.engine.model.families import FAMILIES, TEXT_TYPES
from diptych.engine.model.kv_groups import KVGroup, group_layers, refuse_other_kinds
from diptych.engine.model.layer_config import Activation, LayerConfig
from diptych.engine.model.stored_format import Storage, read_storage
from diptych.errors import ConfigurationError
from diptych.json_file import read_object
from diptych.text.context_length import context_length
from diptych.text.silent_counts import with_silent_counts

# Keys that switch on mathematics this decoder does not have; fine when falsy.
_UNSUPPORTED_SWITCHES = (
    "use_bidirectional_attention",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "num_experts",
    "num_local_experts",
)
# What a config of text and images says of all its parts, where the text part is silent.
_SHARED_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The decoder's shape and variations."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # longest sequence in tokens
    rms_norm_eps: float
    activation: Activation
    tied_embeddings: bool
    embedding_scale: float  # of looked-up embeddings, rounded to the weights' dtype
    attention_scale: float  # of query-key products
    score_softcap: float | None  # scaled products come no further from zero, by a tanh
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    norm_offset: float  # added to every norm's weight
    post_norms: bool  # norms after attention and feed-forward as well
    logit_softcap: float | None
    layers: tuple[LayerConfig, ...]
    checkpoint_dtype: str  # element type of the stored weights, float32 if unsaid
    storage: Storage | None  # linear layers are stored so; None: all weights are of that type
    is_text_part: bool  # the checkpoint has other parts as well, such as a vision tower

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """All layers, by what they keep of the past; in their order within a KV block."""
        windows = [layer.sliding_window for layer in self.layers]
        return group_layers(windows, self.num_kv_heads, self.head_dim)

    @classmethod
    def from_folder(cls, folder: Path | str) -> "ModelConfig":
        """Read ``config.json`` in ``folder``.

        Raises:
            ConfigurationError: missing, malformed, or a model we do not have.
        """
        return cls.from_hf(read_object(Path(folder) / "config.json"))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read the content of a Hugging Face ``config.json``.

        Raises:
            ConfigurationError: names the key and value it cannot follow.
        """
        is_text_part = str(config.get("model_type")) in TEXT_TYPES  # it may be anything
        if is_text_part:
            config = _text_part(config)
        refuse_other_kinds(config)
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            names = ", ".join(sorted({*FAMILIES, *TEXT_TYPES}))
            raise ConfigurationError(f"model_type {model_type!r} is not supported; have {names}")
        family = FAMILIES[model_type]
        for key in _UNSUPPORTED_SWITCHES:
            if config.get(key):
                raise ConfigurationError(f"config.json: {key}={config[key]!r} is not supported")
        if config.get("is_causal") not in (None, True):
            raise ConfigurationError(
                f"config.json: is_causal={config['is_causal']!r} is not supported: "
                "a token attends to itself and those before it alone"
            )
        config = with_silent_counts(config)
        reader = ConfigReader(config)
        layers = reader.layers(family)
        gemma = family.is_gemma
        num_heads = reader.count("num_attention_heads")
        num_kv_heads = reader.count("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ConfigurationError(
                f"config.json: {num_heads} heads cannot share {num_kv_heads} key-value heads"
            )
        hidden_size = reader.count("hidden_size")
        head_dim = reader.count("head_dim", family.head_dim or hidden_size // num_heads)
        if head_dim % 2:
            raise ConfigurationError(
                f"config.json: head_dim={head_dim} is odd, and dimensions are rotated in pairs"
            )
        attention_bias = family.heeds_attention_bias and bool(config.get("attention_bias"))
        scalar = reader.number("query_pre_attn_scalar", 256) if gemma else head_dim
        score_softcap = reader.softcap("attn_logit_softcapping", family.score_softcap)
        logit_softcap = reader.softcap("final_logit_softcapping", family.logit_softcap)
        for key, cap, is_known in (
            ("attn_logit_softcapping", score_softcap, family.score_softcap is not None),
            ("final_logit_softcapping", logit_softcap, gemma),
        ):
            if cap is not None and not is_known:
                raise ConfigurationError(
                    f"config.json: {key}={cap!r} is not supported of {model_type}"
                )
        return cls(
            model_type=model_type,
            vocab_size=reader.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.count("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=context_length(config, reader.max_position()),
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            activation=reader.activation(
                "hidden_activation" if gemma else "hidden_act",
                "gelu_pytorch_tanh" if gemma else "silu",
            ),
            tied_embeddings=bool(config.get("tie_word_embeddings", gemma)),
            embedding_scale=hidden_size**0.5 if gemma else 1.0,
            attention_scale=scalar**-0.5,
            score_softcap=score_softcap,
            qk_norm=family.qk_norm,
            qkv_bias=attention_bias or family.qkv_bias,
            output_bias=attention_bias,
            mlp_bias=family.heeds_mlp_bias and bool(config.get("mlp_bias")),
            norm_offset=1.0 if gemma else 0.0,
            post_norms=gemma,
            logit_softcap=logit_softcap,
            layers=layers,
            checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            storage=read_storage(config),
            is_text_part=is_text_part,
        )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of such a model, as a config of its own."""
    part = config.get("text_config")
    if not isinstance(part, Mapping):
        raise ConfigurationError(f"config.json: text_config must be an object, is {part!r}")
    shared = {key: config[key] for key in _SHARED_KEYS if key in config}
    return shared | {"model_type": TEXT_TYPES[config["model_type"]], **part}
