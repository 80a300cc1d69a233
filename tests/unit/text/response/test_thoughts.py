"""Thoughts before an answer of a given form: where they may be, and how both are told apart."""

import json
from pathlib import Path

import llguidance
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from diptych.errors import InvalidRequestError
from diptych.text.chat_template import Tool
from diptych.text.grammar_check import check
from diptych.text.mark import Mark
from diptych.text.response.body import ParsedCall
from diptych.text.response.families import family
from diptych.text.response.forced_calls import FORCED_CALLS, forced_calls
from diptych.text.response.parser import Parsed, ResponseParser, joined
from diptych.text.response.template import ResponseTemplate
from diptych.text.response.thoughts import ThoughtSplit, thoughts_before
from diptych.text.thought_form import ThoughtForm
from tests.text_models import byte_level_tokenizer

ASSISTANT = "<|im_start|>assistant\n"
THINKS = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
SCHEMA = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'
TAGS = ThoughtForm(open=Mark.of("<think>", {}), close=Mark.of("</think>", {}))
BEGUN = ThoughtForm(open=None, close=Mark.of("</think>", {}))
CHANNELS = ThoughtForm(
    open=Mark.of("<|channel|>analysis<|message|>", {}),
    close=Mark.of("<|end|>", {}),
    lead=Mark.of("<|start|>assistant<|channel|>final<|message|>", {}),
    own_lead=Mark.of("<|channel|>final<|message|>", {}),
)


@pytest.mark.parametrize(
    ("name", "chat_template", "prompt", "expected"),
    [
        ("hermes", THINKS, ASSISTANT, TAGS),
        ("hermes", "", ASSISTANT, None),  # a model that does not think
        ("hermes", "", f"{ASSISTANT}<think>\n", BEGUN),
        ("hermes", THINKS, f"{ASSISTANT}<think>\n\n</think>\n\n", None),  # it shall not
        ("qwen-xml", THINKS, f"{ASSISTANT}<think>\n", BEGUN),
        ("deepseek", THINKS, "<｜Assistant｜><think>\n", BEGUN),
        ("think", THINKS, "<|assistant|>\n", TAGS),
        (
            "mistral",
            "[THINK]",
            "[/INST]",
            ThoughtForm(open=Mark.of("[THINK]", {}), close=Mark.of("[/THINK]", {})),
        ),
        (
            "gemma4",
            r"{{ '<|channel>thought\n' }}",
            "<|turn>model\n",
            ThoughtForm(open=Mark.of("<|channel>thought\n", {}), close=Mark.of("<channel|>", {})),
        ),
        ("gpt-oss", "<|channel|>analysis<|message|>", "<|start|>assistant", CHANNELS),
        ("llama-json", "", "<|start_header_id|>assistant<|end_header_id|>\n\n", None),
    ],
)
def test_detail_25_where_thoughts_may_be(
    name: str, chat_template: str, prompt: str, expected: ThoughtForm | None
) -> None:
    assert thoughts_before(family(name), chat_template, f"hi{prompt}", {}) == expected


def test_detail_25_thoughts_whose_end_is_only_a_pattern_go_with_no_form() -> None:
    fields = {"thinking": {"open": "<t>", "close_pattern": "</t+>"}, "content": {}}
    declared = ResponseTemplate.read({"fields": fields, "start_anchor": "<a>"})
    assert thoughts_before(declared, "<t>", "x<a>", {}) is None
    with pytest.raises(InvalidRequestError) as caught:
        thoughts_before(declared, "<t>", "x<a><t>", {})
    assert caught.value.field == "sampling.constraint"


def fitting(text: str, form: ThoughtForm, kind: str = "json_schema", said: str = SCHEMA) -> int:
    answer = check(kind, [said], text.encode(), form)
    assert "problem" not in answer, answer
    fits = answer["num_fitting"]
    assert isinstance(fits, int)
    return fits - len(text.encode())


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (TAGS, '{"a": true}'),
        (TAGS, '<think>\n{"a": é</thinkk \n\n</think>\n\n{"a": true}'),
        (BEGUN, '</think>{"a": true}'),
        (BEGUN, '<think> or not\n</think>\n{"a": true}'),
        (CHANNELS, '<|channel|>final<|message|>{"a": true}'),
        (
            CHANNELS,
            '<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>'
            '{"a": true}',
        ),
    ],
)  # fmt: skip
def test_detail_25_only_what_is_behind_thoughts_is_held_to_a_form(
    form: ThoughtForm, text: str
) -> None:
    assert fitting(text, form) == 0
    assert fitting(f"{text[:-5]}x", form) == -1
    assert fitting(f"{text}\n", form) == -1


def test_detail_25_an_answer_that_looks_like_thoughts_is_refused() -> None:
    for kind, text in (("regex", "(.|\n)*b"), ("choice", "<think>"), ("grammar", "start: /.+/")):
        assert "this model's thoughts" in str(check(kind, [text], b"", TAGS)["problem"])
    assert fitting("<think></think><thin", TAGS, "choice", "<thin") == 0
    assert fitting("</think>b", BEGUN, "regex", "(.|\n)*b") == 0  # they have begun: no doubt


def split(form: ThoughtForm, pieces: list[str], *, is_whole: bool = True) -> Parsed:
    parser = ThoughtSplit(form)
    return joined([*map(parser.feed, pieces), parser.finish(is_whole=is_whole)])


WORDS = st.text("<>/think|end{ \né", max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    form=st.sampled_from([TAGS, BEGUN, CHANNELS]),
    thought=WORDS,
    gap=st.sampled_from(["", "\n\n", " \n "]),
    answer=WORDS,
    cuts=st.lists(st.integers(0, 99), max_size=6),
)
def test_detail_25_any_cuts_say_the_same(
    form: ThoughtForm, thought: str, gap: str, answer: str, cuts: list[int]
) -> None:
    """Of all that the grammar admits: the answer to the last space, thoughts without theirs."""
    assume(form.close.text not in thought)
    pattern = f"x{answer}"
    checked = check("choice", [pattern], b"", form)
    gap = "" if form.lead else gap
    opened = "" if form.open is None else form.open.text
    text = f"{opened}{thought}{form.close.text}{gap}{form.lead.text}{pattern}"
    assert fitting(text, form, "choice", pattern) == 0
    assert checked["has_gap"]
    at = sorted(cut % (len(text) + 1) for cut in cuts)
    pieces = [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]
    assert split(form, pieces) == Parsed(pattern, thought.strip())


def test_detail_25_space_that_the_form_may_begin_with_is_the_answers() -> None:
    checked = check("regex", [r"\n?b"], b"", TAGS)
    assert checked["has_gap"] is False
    form = ThoughtForm(open=TAGS.open, close=TAGS.close, has_gap=False)
    assert split(form, ["<think>a</think>\nb"]) == Parsed("\nb", "a")
    assert fitting("<think>a</think>\n\nb", TAGS, "regex", r"\n?b") == -2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<thi", Parsed("<thi")),
        ("<think>\na </thi", Parsed(reasoning="a </thi")),
        ("<think>a</think>\n", Parsed(reasoning="a")),
        ('<think>a</think>\n{"a', Parsed('{"a', "a")),
    ],
)
def test_detail_25_an_answer_that_was_cut_off(text: str, expected: Parsed) -> None:
    assert split(TAGS, list(text), is_whole=False) == expected


def test_detail_25_calls_that_are_insisted_on_come_behind_thoughts() -> None:
    forced = forced_calls([Tool("g")], is_parallel=False)
    text = '<think>which?</think>\n[{"name": "g", "arguments": {}}]'
    assert fitting(text, TAGS, forced.kind.value, forced.texts[0]) == 0
    parser = ThoughtSplit(TAGS, ResponseParser(FORCED_CALLS, "", {"g": {}}))
    said = joined([*map(parser.feed, text), parser.finish(is_whole=True)])
    assert said == Parsed("", "which?", (ParsedCall("g", "{}"),))


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("marks", [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_detail_25_marks_that_are_tokens_are_those_tokens(
    tmp_path: Path, marks: tuple[str, str], is_special: bool
) -> None:
    """Thoughts are any text but for what is special; who spells their end out ends them, too."""
    made = byte_level_tokenizer()
    made.add_tokens([AddedToken(mark, special=is_special, normalized=False) for mark in marks])
    ids = {token.content: number for number, token in made.get_added_tokens_decoder().items()}
    form = ThoughtForm(open=Mark.of(marks[0], ids), close=Mark.of(marks[1], ids))
    grammar = check("choice", ["x"], b"", form)["grammar"]
    tokenizer = llguidance.LLTokenizer(made.to_str())
    matcher = llguidance.LLMatcher(tokenizer, str(grammar), log_level=0)

    def allowed() -> set[int]:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())

    (x,) = made.encode("x").ids
    assert allowed() == {ids[marks[0]], x}
    assert matcher.consume_tokens([ids[marks[0]], *made.encode("hello moon").ids])
    free = allowed()
    assert {ids[marks[1]], x} < free
    assert len(free) > 0.4 * made.get_vocab_size()
    assert not free & {ids["<s>"], ids["</s>"]}
    spelled = matcher.deep_copy()
    assert matcher.consume_token(ids[marks[1]])
    behind = allowed()
    assert x in behind
    assert all(made.decode([each]).strip(" \n") in ("x", "") for each in behind)
    each_letter = [made.encode(letter).ids[0] for letter in marks[1]]
    assert spelled.consume_tokens([*each_letter, x])
    assert spelled.is_accepting()


def test_a_form_is_plain_data() -> None:
    for form in (TAGS, BEGUN, CHANNELS):
        assert ThoughtForm.from_plain(json.loads(json.dumps(form.to_plain()))) == form
