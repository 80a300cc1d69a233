"""The headers that gpt-oss writes before what it thinks, says and calls."""

from typing import Any

import pytest

from diptych.text.response.body import ParsedCall
from diptych.text.response.families import family
from diptych.text.response.parser import Parsed
from tests.unit.text.response.parsing import F1, parse_in_pieces

START = "<|start|>assistant"
HM = f"<|channel|>analysis<|message|>hm<|end|>{START}"
ONE = '{"x": 1}'
TOOLS: dict[str, dict[str, Any]] = {"f": {}, "browse.open": {}}


def read(text: str, *, is_whole: bool = True) -> Parsed:
    return parse_in_pieces(
        family("gpt-oss"), text, prompt=START, tools=TOOLS, is_whole=is_whole, sizes=(1, 5, 10_000)
    )


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>final<|constrain|>json<|message|>",
        "<|channel|>final <|constrain|> application/json <|message|>",
        "<|channel|>final json<|message|>",
        "<|channel|>commentary<|constrain|>json<|message|>",
        "<|channel|>commentary code<|message|>",
        "<|channel|>commentary to=assistant<|channel|>final<|message|>",
        " to=user<|channel|>final json<|message|>",
        " to=python<|channel|>final<|message|>",
    ],
)
def test_a_content_may_have_a_type(header: str) -> None:
    for end in ("", "<|return|>", "<|end|>"):
        assert read(f"{HM}{header}{ONE}{end}") == Parsed(ONE, "hm")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>analysis code<|message|>",
        "<|channel|>analysis <|constrain|>text<|message|>",
        "<|channel|>commentary to=assistant<|channel|>analysis<|message|>",
        " to=assistant<|channel|>analysis<|message|>",
    ],
)
def test_thoughts_may_have_a_type(header: str) -> None:
    text = f"{header}hm<|end|>{START}<|channel|>final<|message|>ok"
    assert read(text) == Parsed("ok", "hm")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f code<|message|>",
        "<|channel|>commentary to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>analysis to=functions.f<|channel|>commentary json<|message|>",
        " to=functions.f<|channel|>commentary code<|message|>",
        " to=functions.f json<|message|>",
        "<|channel|>commentary to=f <|constrain|>json<|message|>",
        "<|channel|>analysis to=f code<|message|>",
        "<|channel|>commentary to=f<|channel|>commentary json<|message|>",
        " to=f<|channel|>commentary json<|message|>",
    ],
)
def test_a_call_may_have_a_type_and_no_namespace(header: str) -> None:
    assert read(f"{HM}{header}{ONE}<|call|>") == Parsed("", "hm", F1)
    assert read(f"{HM}{header}{ONE}") == Parsed("", "hm", F1)
    assert read(f'{HM}{header}{{"x"', is_whole=False) == Parsed("", "hm")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=python code<|message|>",
        "<|channel|>commentary to=python<|channel|>commentary code<|message|>",
        " to=browser.open<|channel|>analysis json<|message|>",
        "<|channel|>analysis to=g json<|message|>",
    ],
)
def test_what_is_for_no_tool_of_the_clients_is_for_nobody(header: str) -> None:
    text = f"{HM}{header}print(1)<|call|>{START}<|channel|>commentary to=browse.open json"
    call = ParsedCall("browse.open", ONE)
    assert read(f"{text}<|message|>{ONE}<|call|>") == Parsed("", "hm", (call,))


def test_half_a_header_does_not_show_where_an_answer_was_cut_off() -> None:
    for header in (
        "<|start|>assistant<|channel|>final <|constrain|>json",
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json",
        "<|start|>assistant to=functions.f<|channel|>commentary json",
    ):
        marks = ("<|start|>", "<|channel|>", "<|constrain|>")
        for end in range(len(header) + 1):
            if any(header[:end].endswith(mark) for mark in marks) or end == len(header):
                text = f"<|channel|>final<|message|>ok<|end|>{header[:end]}"
                assert read(text, is_whole=False) == Parsed("ok")
