"""What must hold in the model after any event. Each has a name, and a broken one says its own."""

import enum
from collections.abc import Collection


class Invariant(enum.Enum):
    """Its value is the sentence that docs/protocol.md shows."""

    READABLE = (
        "A block that a reader may read is held, complete and of the announced generation; a lease "
        "has one valid reader at the most."
    )
    WRITERS = (
        "A block has one writer at the most (a step or the reads of one pull), is held or "
        "quarantined while it has one, and then neither shared nor cached."
    )
    CACHED = (
        "A cached block holds the KV that its key names, but for the hole that it is known to have."
    )
    PROVEN = (
        "When a pull is proven, its blocks hold what its sequence needs of the KV of exactly its "
        "tokens."
    )
    ATTENDED = "A step attends only to KV of exactly its tokens."
    HOLDERS = (
        "Each holder of a block is a sequence of an open stream, and the gauges sum to the pool."
    )
    TOKENS = (
        "Tokens reach the client in order, each once, as the (fake) model alone would say them."
    )
    OUTCOME = "A request has one end, after which nothing is done for it, and the right one."
    ENDS = "When faults stop, every request ends within 120 s of virtual time, and its streams do."
    RECLAIMED = "When all requests have ended, every block of every pool is free or cached."


class BrokenError(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: Invariant, what: str) -> None:
        super().__init__(f"{invariant.name}: {what}")
        self.invariant = invariant


class Watch:
    """Raises for the invariants that are watched: all of them, unless one bug is looked for."""

    def __init__(self, watched: Collection[Invariant] = frozenset(Invariant)) -> None:
        self._watched = watched

    def watches(self, invariant: Invariant) -> bool:
        """Whether it has to be looked at."""
        return invariant in self._watched

    def broken(self, invariant: Invariant, what: str) -> None:
        """It does not hold here and now. Raises BrokenError if it is watched."""
        if invariant in self._watched:
            raise BrokenError(invariant, what)
