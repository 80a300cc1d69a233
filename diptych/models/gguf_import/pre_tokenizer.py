"""How each ``tokenizer.ggml.pre`` splits text before byte-level BPE.

The value names the model family whose rule the vocabulary was trained with. A
wrong rule gives slightly wrong tokens without any error, so unknown names are
refused. The patterns are the families' own (as in their tokenizer.json files).
"""

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

from diptych.errors import ConfigurationError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

_EVERY_DIGIT = r"\p{N}"
# Of files that name no family: llama.cpp's own mixture.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


class PreTokenizerRule(NamedTuple):
    """Patterns applied one after another, each isolating its matches."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False  # unless the file says otherwise


_RULES = {
    "default": PreTokenizerRule(_DEFAULT),
    "gpt-2": PreTokenizerRule((_GPT2,)),
    "smollm": PreTokenizerRule((_EVERY_DIGIT, _GPT2)),
    "starcoder": PreTokenizerRule((_EVERY_DIGIT, _GPT2)),
    "llama-bpe": PreTokenizerRule((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama3": PreTokenizerRule((_LLAMA3,), ignore_merges=True, add_bos=True),
    "qwen2": PreTokenizerRule((_QWEN2,)),
}


def rule_of(name: str) -> PreTokenizerRule:
    """The rule called ``name``; raises ConfigurationError if it is not known."""
    if name not in _RULES:
        known = ", ".join(sorted(_RULES))
        raise ConfigurationError(
            f"tokenizer.ggml.pre {name!r} is not supported (known: {known}); "
            "use the model's Hugging Face folder"
        )
    return _RULES[name]


def build(rule: PreTokenizerRule) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of byte-level BPE under ``rule``."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_level])
