"""Answers of each family, whole and in pieces, and what models say when they go wrong."""

import json
from itertools import pairwise
from typing import NamedTuple, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.text.response import parser as parser_module
from diptych.text.response.body import ParsedCall
from diptych.text.response.families import AnswerForm, family
from diptych.text.response.parser import Parsed, ResponseParser
from diptych.text.response.template import Part
from tests.unit.text.response.parsing import F1, TOOLS, parse


class Example(NamedTuple):
    form: AnswerForm
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, ...], ...] = ()
    prompt: str = ""


F1_G = (*F1, ("g", "{}"))
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
    # Two calls in one wrapper, whose end is left out; what is behind them is said.
    Example(
        AnswerForm.QWEN_XML,
        "a\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n<function=g>"
        "\n</function>\nb",
        content="a\n\n\nb",
        calls=F1_G,
    ),
    Example(
        AnswerForm.LLAMA_JSON,
        '{"name": "f", "parameters": {"x": 1}}\n{"name": "g", "parameters": {}}\nso',
        content="so",
        calls=F1_G,
    ),
    Example(
        AnswerForm.LLAMA_JSON,
        '[{"name": "f", "parameters": {"x": 1}}, {"name": "g", "parameters": {}}]',
        calls=F1_G,
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
    # Types, a recipient twice, and a tool that is not said to be a function.
    Example(
        AnswerForm.GPT_OSS,
        "<|channel|>analysis code<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=f "
        'code<|message|>{"x": 1}<|call|><|start|>assistant<|channel|>commentary to=functions.g'
        "<|channel|>commentary json<|message|>{}<|call|><|start|>assistant<|channel|>commentary "
        "to=python code<|message|>no<|call|><|start|>assistant<|channel|>final <|constrain|>json"
        "<|message|>ok",
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
    # The last value of the second call has no end, and the first speaks of a call's.
    Example(
        AnswerForm.GLM,
        "\n<think>hm</think>\nok\n<tool_call>f\n<arg_key>s</arg_key>\n"
        "<arg_value>say </tool_call>; <arg_key> </arg_value>\n<arg_key>x</arg_key>\n"
        "<arg_value>1</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>"
        "<tool_call>f<arg_key>x</arg_key><arg_value>2</tool_call>",
        content="ok",
        reasoning="hm",
        calls=(
            ("f", '{"s": "say </tool_call>; <arg_key> ", "x": 1}'),
            ("g", "{}"),
            ("f", '{"x": 2}'),
        ),
    ),
    Example(AnswerForm.GLM, "Write <tool_call> so.", content="Write <tool_call> so."),
    Example(
        AnswerForm.KIMI_K2,
        "hm</think>ok<|tool_calls_section_begin|> well <|tool_call_begin|>functions.f:0 "
        '<|tool_call_argument_begin|>{"x":  1}<|tool_call_end|><|tool_call_begin|>g'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        content="ok",
        reasoning="hm",
        calls=(("f", '{"x":  1}', "functions.f:0"), ("g", "{}", "g")),
        prompt="<|im_assistant|>assistant<|im_middle|><think>",
    ),
    Example(
        AnswerForm.KIMI_K3,
        "hm<|close|>think<|sep|><|open|>response<|sep|>ok<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="s" type="string"<|sep|>'
        "<|close|>argument<|sep|> 1<|close|>argument<|sep|>"
        '<|open|>argument key="a&amp;b" type="null"<|sep|>null<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        content="ok",
        reasoning="hm",
        calls=(("f", '{"s": "<|close|>argument<|sep|> 1", "a&b": null}'), ("g", "{}")),
        prompt='<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
    ),
    Example(AnswerForm.THINK, "<think>a</think>b", content="b", reasoning="a"),
    Example(AnswerForm.THINK, " b \n", content=" b \n"),
]


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[begin:end] for begin, end in pairwise(at)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: f"{each.form}-{each.text[:24]!r}")
def test_an_answer_is_taken_apart(example: Example) -> None:
    calls = tuple(ParsedCall(*each) for each in example.calls)
    expected = Parsed(example.content, example.reasoning, calls)
    template = family(example.form.value)
    assert parse(template, [example.text], prompt=example.prompt) == expected
    assert parse(template, list(example.text), prompt=example.prompt) == expected


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (AnswerForm.GPT_OSS, "to=functions.f<|channel|>commentary <|constrain|>js"),
        (AnswerForm.GLM, "<tool_call>get_wea"),
        (AnswerForm.GLM, "<tool_call>f<arg_key>s</arg_key><arg_value>1</arg_value>"),
        (AnswerForm.KIMI_K2, "<|tool_calls_section_begin|><|tool_call_begin|>functions.f"),
        (AnswerForm.KIMI_K2, "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"),
        (AnswerForm.KIMI_K3, '<|open|>tools<|sep|><|open|>call tool="f'),
        (AnswerForm.KIMI_K3, '<|open|>call tool="f"<|sep|><|open|>argument key="s"'),
    ],
)
def test_detail_6_of_a_call_that_was_cut_off_nothing_shows(form: AnswerForm, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(family(form.value), ["ok", *pieces], is_whole=False) == Parsed("ok")


def test_the_last_of_a_prompt_may_be_the_whole_mark() -> None:
    prompt = "<｜Assistant｜><think>"
    assert parse(family("deepseek"), ["a</think>b"], prompt=prompt) == Parsed("b", "a")


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
        "[f(x={[1]: 2})]",
        "[f(x={{}})]",
        "[f(x=" + "(" * 50_000 + ")]",
    ],
)
def test_python_that_is_no_call_stays_content(text: str) -> None:
    assert parse(family("llama-pythonic"), [text]) == Parsed(text)


