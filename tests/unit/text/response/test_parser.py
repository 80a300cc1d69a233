"""Answers of each family, whole and in pieces, and what models say when they go wrong."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.text.response import parser as parser_module
from diptych.text.response.families import AnswerForm, family
from diptych.text.response.forced_calls import FORCED_CALLS
from diptych.text.response.parser import Parsed, ResponseParser
from diptych.text.response.template import ResponseTemplate

TOOLS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}},
    "g": {},
}


class Example(NamedTuple):
    form: AnswerForm
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    prompt: str = ""


F1 = (("f", '{"x": 1}'),)
F1_G = (("f", '{"x": 1}'), ("g", "{}"))
EXAMPLES = [
    Example(
        AnswerForm.HERMES,
        '<think>\nhm\n</think>\n\nSure.\n<tool_call>\n{"name": "f", "arguments": {"x":  1}}\n'
        '</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>\n',
        content="Sure.",
        reasoning="hm",
        calls=(("f", '{"x":  1}'), ("g", "{}")),
    ),
    # A mark between a call's quotes is none, nor is half a mark in the text.
    Example(
        AnswerForm.HERMES,
        'a <tool b <tool_call>{"name": "f", "arguments": {"s": "</tool_call>\\"{"}}</tool_call> c',
        content="a <tool b  c",
        calls=(("f", '{"s": "</tool_call>\\"{"}'),),
    ),
    # The prompt has begun the answer.
    Example(
        AnswerForm.HERMES,
        "why\n</think>\n\nso",
        content="so",
        reasoning="why",
        prompt="x<think>y<|im_start|>assistant\n<think>\n",
    ),
    Example(
        AnswerForm.HERMES,
        "so <think",
        content="so <think",
        prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    Example(
        AnswerForm.QWEN_XML,
        "hm</think>ok<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\n 2"
        "\n\n</parameter>\n</function>\n</tool_call>",
        content="ok",
        reasoning="hm",
        calls=(("f", '{"x": 1, "s": " 2\\n"}'),),
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    Example(
        AnswerForm.LLAMA_JSON,
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        calls=F1_G,
    ),
    Example(
        AnswerForm.LLAMA_JSON,
        '{"name": "me", "parameters": {}}',
        '{"name": "me", "parameters": {}}',
    ),
    Example(AnswerForm.LLAMA_JSON, '{"a": 1} is it', content='{"a": 1} is it'),
    Example(AnswerForm.LLAMA_PYTHONIC, "[f(x=1), g()]", calls=F1_G),
    Example(AnswerForm.LLAMA_PYTHONIC, "[f(x=open('a'))]", content="[f(x=open('a'))]"),
    Example(
        AnswerForm.MISTRAL,
        '[THINK]hm[/THINK]Hi[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        content="Hi",
        reasoning="hm",
        calls=F1_G,
    ),
    Example(
        AnswerForm.MISTRAL,
        '[TOOL_CALLS] [{"arguments": {"x": 1}, "name": "f"}, {"name": "g", "arguments": {}}]',
        calls=F1_G,
    ),
    Example(
        AnswerForm.GEMMA4,
        '<|channel>thought\nhm\n<channel|>ok<|tool_call>call:f{x:1,s:<|"|>a}"<tool_call|><|"|>}'
        "<tool_call|>",
        content="ok",
        reasoning="hm",
        calls=(("f", '{"x":1,"s":"a}\\"<tool_call|>"}'),),
    ),
    Example(
        AnswerForm.GPT_OSS,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>ok<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>"
        'json<|message|>{"x": 1}<|call|><|start|>assistant to=functions.g<|channel|>commentary'
        "<|constrain|>json<|message|>{}",
        content="ok",
        reasoning="hm",
        calls=F1_G,
    ),
    Example(
        AnswerForm.DEEPSEEK,
        "hm</think>ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"x": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        content="ok",
        reasoning="hm",
        calls=F1_G,
        prompt="<｜Assistant｜><think>\n",
    ),
    Example(
        AnswerForm.DEEPSEEK,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="s" string="true">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        calls=(("f", '{"s": "1", "x": 1}'),),
    ),
    Example(AnswerForm.DEEPSEEK, '<｜DSML｜invoke name="g"/>\n', calls=(("g", "{}"),)),
    Example(AnswerForm.THINK, "<think>a</think>b", content="b", reasoning="a"),
    Example(AnswerForm.THINK, " b \n", content=" b \n"),
]


def parse(
    template: ResponseTemplate,
    pieces: Sequence[str],
    *,
    prompt: str = "",
    is_whole: bool = True,
    tools: dict[str, dict[str, Any]] | None = TOOLS,
) -> Parsed:
    parser = ResponseParser(template, prompt, tools)
    parts = [*map(parser.feed, pieces), parser.finish(is_whole=is_whole)]
    return Parsed(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.calls),
    )


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[begin:end] for begin, end in pairwise(at)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: f"{each.form}-{each.text[:24]!r}")
def test_an_answer_is_taken_apart(example: Example) -> None:
    expected = Parsed(example.content, example.reasoning, example.calls)  # type: ignore[arg-type]
    template = family(example.form.value)
    assert parse(template, [example.text], prompt=example.prompt) == expected
    assert parse(template, list(example.text), prompt=example.prompt) == expected


@settings(deadline=None)
@given(
    example=st.sampled_from(EXAMPLES), places=st.lists(st.integers(0, 1000)), whole=st.booleans()
)
def test_detail_9_any_cuts_say_the_same(example: Example, places: list[int], whole: bool) -> None:
    """Also of an answer that was cut off anywhere."""
    template, text = family(example.form.value), example.text
    if not whole and places:
        text = text[: places[0] % (len(text) + 1)]
    at_once = parse(template, [text], prompt=example.prompt, is_whole=whole)
    assert parse(template, cut(text, places), prompt=example.prompt, is_whole=whole) == at_once


MARKS = sorted({*"{}[]\"'\\, \n:=()x1", *(word for each in EXAMPLES for word in each.text.split())})


@settings(deadline=None)
@given(
    form=st.sampled_from(sorted({each.form for each in EXAMPLES})),
    words=st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=30),
    places=st.lists(st.integers(0, 1000), max_size=8),
)
def test_garbage_raises_nothing_and_calls_have_objects(
    form: AnswerForm, words: list[str], places: list[int]
) -> None:
    text = "".join(words)
    parsed = parse(family(form.value), cut(text, places))
    assert parsed == parse(family(form.value), [text])
    for call in parsed.calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no json</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1, "x": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[[["}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": "',
    ],
)
def test_what_cannot_be_read_stays_content(text: str) -> None:
    assert parse(family("hermes"), [text]) == Parsed(text)


@pytest.mark.parametrize(
    "text",
    [
        "[f(x=b'a')]",
        "[f(x={(1, 2): 3})]",
        "[f(x={1, 2})]",
        "[f(x=1e999)]",
        "[f(x=...)]",
        "[f(*a)]",
        "[f(**a)]",
        "[f(x=1)(y=2), 5]",
        "[f(x=" + "(" * 50_000 + ")]",
    ],
)
def test_python_that_is_no_call_stays_content(text: str) -> None:
    assert parse(family("llama-pythonic"), [text]) == Parsed(text)


def test_half_of_a_character_in_an_argument_is_no_call() -> None:
    text = '<tool_call>\n<function=g>\n<parameter=x>\n["\\ud800"]\n</parameter>\n</function>\n'
    parsed = parse(family("qwen-xml"), [text + "</tool_call>"])
    assert parsed.calls == ()


def test_detail_6_a_call_that_was_cut_off_is_none() -> None:
    text = 'ok <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n'
    assert parse(family("hermes"), list(text), is_whole=False) == Parsed("ok")
    assert parse(family("hermes"), [text]).calls == F1  # it ended without the last mark
    bare = '{"name": "f", "parameters": {"x"'
    assert parse(family("llama-json"), [bare], is_whole=False) == Parsed(bare)


def test_without_tools_only_reasoning_is_told_apart() -> None:
    text = '<think>a</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(family("hermes"), [text], tools=None) == Parsed(text[16:], "a")
    json_text = '{"name": "f", "arguments": {}}'
    assert parse(family("llama-json"), [json_text], tools=None) == Parsed(json_text)


def test_text_comes_as_soon_as_it_is_no_mark() -> None:
    parser = ResponseParser(family("hermes"), "", TOOLS)
    assert parser.feed("a b") == Parsed("a b")
    assert parser.feed(" <too") == Parsed()
    assert parser.feed("l>") == Parsed(" <tool>")
    assert parser.feed("<think>c") == Parsed("", "c")
    assert parser.is_reasoning


def test_a_long_answer_keeps_little() -> None:
    parser = ResponseParser(family("hermes"), "", TOOLS)
    for _ in range(1000):
        assert parser.feed("word " * 10).content
    assert len(parser._buffer) < 10_000
    assert parser.feed('<tool_call>{"name": "g", "arguments": {}}</tool_call>').calls == (
        ("g", "{}"),
    )


def test_a_pattern_that_takes_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_module, "PATIENCE_S", 0.02)
    slow = ResponseTemplate.read(
        {"fields": {"content": {}, "reasoning_content": {"open_pattern": "(a|a)*(b|b)*(a|aa)+!"}}}
    )
    text = "a" * 5000
    assert parse(slow, [text, "b"]) == Parsed(text + "b")


def test_forced_calls_come_one_by_one() -> None:
    parser = ResponseParser(FORCED_CALLS, "", TOOLS)
    assert parser.feed('[{"name": "f", "arguments": {"x": 1}}').calls == F1
    assert parser.feed(', {"name": "g", "arguments": {}').calls == ()
    assert parser.finish(is_whole=False) == Parsed()
