"""How each family's rule cuts text into words, by examples."""

import pytest

from diptych.errors import ConfigurationError
from diptych.models.gguf_import.pre_tokenizer import build, rule_of

_TEXT = "I'LL pay 12345.67€ for  it,\n\n don't\tyou?"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "gpt-2",
            "I|'|LL| pay| 12345|.|67|€| for| | it|,|\n\n| don|'t|\t|you|?",
        ),
        (
            "smollm",
            "I|'|LL| pay| |1|2|3|4|5|.|6|7|€| for| | it|,|\n\n| don|'t|\t|you|?",
        ),
        (
            "llama-bpe",
            "I|'LL| pay| |123|45|.|67|€| for| | it|,\n\n| don|'t|\tyou|?",
        ),
        (
            "qwen2",
            "I|'LL| pay| |1|2|3|4|5|.|6|7|€| for| | it|,\n\n| don|'t|\tyou|?",
        ),
        (
            "default",
            "I|'|LL| pay| |123|45|.|67|€| for| | it|,|\n\n| don|'|t|\t|you|?",
        ),
    ],
)
def test_words(name: str, words: str) -> None:
    pieces = build(rule_of(name)).pre_tokenize_str(_TEXT)
    got, reached = [], 0
    for _, (start, end) in pieces:
        assert start == reached
        got.append(_TEXT[start:end])
        reached = end
    assert "|".join(got) == words


def test_unknown_rules_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="'tomorrow-bpe' is not supported"):
        rule_of("tomorrow-bpe")
