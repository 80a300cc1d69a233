"""A constraint as a grammar: what no worker would take is refused before any is asked."""

import pytest

from diptych.text import grammar_check
from diptych.text.mark import Mark
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


@pytest.mark.parametrize("text", [*map(chr, range(1, 32)), "\x7f", "a\x7fb", "\\\x7f", "\x80", "é"])
def test_any_character_may_be_in_a_choice(text: str) -> None:
    output = text.encode()
    found = grammar_check.check("choice", [text, "zz"], output)
    assert found.get("num_fitting") == len(output)


@pytest.mark.parametrize("schema", ["true", " true\n", "{}"])
@pytest.mark.parametrize("output", [b'{"a": [1]}', b"null", b'"x"'])
def test_all_json_fits_a_schema_that_says_nothing(schema: str, output: bytes) -> None:
    assert grammar_check.check("json_schema", [schema], output).get("num_fitting") == len(output)


def test_a_schema_that_nothing_fits_says_so() -> None:
    assert grammar_check.check("json_schema", ["false"], b"") == {"problem": "no value fits false"}
