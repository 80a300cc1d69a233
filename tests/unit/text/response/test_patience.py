"""How much work an answer makes, whatever a model says."""

import tracemalloc
from dataclasses import replace
from itertools import count
from typing import Any, cast

import pytest

from diptych.text.response.answer_or_calls import AnswerOrCalls
from diptych.text.response.body import ParsedCall
from diptych.text.response.families import AnswerForm, family
from diptych.text.response.forced_calls import FORCED_CALLS
from diptych.text.response.parser import Parsed, ResponseParser, joined
from diptych.text.response.patience import Patience
from diptych.text.response.template import Anchor, ResponseTemplate
from diptych.text.response.thoughts import AnswerParser
from tests.unit.text.response.parsing import F1, TOOLS, parse


def test_a_pattern_that_takes_for_ever_is_given_up() -> None:
    slow = ResponseTemplate.read(
        {"fields": {"content": {}, "reasoning_content": {"open_pattern": "(a|a)*(b|b)*(a|aa)+!"}}}
    )
    text = "a" * 5000
    assert parse(slow, [text, "b"], patience=Patience(0.02)) == Parsed(text + "b")


def test_what_takes_too_long_is_content_from_there_on() -> None:
    """The clock goes on by a second with each look at it: the first search costs all."""
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    assert parse(family("hermes"), [call], patience=Patience(1000, count().__next__)).calls == F1
    at_end = Patience(10, count().__next__)
    assert parse(family("hermes"), ["a", call, call], patience=at_end).content.endswith(call)
    for most_s in range(40):
        parsed = parse(family("hermes"), [call[:-12]], patience=Patience(most_s, count().__next__))
        assert parsed in (Parsed(call[:-12]), Parsed("", "", parsed.calls))


class Counted:
    """A pattern that counts the characters that it is asked to look through."""

    looked_at = 0

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern

    def search(self, text: str, begin: int, **options: Any) -> Any:
        Counted.looked_at += len(text) - begin
        return self._pattern.search(text, begin, **options)


def counted(anchor: Anchor | None) -> Anchor | None:
    return anchor and replace(anchor, pattern=cast(Any, Counted(anchor.pattern)))


def slowly(piece: str, head: str = "") -> list[str]:
    return [head, *[piece] * 2000]


