"""What a checkpoint may declare of its answers, and how families are known."""

from typing import Any

import pytest

from diptych.errors import ConfigurationError
from diptych.text.response.body import ParsedCall
from diptych.text.response.families import AnswerForm, family, family_of
from diptych.text.response.parser import Parsed, ResponseParser
from diptych.text.response.template import ResponseTemplate

# In the words of a checkpoint: as Hugging Face's documentation of the format has them.
DECLARED: dict[str, Any] = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<a>",
    "fields": {
        "thinking": {"open": "<t>", "close": "</t>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<c>(?P<name>\w+)",
            "close": ["</c>", "</call>"],
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "="},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close_pattern": r"\s*<e>$", "content": "text"},
        "citations": {"open": "<q>", "close": "</q>"},
    },
}


def _with_quotes(said: object) -> dict[str, Any]:
    return {"fields": {"tool_calls": {"content": "json", "content_args": {"string_delims": said}}}}


def test_what_a_checkpoint_declares_is_followed() -> None:
    tools = {"f": {"properties": {"n": {"type": ["integer", "null"]}, "s": {"type": "string"}}}}
    parser = ResponseParser(ResponseTemplate.read(DECLARED), "x<a><t>", tools)
    parsed = parser.feed("why</t>so <q>it</q>\n <c>f\nn=1\ns=2\n</call><e>")
    assert parsed == Parsed("so <q>it</q>", "why", (ParsedCall("f", '{"n": 1, "s": "2"}'),))
    assert parser.finish(is_whole=True) == Parsed()


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"version": 2}, "version"),
        ({"field": {}}, "field"),
        ({"fields": []}, "fields"),
        ({"fields": {"content": 5}}, "fields.content"),
        ({"fields": {"content": {"content": "yaml"}}}, "fields.content.content"),
        ({"fields": {"content": {"open": ""}}}, "fields.content.open"),
        ({"fields": {"content": {"open": ["a", 1]}}}, "fields.content.open"),
        ({"fields": {"content": {"open_pattern": "("}}}, "fields.content.open_pattern"),
        ({"fields": {"content": {"content": ["text"]}}}, "fields.content.content"),
        ({"fields": {"tool_calls": {"content": "xml-inline"}}}, "tag_pattern"),
        (_with_quotes("<q>"), "fields.tool_calls.content_args.string_delims"),
        (_with_quotes(["<q>"]), "fields.tool_calls.content_args.string_delims"),
        (_with_quotes([["<q>", ""]]), "fields.tool_calls.content_args.string_delims"),
        ({"call_ids": "long"}, "call_ids"),
        ({"start_anchor_pattern": "(", "start_anchor": None}, "start_anchor_pattern"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigurationError, match=place):
        ResponseTemplate.read({**DECLARED, **change})


@pytest.mark.parametrize("form", sorted(set(AnswerForm) - {AnswerForm.AUTO, AnswerForm.NONE}))
def test_each_family_can_be_read(form: AnswerForm) -> None:
    assert family(form.value).fields


@pytest.mark.parametrize(
    ("chat_template", "form"),
    [
        ("{{ '<tool_call>' }} <think>", AnswerForm.HERMES),
        ("<tool_call>\n<function=", AnswerForm.QWEN_XML),
        ("<tool_call>{{ name }}<arg_key> <think>", AnswerForm.GLM),
        ("<think> <|tool_calls_section_begin|>", AnswerForm.KIMI_K2),
        ("<|open|>think<|sep|> <|close|>", AnswerForm.KIMI_K3),
        ("[TOOL_CALLS]", AnswerForm.MISTRAL),
        ("<|tool_call>call:", AnswerForm.GEMMA4),
        ("<|start|><|channel|><|message|>", AnswerForm.GPT_OSS),
        ("<｜tool▁calls▁begin｜>", AnswerForm.DEEPSEEK),
        ("<|start_header_id|> {% if tools %}", AnswerForm.LLAMA_JSON),
        ("<|header_start|><|python_start|>", AnswerForm.LLAMA_PYTHONIC),
        ("<think>", AnswerForm.THINK),
    ],
)
def test_a_family_is_known_by_its_chat_template(chat_template: str, form: AnswerForm) -> None:
    assert family_of(chat_template) is family(form.value)


def test_what_stands_within_calls_is_a_mark_too() -> None:
    """If it is a special token, it is shown to the parser."""
    for mark in ("<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"):
        assert mark in family("glm").marks


def test_of_others_nothing_is_known() -> None:
    assert family_of("<turn>{{ message.content }}") is None
