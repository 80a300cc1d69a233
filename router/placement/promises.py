"""What sequences of ours were promised on a worker that has not told of them yet. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from diptych.paced import Paced


class Promise(NamedTuple):
    """What a sequence was promised when it was placed, and how long its answer should be."""

    tpot_s: float | None = None  # None: nothing
    num_output_tokens: int = 0  # 0: nobody knows


class Promised(NamedTuple):
    """What several come to."""

    num_placed: int = 0
    paced: tuple[tuple[float, int, int], ...] = ()
    """Of those with an objective for the time between tokens: that, s; their answers' length,
    tokens (0: unknown); how many are so.
    """


NOTHING_PROMISED: Final = Promised()


def promised(promises: Iterable[Promise]) -> Promised:
    """All together. Lengths of one power of two are taken to be the least of it: there are few."""
    num_placed, alike = 0, Counter[tuple[float, int]]()
    for tpot_s, num_tokens in promises:
        num_placed += 1
        if tpot_s is not None:
            alike[tpot_s, num_tokens and 1 << (num_tokens.bit_length() - 1)] += 1
    return Promised(num_placed, tuple((*each, num) for each, num in alike.items()))


class OwnPromises:
    """Of one router's sequences on one worker, from being placed there until they have ended.

    Of those that decode the worker tells how far they are, so what they were promised counts
    until it has told of them; and it told of some that have ended since.
    What it tells and what it draws come on two streams: one that ends as it tells may count as one
    too few, or too many, until it tells again, a second at the most.
    """

    def __init__(self, owner: str) -> None:
        """``owner``: the router, as the worker calls it."""
        self.num_ended = 0
        """Of those that decoded when the worker told."""
        self._owner = owner
        self._untold: dict[int, Promise] = {}  # by sequence
        self._decoding: set[int] = set()  # of these, with a token from there
        self._told: set[int] = set()  # that decoded when it told, and have not ended
        self._promised: Promised | None = NOTHING_PROMISED  # None: another than before

    def placed(self, sequence_id: int, promise: Promise) -> None:
        """One more is there."""
        self._untold[sequence_id] = promise
        self._promised = None

    def drew(self, sequence_id: int) -> None:
        """It has a token from there: it decodes."""
        if sequence_id in self._untold:
            self._decoding.add(sequence_id)

    def told(self, tightest: Iterable[Paced]) -> None:
        """The worker said how far those are that decode, of these who can lose the least."""
        self.num_ended = 0
        listed = (each.sequence_id for each in tightest if each.owner == self._owner)
        for sequence_id in [*self._decoding, *listed]:
            if self._untold.pop(sequence_id, None) is not None:
                self._told.add(sequence_id)
                self._promised = None
        self._decoding.clear()

    def over(self, sequence_id: int) -> None:
        """It is there no more. Idempotent."""
        if self._untold.pop(sequence_id, None) is not None:
            self._promised = None
        elif sequence_id in self._told:
            self._told.remove(sequence_id)
            self.num_ended += 1
        self._decoding.discard(sequence_id)

    def clear(self) -> None:
        """All are over, and what the worker told is of no use: it may be another process."""
        self._untold.clear()
        self._decoding.clear()
        self._told.clear()
        self.num_ended, self._promised = 0, NOTHING_PROMISED

    def still_there(self, tightest: Iterable[Paced]) -> tuple[Paced, ...]:
        """Of those that the worker told of, without ours that have ended since."""
        return tuple(
            each for each in tightest if each.owner != self._owner or each.sequence_id in self._told
        )

    @property
    def promised(self) -> Promised:
        """Of those that the worker has not told of."""
        if self._promised is None:
            self._promised = promised(self._untold.values())
        return self._promised
