"""A grammar that takes too long is refused for a while, and has all that it may take behind it."""

import sys

import pytest

from diptych.engine.sampling.grammar_paces import (
    MAX_SAVED_S,
    MIN_ALLOWANCE_S,
    REFUSED_S,
    GrammarPaces,
)
from diptych.errors import InvalidRequestError


class Rig:
    def __init__(self) -> None:
        self.now_s = 50.0
        self.paces = GrammarPaces(lambda: self.now_s)

    def spend(self, text: str, spent_s: float) -> None:
        self.paces.of(text).spend(spent_s, MIN_ALLOWANCE_S)

    def is_refused(self, text: str) -> bool:
        try:
            self.paces.of(text).check()
        except InvalidRequestError:
            return True
        return False


def test_what_is_too_slow_is_refused_for_a_while_and_then_has_all_again() -> None:
    rig = Rig()
    rig.spend("slow", MAX_SAVED_S)
    with pytest.raises(InvalidRequestError, match="takes too long"):
        rig.spend("slow", 2 * MIN_ALLOWANCE_S)
    assert rig.is_refused("slow")
    assert not rig.is_refused("other")
    rig.now_s += REFUSED_S - 0.25
    assert rig.is_refused("slow")
    rig.now_s += 0.5
    assert not rig.is_refused("slow")
    rig.spend("slow", MAX_SAVED_S)
    with pytest.raises(InvalidRequestError):
        rig.spend("slow", 2 * MIN_ALLOWANCE_S)
    assert rig.is_refused("slow")


def test_what_is_not_taken_is_saved_up_to_a_bound() -> None:
    rig = Rig()
    for _ in range(1000):
        rig.spend("quick", 0.0)
    with pytest.raises(InvalidRequestError):
        rig.spend("quick", MAX_SAVED_S + 2 * MIN_ALLOWANCE_S)


def test_large_grammars_are_not_kept_for_their_paces() -> None:
    """They may have 512 KiB each."""
    rig, text = Rig(), "a" * 512 * 1024
    num_before = sys.getrefcount(text)
    rig.spend(text, MAX_SAVED_S)
    assert sys.getrefcount(text) == num_before
    with pytest.raises(InvalidRequestError):
        rig.spend("".join(("a", text[1:])), 2 * MIN_ALLOWANCE_S)
