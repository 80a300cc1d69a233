"""Finding stop strings in a text that arrives in pieces. Pure.

Each stop string is matched character by character (Knuth, Morris, Pratt), so
the cost is the text times the number of stop strings, and how much of the end
of the text may still begin one is always known. Much text at once is searched
as a whole, with the same result.
"""

import functools
from collections.abc import Sequence


class StopMatcher:
    """The state of matching one text against several stop strings.

    The match that *ends* first wins, of those the longest: what is found does
    not depend on how the text was cut into pieces.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise ValueError("a stop string is empty")
        self._stop = sorted(set(stop), key=len, reverse=True)
        self._tables = [_border_lengths(text) for text in self._stop]
        self._matched = [0] * len(self._stop)  # characters of each that end the text so far

    @property
    def num_held(self) -> int:
        """How many last characters of the text may begin a stop string."""
        return max(self._matched, default=0)

    def push(self, character: str, *, enabled: bool) -> str | None:
        """Add one character. Returns the stop string that it completes, if ``enabled``."""
        found = None
        for index, (stop, table) in enumerate(zip(self._stop, self._tables, strict=True)):
            matched = _advanced(stop, table, self._matched[index], character)
            if matched == len(stop):
                found = found or stop
                matched = table[matched - 1]
            self._matched[index] = matched
        return found if enabled else None

    def push_text(self, held: str, text: str, first_enabled: int) -> tuple[int, str] | None:
        """Add much text at once, as :meth:`push` would, for a few calls per stop string.

        ``held`` are the last ``num_held`` characters before it, and a match counts if it
        is completed by the character ``first_enabled`` of ``text`` or a later one.
        Returns where in ``text`` the first match ends, and the stop string.
        """
        pending = held + text
        first_end = len(held) + first_enabled + 1
        found: tuple[int, str] | None = None
        for index, (stop, table) in enumerate(zip(self._stop, self._tables, strict=True)):
            at = pending.find(stop, max(0, first_end - len(stop)))
            end = at + len(stop)
            if at >= 0 and (found is None or end < found[0]):  # of equal ends the longest is first
                found = (end, stop)
            matched = 0  # what begins the string is shorter than it: the text before is no matter
            for character in pending[max(0, len(pending) - len(stop) + 1) :]:
                matched = _advanced(stop, table, matched, character)
            self._matched[index] = matched
        return None if found is None else (found[0] - len(held), found[1])


def _advanced(stop: str, table: Sequence[int], matched: int, character: str) -> int:
    """How much of ``stop`` ends the text after ``character``, if ``matched`` did before."""
    while matched and stop[matched] != character:
        matched = table[matched - 1]
    return matched + 1 if stop[matched] == character else matched


@functools.lru_cache(maxsize=64)  # choices of one request have the same
def _border_lengths(text: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return tuple(table)
