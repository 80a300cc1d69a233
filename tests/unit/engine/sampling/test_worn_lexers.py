"""What a grammar's lexer has learned is bounded, and an answer goes on behind that bound."""

import random
from array import array

import llguidance
import numpy as np
import pytest

from diptych.constraint import OutputGrammar
from diptych.engine.sampling.grammar_states import GrammarStates
from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import History, SampleSpec
from diptych.errors import InvalidRequestError
from diptych.sampling_params import SamplingParams
from diptych.text import grammars as module
from diptych.text.grammars import MAX_REMEMBERED, Grammars

EACH_TOKEN_WEARS = "start: /[a-z]*[aeiou][a-z]{24}/"
OUTPUT = bytes(random.Random(3).choices(b"abcdefghij", k=300))


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(llguidance.LLTokenizer("byte"))


def limit(monkeypatch: pytest.MonkeyPatch, num_states: int) -> None:
    limits = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=num_states)
    monkeypatch.setattr(module, "LIMITS", limits)


def spec(text: str, output: bytes, number: int) -> SampleSpec:
    return SampleSpec(
        params=SamplingParams(constraint=OutputGrammar(text, frozenset({256}))),
        allow_stop=True,
        history=History(array("q", [7, *output]), 1),
        key=SequenceKey("router", number),
    )


def follow(states: GrammarStates, text: str, output: bytes, number: int) -> None:
    """Draw the output, token by token. Raises what it is refused with."""
    for end in range(len(output)):
        found = states.constrain([spec(text, output[:end], number)])
        if found.refused:
            raise found.refused[0]
        mask = found.specs[0].allowed
        assert mask is not None
        assert np.frombuffer(mask, np.uint8)[output[end] >> 3] >> (output[end] & 7) & 1


def test_answers_go_on_once_their_lexer_is_worn_and_later_ones_begin(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 400)
    states = GrammarStates(grammars)
    follow(states, EACH_TOKEN_WEARS, OUTPUT, 1)
    assert grammars.num_compiled > 1
    follow(states, EACH_TOKEN_WEARS, OUTPUT, 2)


def test_rows_of_one_lexer_go_on_with_one_new_one(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 400)
    states = GrammarStates(grammars)
    for end in range(len(OUTPUT)):
        rows = [spec(EACH_TOKEN_WEARS, OUTPUT[:end], number) for number in range(8)]
        assert not states.constrain(rows).refused
    assert 1 < grammars.num_compiled < 6


def test_what_wears_a_lexer_by_itself_is_refused_alone(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 200)  # it takes one for each token
    states = GrammarStates(grammars)
    with pytest.raises(InvalidRequestError, match="too complex") as refused:
        follow(states, EACH_TOKEN_WEARS, OUTPUT, 1)
    assert refused.value.field == "sampling.constraint"
    follow(states, EACH_TOKEN_WEARS, OUTPUT[:100], 2)


def test_states_of_ended_sequences_keep_no_grammar(grammars: Grammars) -> None:
    states = GrammarStates(grammars)
    for number in range(2 * MAX_REMEMBERED):
        follow(states, f'start: "a{number}"', b"a", number)
    assert len(states._states) == MAX_REMEMBERED


def test_rows_of_a_step_keep_theirs_however_many_they_are(grammars: Grammars) -> None:
    states, num = GrammarStates(grammars), 2 * MAX_REMEMBERED
    for output in (b"", b"a"):
        rows = [spec(f'start: "a{number}"', output, number) for number in range(num)]
        assert not states.constrain(rows).refused
    assert grammars.num_compiled == num


def test_a_lexer_takes_little_memory() -> None:
    """Each grammar that is remembered has one, and 0.35 kB for a state."""
    assert module.LIMITS.max_lexer_states * MAX_REMEMBERED * 350 < 2**30