@pytest.mark.parametrize(
    ("form", "pieces"),
    [
        (AnswerForm.LLAMA_JSON, slowly(" " * 64)),
        (AnswerForm.LLAMA_PYTHONIC, slowly("\n" * 64)),
        (AnswerForm.LLAMA_PYTHONIC, slowly("a.b" * 20, "[")),
        (AnswerForm.GPT_OSS, slowly(" " * 64)),
        (AnswerForm.GPT_OSS, slowly("aaaa" * 16, "<|channel|>analysis to=")),
        (AnswerForm.GPT_OSS, slowly("aaaa" * 16, "to=functions.")),
        (AnswerForm.GPT_OSS, slowly("aaaa" * 16, " to=")),
        (AnswerForm.GPT_OSS, slowly(" " * 64, "<|channel|>final ")),
        (AnswerForm.LLAMA_JSON, slowly("}" + " " * 63)),
        (AnswerForm.MISTRAL, slowly("aaaa" * 16, "[TOOL_CALLS]")),
        (AnswerForm.MISTRAL, slowly(" " * 64, "[TOOL_CALLS]")),
        (AnswerForm.QWEN_XML, slowly("aaaa" * 16, "<function=")),
        (AnswerForm.QWEN_XML, slowly(" " * 64, "<tool_call>")),
        (AnswerForm.QWEN_XML, slowly(" " * 64, "<function=f></function>")),
        (AnswerForm.QWEN_XML, slowly(" " * 64, "<function=f>\n<parameter=s>\n</function>")),
        (AnswerForm.GEMMA4, slowly("aaaa" * 16, "<|tool_call>call:")),
        (AnswerForm.DEEPSEEK, slowly("aaaa" * 16, "<｜tool▁call▁begin｜>")),
        (AnswerForm.DEEPSEEK, slowly(" " * 64, '<｜DSML｜invoke name="f"')),
        (AnswerForm.GLM, slowly("aaaa" * 16, "<tool_call>")),
        (AnswerForm.GLM, slowly(" " * 64, "<tool_call>f<arg_key>")),
        (
            AnswerForm.GLM,
            slowly(" " * 64, "<tool_call>f<arg_key>a</arg_key><arg_value></arg_value>"),
        ),
        (AnswerForm.KIMI_K2, slowly("aaaa" * 16, "<|tool_calls_section_begin|>")),
        (AnswerForm.KIMI_K2, slowly(" " * 64, "<|tool_call_begin|>")),
        (AnswerForm.KIMI_K3, slowly("aaaa" * 16, "<|open|>")),
        (AnswerForm.HERMES, ["<tool_call>{</tool_call>" * 4000]),
        (AnswerForm.HERMES, slowly("</tool_call>", '<tool_call>{"')),
    ],
)
def test_what_is_to_be_looked_through_again_is_bounded(form: AnswerForm, pieces: list[str]) -> None:
    """By so much for each piece or mark, and not by all that came before it."""
    whole = family(form.value)
    fields = [
        replace(each, open=counted(each.open), close=counted(each.close)) for each in whole.fields
    ]
    Counted.looked_at = 0
    parse(replace(whole, fields=tuple(fields)), pieces, patience=Patience(1000))
    num_steps = max(len(pieces), 4000)  # a mark is one too
    assert Counted.looked_at < num_steps * len(fields) * 2 * 512


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (AnswerForm.QWEN_XML, "<function=f>\n<parameter=s>" + " " * 60_000 + "x</parameter>y\n"),
        (AnswerForm.GEMMA4, "<|tool_call>call:f{a" + " " * 60_000 + '"}<tool_call|>'),
        (AnswerForm.GLM, "<tool_call>f<arg_key>s</arg_key><arg_value>" + " </arg_value>" * 5_000),
        (
            AnswerForm.KIMI_K3,
            '<|open|>call tool="f"<|sep|><|open|>argument key="s" type="string"<|sep|>'
            + "<|close|>argument<|sep|> " * 2_000
            + "<|close|>call<|sep|>",
        ),
    ],
)
def test_what_is_within_a_call_costs_little(form: AnswerForm, text: str) -> None:
    """As much as ten seconds of it would be bounded by, before they end."""
    patience = Patience(10)
    parse(family(form.value), [text + "</function>\n</tool_call>"], patience=patience)
    patience.begin_piece()
    assert patience.left_s() > 8


def answer_or_calls() -> AnswerParser:
    template = family("hermes")
    return AnswerOrCalls(template.calls_begin, ResponseParser(template, "", TOOLS))


@pytest.mark.parametrize(
    ("parser", "begin", "end", "parsed"),
    [
        (answer_or_calls(), "", "{}", None),
        (answer_or_calls(), "", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', F1),
        (ResponseParser(family("think")), "a", "b", None),
        (ResponseParser(family("hermes"), "", TOOLS), '<tool_call>{"name": "g", "x": "', "b", None),
        (ResponseParser(FORCED_CALLS, "", TOOLS), '[{"name": "g", "arguments": {"x": "', "b", None),
    ],
)
def test_a_token_costs_its_own_text_however_much_was_kept_before_it(
    parser: AnswerParser, begin: str, end: str, parsed: tuple[ParsedCall, ...] | None
) -> None:
    """Nothing of a long run of white space is certain, nor of a call that has not ended."""
    space, num_tokens = " " * 128, 4000
    said = [parser.feed(begin)]
    tracemalloc.start()
    said += [parser.feed(space) for _ in range(num_tokens)]
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    said.append(parser.feed(space))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most - kept < len(space) * num_tokens // 8, "a copy of what was kept"
    said += [parser.feed(end), parser.finish(is_whole=True)]
    told = joined(said)
    if parsed is None:
        assert told == Parsed(begin + space * (num_tokens + 1) + end)
    else:
        assert told == Parsed(calls=parsed)
