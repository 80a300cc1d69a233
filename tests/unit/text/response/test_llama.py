"""Calls as Llamas write them: JSON with or without marks, and Python."""

import json
import time

import pytest

from diptych.text.response.body import ParsedCall
from diptych.text.response.families import AnswerForm, family
from diptych.text.response.parser import Parsed
from tests.unit.text.response.parsing import F1, parse, parse_in_pieces

F = '{"name": "f", "parameters": {"x": 1}}'
G = '{"name": "g", "parameters": {}}'
CALL_G = ParsedCall("g", "{}")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{F}\n{G}", "", (*F1, CALL_G)),
        (f"{F} {G}\n\n{F}", "", (*F1, CALL_G, *F1)),
        (f"{F}{G}", "", (*F1, CALL_G)),
        (f"{F}; {G}", "", (*F1, CALL_G)),
        (f"{F}<|eom_id|>", "", F1),
        (f"{F}\nDone.", "Done.", F1),
        (f"[{F}]", "", F1),
        (f"\n[\n  {F},\n  {G}\n]\n", "", (*F1, CALL_G)),
        (f"[{F}] so", "so", F1),
        (f"<|python_tag|>[{F}, {G}]", "", (*F1, CALL_G)),
        (f"<|python_tag|>{F}\n<|python_tag|>{G}", "", (*F1, CALL_G)),
        # No calls of tools that there are.
        ('[{"name": "me", "parameters": {}}]', '[{"name": "me", "parameters": {}}]', ()),
        (f'[{F}, {{"name": "me"}}]', f'[{F}, {{"name": "me"}}]', ()),
        ('[{"a": 1}] is it', '[{"a": 1}] is it', ()),
        ("[1, 2]", "[1, 2]", ()),
        (f"So: [{F}", f"So: [{F}", ()),
        ('{"a": 1}\n{"name": "me"}', '{"a": 1}\n{"name": "me"}', ()),
        (f'{F}\n{{"a": 1}}', '{"a": 1}', F1),
    ],
)
def test_calls_may_be_a_list_or_lines(
    text: str, content: str, calls: tuple[ParsedCall, ...]
) -> None:
    assert parse_in_pieces(family("llama-json"), text) == Parsed(content, "", calls)


def test_a_list_that_was_cut_off_is_a_text() -> None:
    """Without a mark it may be anything."""
    text = f"[{F}, "
    assert parse(family("llama-json"), [text], is_whole=False) == Parsed(text)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (AnswerForm.HERMES, '<tool_call>\n{"name": "g"}\n</tool_call>'),
        (AnswerForm.HERMES, '<tool_call>{"name": "g", "arguments": null}</tool_call>'),
        (AnswerForm.LLAMA_JSON, '<|python_tag|>{"name": "g"}'),
        (AnswerForm.MISTRAL, '[TOOL_CALLS][{"name": "g"}]'),
    ],
)
def test_a_marked_call_of_an_offered_tool_may_have_no_arguments(
    form: AnswerForm, text: str
) -> None:
    assert parse_in_pieces(family(form.value), text) == Parsed("", "", (CALL_G,))
    unknown = text.replace('"g"', '"me"')
    parsed = parse_in_pieces(family(form.value), unknown)
    assert parsed.calls == ()
    assert '"me"' in parsed.content


@pytest.mark.parametrize("text", ['{"name": "g"}', '[{"name": "g"}, {"name": "f"}]'])
def test_names_alone_are_no_calls_where_nothing_marks_them(text: str) -> None:
    """They may tell which tools there are."""
    assert parse_in_pieces(family("llama-json"), text) == Parsed(text)


def python_call(value: str) -> str:
    return f"[f(s={value}, x=1)]"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (repr("a'\"\\\n\tb]é)" * 20_000), "a'\"\\\n\tb]é)" * 20_000),
        (json.dumps("it's\n" * 40_000), "it's\n" * 40_000),
        ('"""' + "a\n'b" * 30_000 + '"""', "a\n'b" * 30_000),
        ("'" + "x" * 90_000 + "' 'y' \"z\"", "x" * 90_000 + "yz"),
        ("r'" + "\\d" * 50_000 + "'", "\\d" * 50_000),
        ("u'a'", "a"),
        ("''", ""),
        ("'0'", "0"),
    ],
)
def test_a_python_call_may_have_a_long_text(value: str, said: str) -> None:
    text = python_call(value)
    parsed = parse_in_pieces(family("llama-pythonic"), text, sizes=(999, 1_000_000))
    (call,) = parsed.calls
    assert json.loads(call.arguments) == {"s": said, "x": 1}
    assert parsed.content == ""


def test_texts_of_a_python_call_stay_where_they_are() -> None:
    text = "[f(s={'k': ['a', 'b' 'c', {'d': ''}], 'e': -1.5, 'f': None}), g(x='0', y='1;')]"
    f, g = parse(family("llama-pythonic"), [text]).calls
    assert json.loads(f.arguments)["s"] == {"k": ["a", "bc", {"d": ""}], "e": -1.5, "f": None}
    assert json.loads(g.arguments) == {"x": "0", "y": "1;"}


@pytest.mark.parametrize(
    "text",
    [
        "[f(s=b'" + "x" * 70_000 + "')]",
        "[f(s=f'" + "x" * 70_000 + "')]",
        "[f(s=f'{x}')]",
        "[f(s='" + "x\n" * 40_000 + "')]",
        "[f(s=[" + "1," * 50_000 + "])]",
        "[f(s=['a'" + ",'a'" * 50_000 + "])]",
        "[f(s=" + "-" * 100_000 + "1)]",
        "[f(s=" + "'a' + " * 20_000 + "'a')]",
        "[f(s='\\x')]",
        "[f(s=f'0;')]",
        "[(x if'0;0;'else y)(s='a')]",
        "[(x if'9;'else y)(s='a')]",
        "[f(s='a\rb')]",
        "[f(s='" + "\\x" * 40_000 + "')]",
        "[f(s='" + "'" * 100_001 + ")]",
    ],
)
def test_python_that_is_long_and_no_call_stays_content_and_costs_little(text: str) -> None:
    begun_s = time.thread_time()
    assert parse(family("llama-pythonic"), [text]) == Parsed(text)
    assert time.thread_time() - begun_s < 1
