"""Tiny tokenizers of both kinds, and the GGUF twin of a tiny model folder."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from diptych.text.tokenizer import Tokenizer

SAMPLES = (
    "Hello world, hello moon: 1234567 stars at 12:30!",
    "tabs\tand\nnewlines\n\n\n  and   runs    of spaces  \n ",
    "Größe, naïve café, smørrebrød, Ελληνικά, русский язык",
    "漢字と仮名、中文字符。한국어 문장",
    "emoji 😀😃👩‍👩‍👧‍👦 🇫🇷 𐌰𐌱 ﬁ ①②③ ½",
    "don't we'll I'M it's 'quoted' x=1; y+=2 != 3 <tag> </tag> {}[]()",
    "  leading and trailing  ",
    "aaaa aaaaaa ------ ====== ........ \u00a0\u3000\u200b end",
    "",
    " ",
)
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
SPECIAL = ("<s>", "</s>")


def byte_level_tokenizer() -> HFTokenizer:
    """Every byte, some merges, two special tokens and an added plain one with a space."""
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    tokenizer.add_tokens([AddedToken("added token", normalized=False)])
    return tokenizer


def sentencepiece_tokenizer(*, strips_space: bool = False) -> HFTokenizer:
    """Bytes, some letters and words, with byte fallback; as the GGUF import builds them."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdehlnorstw😀漢é", "▁h", "he", "ll", "▁hello", "▁world"]
    tokenizer = HFTokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("▁", "h"), ("h", "e"), ("l", "l")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if strips_space else steps
    )
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    return tokenizer


def write_folder(folder: Path, tokenizer: HFTokenizer, **settings: object) -> Tokenizer:
    """A model folder as far as text goes; ``settings`` are of tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    content = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(content | settings))
    return Tokenizer.from_folder(folder)


def write_gguf(
    folder: Path,
    target: Path,
    *,
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: Sequence[tuple[str, str]] = (),
    extra_tensors: Sequence[tuple[str, NDArray[np.float32]]] = (),
    extra_numbers: Sequence[tuple[str, float]] = (),
    extra_flags: Sequence[tuple[str, bool]] = (),
) -> None:
    """Write the Llama or Gemma 3 model in ``folder`` as llama.cpp's converter does.

    ``matrix_type`` is how matrices are stored; ``extra`` adds or replaces
    metadata strings, ``extra_numbers`` adds numbers, ``extra_flags`` booleans.
    """
    config = json.loads((folder / "config.json").read_text())
    name = {"llama": "llama", "gemma3_text": "gemma3"}[config["model_type"]]
    writer = gguf.GGUFWriter(target, dict(extra).get("general.architecture", name))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if name == "llama":
        writer.add_rope_freq_base(config["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for key, number in extra_numbers:
        writer.add_float32(key, number)
    for key, flag in extra_flags:
        writer.add_bool(key, flag)
    _add_tokenizer(writer, folder, dict(extra))
    for hf_name, tensor in load_file(folder / "model.safetensors").items():
        gguf_name = _gguf_name(hf_name, name)
        if name == "llama" and ("q_proj" in hf_name or "k_proj" in hf_name):
            tensor = _adjacent_pairs(tensor, heads if "q_proj" in hf_name else kv_heads)
        if name == "gemma3" and hf_name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        if tensor.ndim == 2:
            data = gguf.quants.quantize(tensor, matrix_type)
            writer.add_tensor(gguf_name, data, raw_dtype=matrix_type)
        else:
            writer.add_tensor(gguf_name, tensor)
    for extra_name, tensor in extra_tensors:
        writer.add_tensor(extra_name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, extra: dict[str, str]) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"] | {t["content"]: t["id"] for t in content["added_tokens"]}
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    tokens = sorted(vocab, key=lambda token: int(vocab[token]))
    writer.add_tokenizer_model(extra.get("tokenizer.ggml.model", "gpt2"))
    writer.add_tokenizer_pre(extra.get("tokenizer.ggml.pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(vocab["<bos>"])
    writer.add_eos_token_id(vocab["<eos>"])
    writer.add_add_bos_token("<bos>" in json.dumps(content["post_processor"]))


def _adjacent_pairs(tensor: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """llama.cpp's order of a rotary projection's rows."""
    halves = tensor.reshape(num_heads, 2, -1, tensor.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def _gguf_name(hf_name: str, architecture: str) -> str:
    result = _name_map(architecture).get_name(hf_name, try_suffixes=(".weight", ".bias"))
    assert result is not None, hf_name
    return str(result)


@cache
def _name_map(architecture: str) -> gguf.TensorNameMap:
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "gemma3": gguf.MODEL_ARCH.GEMMA3}[architecture]
    return gguf.get_tensor_name_map(arch, 8)
