"""A router's own sequences on one worker, by whose they are. Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

_LITTLE: Final = 4  # times as much is an even share
_REMEMBERED: Final = 256  # sequences that come after a payer's last has ended


class Shares(NamedTuple):
    """How they were shared out at one moment."""

    num_of: Mapping[bytes, int] = MappingProxyType({})  # payers of late are there with none
    num_all: int = 0

    @property
    def has_little(self) -> bool:
        """Whether some payer has less than a quarter of an even share, or none any more.

        No more: turns go by seconds, of which one with few sequences may have as many.
        """
        return bool(self.num_of) and self._is_little(min(self.num_of.values()))

    def is_little(self, payer: bytes) -> bool:
        """Whether that one has, or has none."""
        num = self.num_of.get(payer, 0)
        return not num or self._is_little(num)

    def _is_little(self, num: int) -> bool:
        return _LITTLE * num * len(self.num_of) < self.num_all


NO_SHARES: Final = Shares()


class OwnSequences:
    """Counts them as they come and go. Owned by who opens and closes them.

    A payer that has none any more is remembered for a while: more of its may come.
    """

    def __init__(self) -> None:
        self._payers: dict[int, bytes] = {}  # by sequence
        self._counts: dict[bytes, int] = {}
        self._idle: dict[bytes, int] = {}  # that have none; how many had come by then, ascending
        self._num_ever = 0

    def __len__(self) -> int:
        return len(self._payers)

    def shares(self) -> Shares:
        """As of now."""
        return Shares(dict(self._counts), len(self._payers))

    def add(self, sequence_id: int, payer: bytes) -> None:
        """A new sequence of that payer's."""
        self._num_ever += 1
        self._payers[sequence_id] = payer
        self._counts[payer] = self._counts.get(payer, 0) + 1
        self._idle.pop(payer, None)
        while self._idle and self._num_ever - next(iter(self._idle.values())) > _REMEMBERED:
            oldest = next(iter(self._idle))
            del self._idle[oldest], self._counts[oldest]

    def remove(self, sequence_id: int) -> None:
        """It is over. Idempotent."""
        payer = self._payers.pop(sequence_id, None)
        if payer is not None:
            self._counts[payer] -= 1
            if not self._counts[payer]:
                self._idle[payer] = self._num_ever

    def clear(self) -> None:
        """All are over."""
        for sequence_id in list(self._payers):
            self.remove(sequence_id)