def test_half_of_a_character_in_an_argument_is_no_call() -> None:
    text = '<tool_call>\n<function=g>\n<parameter=x>\n["\\ud800"]\n</parameter>\n</function>\n'
    parsed = parse(family("qwen-xml"), [text + "</tool_call>"])
    assert parsed.calls == ()


def test_an_argument_that_is_given_twice_makes_no_call() -> None:
    """Nobody knows which of them the model meant."""
    given = "".join(f"<parameter=x>\n{value}\n</parameter>\n" for value in (1, 2))
    text = f"<tool_call>\n<function=f>\n{given}</function>\n</tool_call>"
    assert parse(family("qwen-xml"), [text]) == Parsed(text)


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
    thinking = ResponseParser(family("hermes"), "", TOOLS)
    assert thinking.feed("<think>c") == Parsed("", "c")
    assert thinking.opened is not None
    assert thinking.opened.part is Part.REASONING


def test_a_long_answer_keeps_little() -> None:
    parser = ResponseParser(family("hermes"), "", TOOLS)
    for _ in range(1000):
        assert parser.feed("word " * 10).content
    assert len(parser._buffer) < 10_000
    assert parser.feed('<tool_call>{"name": "g", "arguments": {}}</tool_call>').calls == (
        ParsedCall("g", "{}"),
    )


def test_text_that_is_no_call_is_not_lost_where_the_answer_was_cut_off() -> None:
    people = 'So:\n[{"name": "Ann", "age": 3}, {"name": "Bob", "bio": "a long'
    assert parse(family("llama-json"), [people], is_whole=False) == Parsed(people)
    prose = "Some write <tool_call> before a call, and"
    assert parse(family("hermes"), [prose], is_whole=False) == Parsed(prose)
    begun = 'Some write <tool_call>\n{"name'
    assert parse(family("hermes"), [begun], is_whole=False) == Parsed("Some write")


BROKEN = '<tool_call>{"name": "f", "arguments": {"s": "x}}</tool_call>'


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_quote_without_an_end_costs_one_call(size: int) -> None:
    good = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    text = f"{BROKEN}\nAgain: {good} so {BROKEN} or not"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    content = f"{BROKEN}\nAgain:  so {BROKEN} or not"
    assert parse(family("hermes"), pieces) == Parsed(content, calls=F1)
    far = BROKEN + " word" * 20_000 + good
    pieces = [far[at : at + 999] for at in range(0, len(far), 999)]
    assert parse(family("hermes"), pieces).calls == F1


@pytest.mark.parametrize("behind", ["", " so", "<tool"])
def test_a_quote_without_an_end_loses_nothing_of_an_answer_that_is_cut_off(behind: str) -> None:
    text = f"I do: {BROKEN}{behind}"
    assert parse(family("hermes"), list(text), is_whole=False) == Parsed(text)
    begun = '<tool_call>{"name": "f", "arguments": {"s": "a'
    for more in ("", '"', '</tool_call>"'):  # the last is a text that has such a mark
        assert parse(family("hermes"), list(begun + more), is_whole=False) == Parsed()


def test_marks_between_quotes_of_a_call_without_an_end_are_a_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}'
    assert parse(family("hermes"), list(text)).calls == (ParsedCall("f", '{"s": "</tool_call>"}'),)


def test_marks_between_quotes_are_a_text_however_many() -> None:
    arguments = '{"s": "<tool_call>{\\"name\\"}</tool_call> and <tool_call>a</tool_call>"}'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    for size in (1, 5, 10_000):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert parse(family("hermes"), pieces) == Parsed("", "", (ParsedCall("f", arguments),))


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (AnswerForm.QWEN_XML, "Write <tool_call> then </tool_call> around it."),
        (AnswerForm.MISTRAL, "It prints [TOOL_CALLS] first."),
        (AnswerForm.HERMES, "Use the <think> tag to think. Then answer 42."),
        (AnswerForm.DEEPSEEK, "Use the <think> tag. Then 42."),
        (AnswerForm.LLAMA_JSON, "So <|python_tag|> it"),
    ],
)
def test_what_an_answer_mentions_stays_without_tools(form: AnswerForm, text: str) -> None:
    assert parse(family(form.value), list(text), tools=None) == Parsed(text)


def test_an_answer_thinks_once() -> None:
    text = "<think>a</think>b <think>c</think>"
    assert parse(family("think"), [text]) == Parsed("b <think>c</think>", "a")
    prompt = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert parse(family("think"), [text], prompt=prompt) == Parsed(text)


def test_a_schema_of_true_and_false_is_read_around() -> None:
    tools = {"f": {"properties": {"x": {"anyOf": [True, {"type": "integer"}]}}}}
    text = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    assert parse(family("qwen-xml"), [text], tools=tools).calls == F1


def test_a_bug_in_reading_a_call_leaves_its_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> NoReturn:
        raise TypeError("no")

    monkeypatch.setattr(parser_module, "read_body", broken)
    text = "<tool_call>{}</tool_call>"
    assert parse(family("hermes"), [text]) == Parsed(text)
    assert "could not be read" in caplog.text


def test_a_user_cannot_begin_the_answer_with_another_familys_mark() -> None:
    prompt = "user [/INST]<think>\n<|start_of_role|>assistant<|end_of_role|>"
    assert parse(family("think"), ["4"], prompt=prompt) == Parsed("4")
    assert parse(family("hermes"), ["4"], prompt="[/INST]<think>\nassistant:") == Parsed("4")
