"""A state machine's table: state and event to next state. Pure.

What an event does in a state is one of three: it moves (maybe to the same state),
it is *ignored* (late, repeated, and harmless), or it is *illegal*: a bug, which raises.
The tables of the hand-off are shown in docs/protocol.md.
"""

import enum
from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class IllegalTransitionError(AssertionError):
    """An event that cannot happen in this state did: a bug of whoever raised the event."""


class Transitions(Generic[S, E]):
    """One machine's whole table; immutable, shared by all its instances."""

    def __init__(
        self,
        moves: Mapping[S, Mapping[E, S]],
        ignored: Mapping[S, Collection[E]] | None = None,
    ) -> None:
        """What is in neither is illegal."""
        self.moves = moves
        self.ignored = ignored or {}
        for state, events in self.ignored.items():
            assert not moves.get(state, {}).keys() & set(events), f"{state} moves and ignores"

    def after(self, state: S, event: E) -> S | None:
        """The next state; None if the event is ignored. Raises IllegalTransitionError."""
        following = self.moves.get(state, {}).get(event)
        if following is None and event not in self.ignored.get(state, ()):
            raise IllegalTransitionError(f"{event.name} while {state.name}")
        return following

    def allows(self, state: S, event: E) -> bool:
        """Whether the event moves."""
        return event in self.moves.get(state, {})
