"""Calls in the place of an answer of a given form: what a grammar admits, and how it is read."""

import json
from pathlib import Path

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from diptych.text.grammar_check import check
from diptych.text.mark import Mark
from diptych.text.response.answer_or_calls import AnswerOrCalls
from diptych.text.response.body import ParsedCall
from diptych.text.response.families import AnswerForm, family
from diptych.text.response.parser import Parsed, ResponseParser, joined
from diptych.text.response.template import ResponseTemplate
from diptych.text.response.thoughts import ThoughtSplit
from diptych.text.thought_form import ThoughtForm
from tests.text_models import byte_level_tokenizer
from tests.unit.text.response.parsing import TOOLS
from tests.unit.text.response.test_parser import EXAMPLES, Example

MARK = Mark.of("<tool_call>", {})
THOUGHTS = ThoughtForm(open=Mark.of("<think>", {}), close=Mark.of("</think>", {}))
SCHEMA = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
F1 = (ParsedCall("f", '{"x": 1}'),)


def read(form: AnswerForm, pieces: list[str]) -> Parsed:
    template = family(form.value)
    parser = AnswerOrCalls(template.calls_begin, ResponseParser(template, "", TOOLS))
    return joined([*map(parser.feed, pieces), parser.finish(is_whole=True)])


@pytest.mark.parametrize("thoughts", [None, THOUGHTS])
def test_an_output_is_calls_or_what_fits(thoughts: ThoughtForm | None) -> None:
    lead = "" if thoughts is None else "<think>hm</think>\n"
    broken = CALL.encode() + b"\xff\xe2("  # a token may be part of a character
    for text, num_more in (
        (b'{"a": true}', 0), (CALL.encode(), 0), (b"\n\n" + broken, 0), (b"a", 1)
    ):  # fmt: skip
        output = lead.encode() + text
        said = check("json_schema", [SCHEMA], output, thoughts, [MARK])
        assert said["num_fitting"] == len(output) - num_more
    assert "problem" in check("json_schema", ["{"], b"", thoughts, [MARK])


def test_a_mark_that_is_a_token_is_that_token_and_whatever_comes_behind_it(tmp_path: Path) -> None:
    made = byte_level_tokenizer()
    made.add_tokens([AddedToken("<tool_call>", special=True, normalized=False)])
    ids = {token.content: number for number, token in made.get_added_tokens_decoder().items()}
    mark = Mark.of("<tool_call>", ids)
    grammar = check("choice", ["x"], b"", None, [mark])["grammar"]
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(made.to_str()), str(grammar), log_level=0)

    def allowed() -> set[int]:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())

    (x,) = made.encode("x").ids
    assert {ids["<tool_call>"], x} < allowed()
    assert all(made.decode([each]).strip(" \n") in ("x", "") for each in allowed())
    assert matcher.consume_token(ids["<tool_call>"])
    assert matcher.is_accepting(), "it ends as it likes"
    assert allowed() == set(range(made.get_vocab_size()))


@pytest.mark.parametrize(
    ("kind", "text"), [("regex", "(.|\n)+"), ("choice", "<tool_call>x"), ("regex", "<tool_call>")]
)
def test_an_answer_that_looks_like_calls_is_refused(kind: str, text: str) -> None:
    said = check(kind, [text], b"", None, [MARK])
    assert "it may begin with '<tool_call>', as this model's calls do" in str(said["problem"])
    assert "problem" not in check(kind, [f"x{text}"], b"", None, [MARK])


def test_calls_are_found_behind_what_an_answer_may_begin_with_too() -> None:
    """White space, which then is nobody's."""
    text = f"<think>hm</think>\n\n{CALL}"
    said = check("regex", [r"\n?b"], text.encode(), THOUGHTS, [MARK])
    assert (said["num_fitting"], said["has_gap"]) == (len(text), False)
    assert read(AnswerForm.HERMES, ["\n", "\n<tool_", CALL[6:]]) == Parsed("", "", F1)
    assert read(AnswerForm.HERMES, ["\n", "b"]) == Parsed("\nb")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: f"{each.form}-{each.text[:24]!r}")
def test_each_familys_calls_begin_with_its_mark(example: Example) -> None:
    marks = family(example.form.value).calls_begin
    calls = tuple(ParsedCall(*each) for each in example.calls)
    begins = [at for mark in marks if (at := example.text.find(mark)) >= 0]
    if calls and begins:
        assert read(example.form, [example.text[min(begins) :]]).calls == calls


def test_each_family_has_an_example_of_its_mark() -> None:
    for form in {example.form for example in EXAMPLES}:
        marks = family(form.value).calls_begin
        texts = [example.text for example in EXAMPLES if example.form is form and example.calls]
        assert not marks or any(mark in text for mark in marks for text in texts), form


def test_a_checkpoints_own_template_says_it_by_its_calls() -> None:
    def marks(**fields: object) -> tuple[str, ...]:
        return ResponseTemplate.read({"fields": fields}).calls_begin

    calls = [{"open": ["<a>", "<b>"], "close": "</a>"}, {"open": "<c>", "close": "</c>"}]
    assert marks(tool_calls=calls) == ("<a>", "<b>", "<c>")
    assert marks(tool_calls={"open_pattern": "<a>", "close": "</a>"}) == ()
    lead = [{"content": "text"}, {"open": "<answer>", "close": "</answer>"}]
    assert marks(tool_calls=calls, content=lead) == (), "answers have a mark themselves"
    declared = {"fields": {}, "calls_begin": "<x>"}
    assert ResponseTemplate.read(declared).calls_begin == ("<x>",)
    assert "<x>" in ResponseTemplate.read(declared).marks, "it is shown if it is special"


def test_families_say_what_begins_their_calls_where_a_mark_does() -> None:
    named = set(AnswerForm) - {AnswerForm.AUTO, AnswerForm.NONE}
    without = {form for form in named if not family(form.value).calls_begin}
    assert without == {"gpt-oss", "kimi-k3", "llama-json", "llama-pythonic", "think"}


@settings(deadline=None, max_examples=60)
@given(cuts=st.lists(st.integers(0, 99), max_size=6), answer=st.text("<tol_ca>{ }\n", max_size=20))
def test_any_cuts_say_the_same(cuts: list[int], answer: str) -> None:
    for text in (answer, CALL):
        at = sorted(cut % (len(text) + 1) for cut in cuts)
        pieces = [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]
        if text is CALL:
            assert read(AnswerForm.HERMES, pieces) == Parsed("", "", F1)
        elif not text.startswith("<tool_call>"):
            assert read(AnswerForm.HERMES, pieces) == Parsed(text), "to the last space"


def test_they_come_behind_thoughts() -> None:
    template = family("hermes")
    held = AnswerOrCalls(template.calls_begin, ResponseParser(template, "", TOOLS))
    parser = ThoughtSplit(THOUGHTS, held)
    text = f"<think>which?</think>\n{CALL}"
    said = joined([*map(parser.feed, text), parser.finish(is_whole=True)])
    assert said == Parsed("", "which?", F1)


def test_marks_are_plain_data() -> None:
    mark = Mark.of("<tool_call>call:", {"<tool_call>": 7})
    assert Mark.from_plain(json.loads(json.dumps(mark))) == mark
