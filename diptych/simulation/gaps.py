"""How far tokens are apart: counts in classes, as there are too many to keep. Pure."""

import math
from collections import Counter
from collections.abc import Iterable

_CLASSES_PER_E = 100  # each is 1 % wide


class Gaps:
    """Counts of times between tokens, each good to half a percent."""

    def __init__(self, parts: Iterable["Gaps"] = ()) -> None:
        """All of ``parts`` together."""
        self._counts: Counter[int] = Counter()
        for part in parts:
            self._counts.update(part._counts)

    def add(self, gap_s: float, num: int = 1) -> None:
        """So many tokens came so long after the one before; not positive: at once."""
        place = round(math.log(max(gap_s, 1e-9)) * _CLASSES_PER_E)
        self._counts[place] += num

    def quantile(self, share: float) -> float | None:
        """What that share of all does not exceed, s; None: there are none."""
        left = share * self._counts.total()
        for place in sorted(self._counts):
            left -= self._counts[place]
            if left <= 0:
                return math.exp(place / _CLASSES_PER_E)
        return None
