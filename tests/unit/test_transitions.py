"""Tables of state and event; and docs/protocol.md shows those of the code."""

import enum

import pytest

from diptych.transitions import IllegalTransitionError, Transitions
from tests.protocol import tables


class Door(enum.Enum):
    OPEN = enum.auto()
    SHUT = enum.auto()


class Act(enum.Enum):
    PUSH = enum.auto()
    PULL = enum.auto()


DOOR = Transitions({Door.OPEN: {Act.PUSH: Door.SHUT}}, ignored={Door.SHUT: {Act.PUSH}})


def test_an_event_moves_is_ignored_or_is_a_bug() -> None:
    assert DOOR.after(Door.OPEN, Act.PUSH) is Door.SHUT
    assert DOOR.after(Door.SHUT, Act.PUSH) is None
    with pytest.raises(IllegalTransitionError, match="PULL while OPEN"):
        DOOR.after(Door.OPEN, Act.PULL)
    assert not DOOR.allows(Door.SHUT, Act.PUSH)


def test_what_moves_is_not_ignored() -> None:
    with pytest.raises(AssertionError, match="moves and ignores"):
        Transitions({Door.OPEN: {Act.PUSH: Door.SHUT}}, ignored={Door.OPEN: {Act.PUSH}})


def test_the_page_shows_the_tables_of_the_code() -> None:
    page = tables.PAGE.read_text()
    assert page == tables.with_tables(page), "run: python -m tests.protocol.tables"
    assert set(tables.shown(page)) == tables.tables().keys()
