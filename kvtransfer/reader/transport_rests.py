"""Which transports of a source are left alone, because it took our agent with it. Pure."""

from typing import NamedTuple

_FIRST_RATIO = 0.5  # of the time between tries of better transports: it is among the next ones
_MOST_RATIO = 16  # of the same


class _Rest(NamedTuple):
    until_s: float
    length_s: float
    why: str


class TransportRests:
    """Each try may cost all other pairs theirs, so it rests twice as long after each that did.

    Seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        self._rests: dict[str, _Rest] = {}

    def took_agent(self, name: str, why: str, now: float, reprove_s: float) -> None:
        """It was tried once more; better transports are tried each ``reprove_s``."""
        before = self._rests.get(name)
        length_s = _FIRST_RATIO * reprove_s
        if before is not None:
            length_s = min(2 * before.length_s, _MOST_RATIO * reprove_s)
        self._rests[name] = _Rest(now + length_s, length_s, why)

    def worked(self, name: str) -> None:
        """It did: whatever it took before is forgotten."""
        self._rests.pop(name, None)

    def resting(self, now: float) -> dict[str, str]:
        """Those not to be tried, each with the reason."""
        return {name: rest.why for name, rest in self._rests.items() if now < rest.until_s}
