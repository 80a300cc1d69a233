"""Finding stop strings in a text that arrives in pieces. Pure.

Each stop string is matched character by character (Knuth, Morris, Pratt), so
the cost is the text times the number of stop strings, and how much of the end
of the text may still begin one is always known.
"""

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
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = table[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                found = found or stop
                matched = table[matched - 1]
            self._matched[index] = matched
        return found if enabled else None


def _border_lengths(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table
