"""A constraint as a grammar: what no worker would take is refused before any is asked."""

import itertools
import json
from types import SimpleNamespace

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.text import grammar_check
from diptych.text.chat_template import Tool
from diptych.text.mark import Mark
from diptych.text.response.forced_calls import by_tool, forced_calls
from diptych.text.thought_form import ThoughtForm


def test_one_that_is_too_long_for_workers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_GRAMMAR_BYTES", 500)
    assert "grammar" in grammar_check.check("choice", ["a" * 300], b"")
    for thoughts in (None, ThoughtForm(open=None, close=Mark.of("</t>", {"</t>": 7}))):
        found = grammar_check.check("choice", ["a" * 600], b"", thoughts)
        assert "bytes, more than 500" in str(found["problem"])


@pytest.mark.parametrize(
    "grammar",
    [
        '?start: "a" | "b"',
        '\n\n    ?start: either\n\n    ?either: "a" | "b"\n',
        '!start: "a" | "b"',
        '// start ::= "c"\nstart: "a" | "b"',
        'start  : "a" | "b"',
        "%llguidance {}\nstart: /[ab]/",
        "start: LETTER\nLETTER: /[ab]/\n%ignore /x/",
        'LETTER: "a" | "b"\n?start: LETTER',
        'root ::= "a" | "b"',
        '# start: "c"\nroot ::= [ab]',
        'root ::= end\nend::="a" | "b"',
    ],
)
def test_lark_is_told_from_gbnf(grammar: str) -> None:
    for output, num_fitting in ((b"a", 1), (b"b", 1), (b"c", 0)):
        assert grammar_check.check("grammar", [grammar], output).get("num_fitting") == num_fitting


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('start: LETTER\nLETTER.2: "a"', "priority not supported"),
        ('rule: "a"', "start"),
        ('start ::= "a"', "root"),
    ],
)
def test_what_a_grammar_lacks_is_said_in_its_own_terms(grammar: str, problem: str) -> None:
    assert problem in str(grammar_check.check("grammar", [grammar], b"")["problem"])


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "unclosed group"),
        ("(?=a)a", "look-ahead"),
        ("b" * 300 + "(", "unclosed group"),
        (r"\p{Foo}", "Unicode property not found"),
    ],
)
def test_what_is_wrong_with_a_regular_expression_is_said(pattern: str, reason: str) -> None:
    schema = json.dumps({"type": "string", "pattern": pattern})
    for kind, text in (("regex", pattern), ("json_schema", schema)):
        problem = str(grammar_check.check(kind, [text], b"")["problem"])
        assert reason in problem
        assert "\n" not in problem


@pytest.mark.parametrize("bad", [{"not": {}}, {"enum": [2**60 + 1]}, {"pattern": "("}])
@pytest.mark.parametrize("index", range(3))
def test_of_calls_that_cannot_be_held_to_it_is_said_of_which_tool(
    bad: dict[str, object], index: int
) -> None:
    properties: list[dict[str, object]] = [{"type": "string"}] * 3
    properties[index] = bad
    tools = [
        Tool(f"tool-{number}", "two\nlines", {"properties": {"a": each}})
        for number, each in enumerate(properties)
    ]
    (grammar,) = forced_calls(tools, is_parallel=True).texts
    problem = str(grammar_check.check("grammar", [grammar], b"")["problem"])
    assert by_tool(problem, tools).startswith(f"tool-{index}: ")
    assert by_tool("something else", tools) == "something else"


@pytest.mark.parametrize("text", [*map(chr, range(1, 32)), "\x7f", "a\x7fb", "\\\x7f", "\x80", "é"])
def test_any_character_may_be_in_a_choice(text: str) -> None:
    output = text.encode()
    found = grammar_check.check("choice", [text, "zz"], output)
    assert found.get("num_fitting") == len(output)


@pytest.mark.parametrize("schema", ["true", " true\n", "{}"])
@pytest.mark.parametrize("output", [b'{"a": [1]}', b"null", b'"x"'])
def test_all_json_fits_a_schema_that_says_nothing(schema: str, output: bytes) -> None:
    assert grammar_check.check("json_schema", [schema], output).get("num_fitting") == len(output)


def test_a_schema_says_what_fits() -> None:
    schema = '{"type": "array", "items": {"type": "integer"}}'
    for output, num_fitting in ((b"[1, 23]", 7), (b'[1, "', 4), (b"{", 0)):
        found = grammar_check.check("json_schema", [schema], output)
        assert found.get("num_fitting") == num_fitting


@pytest.mark.parametrize(
    ("number", "is_kept"),
    [
        (0, True),
        (2**53, True),
        (-(2**53), True),
        (2**53 + 1, False),
        (1234567890123456789, False),
        (-1234567890123456789, False),
        (10**18, True),
        (2**63 - 1, True),
        (2**63, False),
        (-(2**63), False),
        (2**64 - 1, False),
        (10**22, True),
        (10**400, False),
    ],
)
@pytest.mark.parametrize(
    "schema",
    ['{"enum": [true, NUMBER]}', '{"properties": {"enum": {"const": {"a": [NUMBER]}}}}'],
)
def test_a_number_that_would_be_rounded_is_refused(schema: str, number: int, is_kept: bool) -> None:
    """No output but another number would fit."""
    written = schema.replace("NUMBER", str(number))
    for kind, text in (("json_schema", written), ("grammar", f'start: "x" %json {written}')):
        problem = grammar_check.check(kind, [text], b"").get("problem")
        assert (problem is None) is is_kept, problem
        assert is_kept or "rounded" in str(problem)
    if is_kept and "enum" in schema[:8]:
        output = str(number).encode()
        found = grammar_check.check("json_schema", [written], output)
        assert found.get("num_fitting") == len(output)


