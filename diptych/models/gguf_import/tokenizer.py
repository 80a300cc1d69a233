"""tokenizer.json and tokenizer_config.json of the imported folder."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from diptych.errors import ConfigurationError
from diptych.models.gguf_import import pre_tokenizer, sentencepiece
from diptych.models.gguf_import.gguf_file import GGUFFile
from diptych.models.gguf_import.vocabulary import (
    TokenKind,
    Vocabulary,
    read_vocabulary,
    token_id,
)

_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def write_tokenizer(file: GGUFFile, max_model_len: int, folder: Path) -> None:
    """Write both files under ``folder``.

    Raises:
        ConfigurationError: the tokenizer is of a kind that is not supported.
    """
    vocabulary = read_vocabulary(file)
    model = file.string("tokenizer.ggml.model")
    if model == "gpt2":
        rule = pre_tokenizer.rule_of(file.string("tokenizer.ggml.pre", "default"))
        tokenizer = _build_byte_level(file, vocabulary, rule)
        add_bos = rule.add_bos
    elif model == "llama":
        tokenizer = sentencepiece.build_tokenizer(file, vocabulary)
        add_bos = True
    else:
        raise ConfigurationError(
            f"{file.path}: tokenizer.ggml.model {model!r} is not supported (gpt2 and llama are)"
        )
    add_bos = file.boolean("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = file.boolean("tokenizer.ggml.add_eos_token", False)
    roles = {
        role: vocabulary.tokens[token_id(file, key)]
        for role, key in _ROLES.items()
        if f"tokenizer.ggml.{key}_token_id" in file.metadata
    }
    _surround(
        tokenizer, roles.get("bos") if add_bos else None, roles.get("eos") if add_eos else None
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
    }
    config |= {f"{role}_token": text for role, text in roles.items()}
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.string("tokenizer.chat_template")
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _build_byte_level(
    file: GGUFFile, vocabulary: Vocabulary, rule: pre_tokenizer.PreTokenizerRule
) -> Tokenizer:
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    ids = vocabulary.ids()
    if any(not {left, right, left + right} <= ids.keys() for left, right in merges):
        raise ConfigurationError(f"{file.path}: a merge names a token that does not exist")
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=rule.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer.build(rule)
    tokenizer.decoder = decoders.ByteLevel()
    special = vocabulary.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    added = vocabulary.of_kind(TokenKind.USER_DEFINED)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return tokenizer


def _surround(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Let encoding with special tokens put ``bos`` before and ``eos`` after a text."""
    if bos is None and eos is None:
        return
    single = " ".join(part for part in (bos, "$A", eos) if part is not None)
    pair = single.replace("$A", "$A $B")
    special = [(text, tokenizer.token_to_id(text)) for text in (bos, eos) if text is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )
