"""What our sequences on a worker were promised, and how those may go on that it told of. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

from diptych.paced import Paced
from router.placement.answer_length import AnswerLength


class Promise(NamedTuple):
    """What a sequence was promised when it was placed, and how long its answer should be."""

    tpot_s: float | None = None  # None: nothing
    num_output_tokens: int = 0  # 0: nobody knows
    answer: AnswerLength | None = None  # in more detail; None: it is not known


class Promised(NamedTuple):
    """What several come to."""

    num_placed: int = 0
    paced: tuple[tuple[float, int, float], ...] = ()
    """Of those with an objective for the time between tokens: that, s; their answers' length,
    tokens (0: unknown); how many are so, half of one where another length is as likely.
    """


NOTHING_PROMISED: Final = Promised()


def promised(promises: Iterable[Promise]) -> Promised:
    """All together. Lengths of one power of two are taken to be the least of it: there are few."""
    num_placed, alike = 0, defaultdict[tuple[float, int], float](float)
    for tpot_s, num_output_tokens, answer in promises:
        num_placed += 1
        if tpot_s is None:
            continue
        lengths = (num_output_tokens,) if answer is None else answer.halves
        for num in lengths:
            alike[tpot_s, num and 1 << (num.bit_length() - 1)] += 1.0 / len(lengths)
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
        self._told: dict[int, Promise] = {}  # that decoded when it told, and have not ended
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
            promise = self._untold.pop(sequence_id, None)
            if promise is not None:
                self._told[sequence_id] = promise
                self._promised = None
        self._decoding.clear()

    def over(self, sequence_id: int) -> None:
        """It is there no more. Idempotent."""
        if self._untold.pop(sequence_id, None) is not None:
            self._promised = None
        elif self._told.pop(sequence_id, None) is not None:
            self.num_ended += 1
        self._decoding.discard(sequence_id)

    def clear(self) -> None:
        """All are over, and what the worker told is of no use: it may be another process."""
        self._untold.clear()
        self._decoding.clear()
        self._told.clear()
        self.num_ended, self._promised = 0, NOTHING_PROMISED

    def still_there(self, tightest: Iterable[Paced]) -> tuple[Paced, ...]:
        """Those that the worker told of, without ours that have ended since; of ours, the ways in
        which they may go on.
        """
        return tuple(way for each in tightest for way in self._ways(each))

    def _ways(self, paced: Paced) -> tuple[Paced, ...]:
        if paced.owner != self._owner:
            return (paced,)
        promise = self._told.get(paced.sequence_id)
        if promise is None:
            return ()
        return (paced,) if promise.answer is None else promise.answer.ways(paced)

    @property
    def promised(self) -> Promised:
        """Of those that the worker has not told of."""
        if self._promised is None:
            self._promised = promised(self._untold.values())
        return self._promised