def test_a_number_that_is_no_value_may_be_rounded() -> None:
    """As the bounds of what fits in 64 bits are, which many libraries write."""
    for said in (
        '"type": "integer", "maximum": NUMBER',
        '"default": NUMBER',
        '"properties": {"const": {"maximum": 1}}',
    ):
        schema = "{" + said.replace("NUMBER", str(2**64 - 1)) + "}"
        assert "grammar" in grammar_check.check("json_schema", [schema], b""), schema


@pytest.mark.parametrize(
    ("bound", "number", "is_held"),
    [
        ("minimum", 2**53 - 1, True),
        ("minimum", 2**53 + 1, False),
        ("exclusiveMinimum", 2**53 + 1, False),
        ("minimum", 2**53 + 3, True),
        ("minimum", -(2**63), True),
        ("minimum", -(2**64) - 1, True),
        ("minimum", 10**30, False),
        ("minimum", 1e20, False),
        ("minimum", 0.1, True),
        ("maximum", 0.1, True),
        ("maximum", 2**53 + 1, True),
        ("maximum", 10**18 - 1, False),
        ("exclusiveMaximum", 2**53 + 3, False),
        ("maximum", -(2**53) - 1, False),
        ("maximum", 2**63 - 1, True),
        ("maximum", -(2**64), False),
        ("exclusiveMinimum", True, True),
    ],
)
def test_a_bound_that_would_be_rounded_to_let_in_more_is_refused(
    bound: str, number: float, is_held: bool
) -> None:
    schema = json.dumps({"properties": {"a": {"type": "integer", bound: number}}})
    for kind, text in (("json_schema", schema), ("grammar", f'start: "x" %json {schema}')):
        told = str(grammar_check.check(kind, [text], b"").get("problem"))
        assert (f"{bound} {str(number)[:64]} would be rounded" in told) is not is_held, told


@given(st.integers(2**53 - 4, 2**53 + 4), st.sampled_from([1, -1]), st.integers(1, 3))
def test_no_output_is_beyond_a_bound_that_was_taken(bound: int, sign: int, beyond: int) -> None:
    for name, number in (("minimum", -beyond), ("maximum", beyond)):
        item = {"type": "integer", name: sign * bound}
        schema = json.dumps({"type": "array", "items": item})
        output = f"[{sign * bound + number}]".encode()
        found = grammar_check.check("json_schema", [schema], output)
        assert found.get("num_fitting") != len(output), item


def test_a_schema_that_nothing_fits_says_so() -> None:
    assert grammar_check.check("json_schema", ["false"], b"") == {"problem": "no value fits false"}


@pytest.mark.parametrize(
    ("costs_s", "is_taken"),
    [
        ([0.0001], True),
        ([1.0, 0.0001], True),  # what all matchers learn is learned once
        ([1.0, 1.0], False),
    ],
)
def test_one_whose_outputs_cost_too_much_is_tried_twice(
    monkeypatch: pytest.MonkeyPatch, costs_s: list[float], is_taken: bool
) -> None:
    """Each try draws an output, of which each byte takes so long by the clock."""
    now_s, tries = itertools.count(), iter(costs_s)
    keeps_pace = grammar_check._keeps_pace

    def tried(matcher: llguidance.LLMatcher) -> bool:
        cost_s = next(tries)
        clock = SimpleNamespace(thread_time=lambda: next(now_s) * cost_s)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grammar_check, "time", clock)
            return keeps_pace(matcher)

    monkeypatch.setattr(grammar_check, "_keeps_pace", tried)
    found = grammar_check.check("regex", ["a*"], b"aa")
    assert found.get("num_fitting") == (2 if is_taken else None)
    assert ("ambiguous" in str(found.get("problem"))) is not is_taken
    assert next(tries, None) is None


def test_one_whose_matcher_gives_up_amid_an_output_is_refused() -> None:
    """As a worker's would: nothing fits from then on, and that is not an output's end."""

    class GivesUp:
        num_consumed = 0

        def deep_copy(self) -> "GivesUp":
            return self

        def compute_bitmask(self) -> bytes:
            return bytes([0 if self.is_error() else 1] * 32)

        def consume_token(self, byte: int) -> None:
            self.num_consumed += 1

        def is_error(self) -> bool:
            return self.num_consumed > 3

    with pytest.raises(ValueError, match="ambiguous"):
        grammar_check._check_pace(GivesUp())  # type: ignore[arg-type]


def test_an_answer_that_begins_with_space_leaves_no_gap_before_it() -> None:
    form = ThoughtForm(open=None, close=Mark.of("</t>", {"</t>": 7}))
    for regex, has_gap in (("a", True), (" ?a", False), ("\\n?a", False), ("[ab]", True)):
        assert grammar_check.check("regex", [regex], b"", form).get("has_gap") is has_gap, regex


def test_an_answer_that_may_begin_as_thoughts_or_calls_do_is_refused() -> None:
    """Nobody could tell one from the other. A part of the mark is not yet it."""
    mark = Mark.of("<t>", {})
    form = ThoughtForm(open=mark, close=Mark.of("</t>", {}))
    for regex, is_refused in (("<t>a", True), ("<.*", True), ("<t", False), ("a<t>", False)):
        for found, what in (
            (grammar_check.check("regex", [regex], b"", form), "thoughts"),
            (grammar_check.check("regex", [regex], b"", None, [mark]), "calls"),
        ):
            assert (what in str(found.get("problem"))) is is_refused, (regex, found)
