"""A router's own sequences on one worker, by whose they are. Pure."""

from typing import Final, NamedTuple

_LITTLE: Final = 4  # times as much is an even share
_REMEMBERED: Final = 256  # sequences that come after a payer's last has ended


class Shares(NamedTuple):
    """How they were shared out at one moment."""

    main: bytes = b""  # the payer that has most
    num_main: int = 0
    has_little: bool = False
    """Whether some payer has less than a quarter of an even share, or none any more.

    No more: turns go by seconds, of which one with few sequences may have as many.
    """


NO_SHARES: Final = Shares()


class OwnSequences:
    """Counts them as they come and go. Owned by who opens and closes them.

    A payer that has none any more is remembered for a while: more of its may come.
    """

    def __init__(self) -> None:
        self._payers: dict[int, bytes | None] = {}  # by sequence; None: whose does not count
        self._counts: dict[bytes, int] = {}
        self._idle: dict[bytes, int] = {}  # that have none; how many had come by then, ascending
        self._num_ever = 0

    def __len__(self) -> int:
        return len(self._payers)

    def shares(self) -> Shares:
        """As of now."""
        if not self._counts:
            return NO_SHARES
        main = max(self._counts, key=self._counts.__getitem__)
        num_all, least = sum(self._counts.values()), min(self._counts.values())
        has_little = _LITTLE * least * len(self._counts) < num_all
        return Shares(main, self._counts[main], has_little)

    def add(self, sequence_id: int, payer: bytes | None) -> None:
        """A new sequence of that payer's; None: a batch's, which leaves for others."""
        self._payers[sequence_id] = payer
        if payer is None:
            return
        self._num_ever += 1
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
