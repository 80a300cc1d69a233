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
