"""A random model folder of a few hundred kilobytes, in the format of the real ones.

Tests and chaos runs need a model that loads in milliseconds, whose greedy text
varies and whose logits are not near ties. Knows file formats, not the engine;
numpy only, so a process without torch may write one.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}

GEMMAS = ("gemma2", "gemma3")

_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<turn>", "<end>")  # ids 0 to 4
_BOS_ID, _EOS_ID, _END_ID = 1, 2, 4

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<turn>{{ message['role'] }}\n{{ message['content'] }}<end>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def write_tiny_model(
    folder: Path | str,
    family: str = "llama",
    *,
    seed: int = 0,
    vocab_size: int = 512,
    num_layers: int | None = None,
    max_position: int = 640,
    sliding_window: int = 32,
    name: str | None = None,
    shape: Mapping[str, object] = MappingProxyType({}),
) -> Path:
    """Write a random Hugging Face folder and return its path.

    The same arguments write the same bytes. ``<eos>`` (2) and ``<end>`` (4) end
    a sequence; the Gemma tokenizer puts ``<bos>`` (1) first, the others do not.

    Args:
        folder: created if missing; files in it are overwritten.
        family: llama, mistral, qwen2, qwen3, gemma2 or gemma3.
        seed: of the weights.
        num_layers: default 2; Gemma 3 has 3 (two sliding layers, one full).
        sliding_window: of Gemma's sliding and Mistral's layers, in tokens.
        name: stored as the config's ``_name_or_path``; default ``tiny-<family>``.
        shape: entries of the config to have instead, sizes of tensors included.

    Raises:
        ValueError: unknown family.
    """
    if family not in ARCHITECTURES:
        raise ValueError(f"unknown family {family!r}, have {sorted(ARCHITECTURES)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    num_layers = num_layers or (3 if family == "gemma3" else 2)
    config = _config(family, vocab_size, num_layers, max_position, sliding_window)
    config |= {"_name_or_path": name or f"tiny-{family}", **shape}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": [_EOS_ID, _END_ID]})
    save_file(
        dict(_tensors(config, np.random.default_rng(seed))),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write_tokenizer(folder, vocab_size, max_position, add_bos=family in GEMMAS)
    return folder


def _config(
    family: str, vocab_size: int, num_layers: int, max_position: int, sliding_window: int
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": "gemma3_text" if family == "gemma3" else family,
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if family in {*GEMMAS, "qwen3"} else 16,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": family in GEMMAS,
        "torch_dtype": "float32",
        "bos_token_id": _BOS_ID,
        "eos_token_id": [_EOS_ID, _END_ID],
        "pad_token_id": 0,
    }
    if family == "gemma3":
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24,
            "sliding_window": sliding_window,
            "layer_types": [
                "full_attention" if index % 3 == 2 else "sliding_attention"
                for index in range(num_layers)
            ],
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        }
    elif family == "gemma2":
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24,
            "sliding_window": sliding_window,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 8.0,
        }
    else:
        config["hidden_act"] = "silu"
    if family == "mistral":
        config["sliding_window"] = sliding_window
    return config


def _tensors(
    config: dict[str, Any], rng: np.random.Generator
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Weights scaled so that attention is not flat and logits spread by about 3."""
    gemma = config["model_type"] in {"gemma2", "gemma3_text"}
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int, gain: float) -> NDArray[np.float32]:
        scale = gain / float(columns) ** 0.5
        values = rng.standard_normal((rows, columns))
        result: NDArray[np.float32] = np.multiply(values, scale, dtype=np.float32)
        return result

    def norm(size: int, scale: float = 1.0) -> NDArray[np.float32]:
        weight = scale * (1 + 0.1 * rng.standard_normal(size))
        result: NDArray[np.float32] = np.subtract(weight, 1 if gemma else 0, dtype=np.float32)
        return result

    yield "model.embed_tokens.weight", matrix(config["vocab_size"], hidden, 2.5 if gemma else 8.0)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", matrix(config["vocab_size"], hidden, 3.0)
    yield "model.norm.weight", norm(hidden)
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        yield attention + "q_proj.weight", matrix(q_size, hidden, 1.5)
        yield attention + "k_proj.weight", matrix(kv_size, hidden, 1.5)
        yield attention + "v_proj.weight", matrix(kv_size, hidden, 1.5)
        yield attention + "o_proj.weight", matrix(hidden, q_size, 3.0)
        if config["model_type"] == "qwen2":
            for part, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
                yield attention + f"{part}_proj.bias", matrix(1, size, 0.3 * size**0.5)[0]
        if config["model_type"] in {"gemma3_text", "qwen3"}:
            yield attention + "q_norm.weight", norm(head_dim, 1.5)
            yield attention + "k_norm.weight", norm(head_dim, 1.5)
        yield prefix + "mlp.gate_proj.weight", matrix(inner, hidden, 1.5)
        yield prefix + "mlp.up_proj.weight", matrix(inner, hidden, 1.5)
        yield prefix + "mlp.down_proj.weight", matrix(hidden, inner, 3.0)
        yield prefix + "input_layernorm.weight", norm(hidden)
        # Gemma norms a sublayer's output; large, or its tied embedding would echo the last token.
        yield prefix + "post_attention_layernorm.weight", norm(hidden, 8.0 if gemma else 1.0)
        if gemma:
            yield prefix + "pre_feedforward_layernorm.weight", norm(hidden)
            yield prefix + "post_feedforward_layernorm.weight", norm(hidden, 8.0)


def _corpus() -> Iterable[str]:
    """Sentences enough for a few hundred merges, the same on every machine."""
    things = ("river", "engine", "letter", "garden", "number", "window", "teacher", "question")
    kinds = ("small", "bright", "quiet", "distant", "careful", "ordinary", "wonderful", "green")
    verbs = ("carries", "answers", "remembers", "opens", "follows", "measures", "watches", "builds")
    for i, thing in enumerate(things):
        for j, kind in enumerate(kinds):
            verb, other = verbs[(i + j) % 8], things[(i * 3 + j) % 8]
            yield f"The {kind} {thing} {verb} another {other}, and then it stops.\n"
            yield f"What is the capital of France? In {1900 + 8 * i + j} the {thing} was {kind}.\n"
            yield f"{other.title()} and {thing.title()} were {kind}er friends: {verb[:-1]}ing it.\n"


def _write_tokenizer(folder: Path, vocab_size: int, max_position: int, *, add_bos: bool) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", _BOS_ID)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "chat_template": ("<bos>" if add_bos else "") + _CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_position,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
