"""What happens next, and what time it is then. Pure."""

import heapq
import itertools
from collections.abc import Callable

Happening = Callable[[], None]


class Agenda:
    """The one clock of a simulation. Happenings of one moment come in the order of their booking.

    Invariant: time never goes back.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_happened = 0
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, Happening]] = []

    def at(self, at_s: float, happening: Happening) -> None:
        """Let it happen at that moment, or now if that is past."""
        heapq.heappush(self._heap, (max(at_s, self.now_s), next(self._numbers), happening))

    def after(self, delay_s: float, happening: Happening) -> None:
        """Let it happen so much later."""
        self.at(self.now_s + delay_s, happening)

    def soon(self, happening: Happening) -> None:
        """Let it happen at this moment, behind what is due now."""
        self.at(self.now_s, happening)

    def run(self, until_s: float) -> bool:
        """All that is due until then, in order; it is that time then. Whether anything is left."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, happening = heapq.heappop(self._heap)
            self.num_happened += 1
            happening()
        self.now_s = max(self.now_s, until_s)
        return bool(self._heap)
