"""config.json and generation_config.json of the imported folder."""

import json
import struct
from pathlib import Path
from typing import Any

from diptych.errors import ConfigurationError
from diptych.models.gguf_import.gguf_file import GGUFFile
from diptych.models.gguf_import.rope import DIVISORS_TENSOR, llama3_scaling
from diptych.models.gguf_import.tensors import dequantized
from diptych.models.gguf_import.vocabulary import token_id

# llama.cpp fixes these for gemma3 where the file does not say.
_GEMMA3_LOCAL_ROPE_THETA = 10_000.0
_GEMMA3_WINDOW_PATTERN = 6
_GEMMA3_LAYERS_OF_27B = 62

# Tokens that end a turn in known chat formats. Most files name only one end
# token; these are added when the file's own chat template uses them.
_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>"})


def write_config(file: GGUFFile, architecture_name: str, folder: Path) -> None:
    """Write ``config.json`` and ``generation_config.json`` under ``folder``.

    Raises:
        ConfigurationError: the file uses a variation that cannot be expressed.
    """
    specific = {"llama": _llama, "gemma3": _gemma3}[architecture_name](file)
    _dump(folder / "config.json", _shared(file, architecture_name) | specific | _token_ids(file))
    generation = _token_ids(file)
    generation["eos_token_id"] = eos_token_ids(file)
    _dump(folder / "generation_config.json", generation)


def eos_token_ids(file: GGUFFile) -> list[int]:
    """All tokens that end an answer, the file's own end token first."""
    ids = [
        token_id(file, role)
        for role in ("eos", "eot", "eom")
        if f"tokenizer.ggml.{role}_token_id" in file.metadata
    ]
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        tokens = file.strings("tokenizer.ggml.tokens")
        ids += [tokens.index(text) for text in _END_OF_TURN if text in template and text in tokens]
    return ids[:1] + sorted(set(ids[1:]) - set(ids[:1]))


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    result = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if f"tokenizer.ggml.{theirs}_token_id" in file.metadata:
            result[f"{ours}_token_id"] = token_id(file, theirs)
    return result


def _shared(file: GGUFFile, architecture_name: str) -> dict[str, Any]:
    prefix = f"{architecture_name}."
    if file.metadata.get(f"{prefix}expert_count"):
        raise ConfigurationError(f"{file.path}: mixture of experts is not supported in GGUF")
    if file.metadata.get(f"{prefix}attention.causal", True) is not True:
        raise ConfigurationError(
            f"{file.path}: {prefix}attention.causal is false, which is not supported: "
            "a token attends to itself and those before it alone"
        )
    shapes = {info.name: info.shape for info in file.tensors}
    if "token_embd.weight" not in shapes:
        raise ConfigurationError(f"{file.path}: tensor 'token_embd.weight' is missing")
    num_heads = file.count(f"{prefix}attention.head_count")
    hidden_size = file.integer(f"{prefix}embedding_length")
    rope_dim = file.integer(f"{prefix}rope.dimension_count", hidden_size // num_heads)
    head_dim = file.integer(f"{prefix}attention.key_length", rope_dim)
    if file.integer(f"{prefix}rope.dimension_count", head_dim) != head_dim:
        raise ConfigurationError(f"{file.path}: rotary embedding of part of a head")
    if file.integer(f"{prefix}attention.value_length", head_dim) != head_dim:
        raise ConfigurationError(f"{file.path}: keys and values of different size")
    config: dict[str, Any] = {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": file.integer(f"{prefix}feed_forward_length"),
        "num_hidden_layers": _num_layers(file, prefix),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.count(f"{prefix}attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.integer(f"{prefix}context_length"),
        "rms_norm_eps": _shortest(file.number(f"{prefix}attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": "float32",
    }
    scaling = _rope_scaling(file, prefix)
    return config if scaling is None else {**config, "rope_scaling": scaling}


def _num_layers(file: GGUFFile, prefix: str) -> int:
    """Each has tensors: a file that says more would have lists made that have no end."""
    num_layers = file.integer(f"{prefix}block_count")
    if num_layers > len(file.tensors):
        raise ConfigurationError(
            f"{file.path}: metadata '{prefix}block_count' says {num_layers} layers, and there are "
            f"{len(file.tensors)} tensors"
        )
    return num_layers


def _rope_scaling(file: GGUFFile, prefix: str) -> dict[str, Any] | None:
    """None: positions are rotated as they are. Files from before the type was told have a factor
    alone, in the oldest under another name; it is linear then, as llama.cpp takes it.
    """
    oldest = file.number(f"{prefix}rope.scale_linear", 0.0)
    factor = _shortest(file.number(f"{prefix}rope.scaling.factor", oldest))
    is_scaled = factor not in (0.0, 1.0)
    kind = file.string(f"{prefix}rope.scaling.type", "linear" if is_scaled else "none")
    if kind not in ("none", "linear"):
        raise ConfigurationError(f"{file.path}: rope scaling {kind!r} is not supported")
    if file.number(f"{prefix}rope.scaling.attn_factor", 1.0) != 1.0:
        raise ConfigurationError(f"{file.path}: rope.scaling.attn_factor is not supported")
    return {"rope_type": "linear", "factor": factor} if is_scaled and kind == "linear" else None


def _llama(file: GGUFFile) -> dict[str, Any]:
    if file.metadata.get("llama.attention.sliding_window"):
        raise ConfigurationError(f"{file.path}: sliding windows are not supported in llama")
    theta = _shortest(file.number("llama.rope.freq_base", 10_000.0))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_theta": theta,
        "attention_bias": any(info.name.endswith("attn_q.bias") for info in file.tensors),
        "mlp_bias": any(info.name.endswith("ffn_up.bias") for info in file.tensors),
    }
    for info in file.tensors:
        if info.name == DIVISORS_TENSOR:
            config["rope_scaling"] = llama3_scaling(dequantized(file, info), theta)
    return config


def _gemma3(file: GGUFFile) -> dict[str, Any]:
    num_layers = _num_layers(file, "gemma3.")
    num_heads = file.count("gemma3.attention.head_count")
    scalar = file.integer("gemma3.attention.key_length")
    if num_layers == _GEMMA3_LAYERS_OF_27B:
        scalar = file.integer("gemma3.embedding_length") // num_heads
    pattern = file.count("gemma3.attention.sliding_window_pattern", _GEMMA3_WINDOW_PATTERN)
    local_theta = file.number("gemma3.rope.freq_base_swa", _GEMMA3_LOCAL_ROPE_THETA)
    soft_cap = file.metadata.get("gemma3.final_logit_softcapping")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": file.integer("gemma3.attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (index + 1) % pattern else "full_attention"
            for index in range(num_layers)
        ],
        "rope_theta": _shortest(file.number("gemma3.rope.freq_base", 1_000_000.0)),
        "rope_local_base_freq": _shortest(local_theta),
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": soft_cap,
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    wanted = struct.pack("f", value)
    for digits in range(1, 10):
        rounded = float(f"{value:.{digits}g}")
        if struct.pack("f", rounded) == wanted:
            return rounded
    return value


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
