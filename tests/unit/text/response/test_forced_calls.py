"""Calls that a client insists on: what their grammar admits is read."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from diptych.text.chat_template import Tool
from diptych.text.grammar_check import check
from diptych.text.response.body import ParsedCall
from diptych.text.response.forced_calls import FORCED_CALLS, forced_calls
from diptych.text.response.parser import Parsed, ResponseParser
from tests.unit.text.response.parsing import F1, TOOLS, parse


def test_forced_calls_come_one_by_one() -> None:
    parser = ResponseParser(FORCED_CALLS, "", TOOLS)
    assert parser.feed('[{"name": "f", "arguments": {"x": 1}}').calls == F1
    assert parser.feed(', {"name": "g", "arguments": {}').calls == ()
    assert parser.finish(is_whole=False) == Parsed()


@pytest.mark.parametrize("size", [1, 100])
def test_detail_6_of_calls_that_were_cut_off_nothing_is_content(size: int) -> None:
    """The brackets and commas around them are not the model's words either."""
    text = '[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]'
    for end in range(1, len(text) + 1):
        parser = ResponseParser(FORCED_CALLS, "", TOOLS)
        said = [parser.feed(text[at : min(at + size, end)]) for at in range(0, end, size)]
        said.append(parser.finish(is_whole=False))
        assert "".join(each.content for each in said) == "", text[:end]
        assert sum(len(each.calls) for each in said) == text[:end].count("}}"), text[:end]


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1, "a": 1}',
        '{"a": {"b": 1, "b": 2}}',
        f'{{"a": {"1" * 5000}}}',
        '{"a": 1e999}',
        '{"a": "\\ud800 \\"}"}',
        f'{{"a": {"[" * 5000}{"]" * 5000}}}',
        "{}",
    ],
)
def test_what_a_grammar_admits_is_a_call(arguments: str) -> None:
    text = f'[{{"name": "f", "arguments": {arguments}}}, {{"name": "g", "arguments": {{}}}}]'
    assert parse(FORCED_CALLS, [text]) == Parsed(
        "", "", (ParsedCall("f", arguments), ParsedCall("g", "{}"))
    )


@pytest.mark.parametrize(
    "arguments", ['{"a": NaN}', '{"a" 1}', '{"a": [}]}', "5", '{"a": 1}, "b": {}']
)
def test_what_no_grammar_admits_is_no_call(arguments: str) -> None:
    text = f'[{{"name": "f", "arguments": {arguments}}}]'
    assert parse(FORCED_CALLS, [text]).calls == ()


@pytest.mark.parametrize(
    ("parameters", "fits"), [(None, False), ({}, True), ({"type": "object"}, True)]
)
def test_a_tool_without_parameters_is_called_with_nothing(
    parameters: dict[str, object] | None, fits: bool
) -> None:
    forced = forced_calls([Tool("g", parameters=parameters)], is_parallel=False)
    for arguments, is_admitted in (("{}", True), ('{"x": 1}', fits)):
        text = f'[{{"name": "g", "arguments": {arguments}}}]'.encode()
        told = check(forced.kind.value, list(forced.texts), text)
        assert (told["num_fitting"] == len(text)) is is_admitted, told


SPACE = st.text(" \n", max_size=8)
TEXTS = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"]), max_size=5)
STRINGS = TEXTS.map(lambda each: json.dumps(each, ensure_ascii=False)) | st.just('"}, {"')
NUMBERS = st.integers().map(str) | st.sampled_from(["1e999", "-0.5E-7", "1" * 5000])
VALUES = st.recursive(
    STRINGS | NUMBERS | st.sampled_from(["true", "false", "null", "[]", "{}"]),
    lambda each: (
        st.builds("[{}{},{}{}]".format, SPACE, each, SPACE, each)
        | st.builds('{{{}"a":{}{},"a": {}{}}}'.format, SPACE, SPACE, each, each, SPACE)
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=40)
@given(values=st.lists(VALUES, min_size=1, max_size=3), size=st.integers(1, 50))
def test_all_that_the_grammar_of_forced_calls_admits_is_read(values: list[str], size: int) -> None:
    each = [f'{{"x": {value}, "y": {value}}}' for value in values]
    text = "[" + ", ".join(f'{{"name": "g", "arguments": {one}}}' for one in each) + "]"
    forced = forced_calls([Tool("g", parameters={})], is_parallel=True)
    size_bytes = len(text.encode())
    fits = check(forced.kind.value, list(forced.texts), text.encode())["num_fitting"]
    assume(fits == size_bytes)  # there are characters that it wants to be escaped
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert parse(FORCED_CALLS, pieces).calls == tuple(ParsedCall("g", one) for one in each)
