"""How many lines may be with the routers at a time, by how much room they say they have. Pure."""


class Pace:
    """Fewer, by half, when a router is full; one more for each round of answers.

    (The rule by which TCP shares a line, AIMD.) What was sent together is refused together,
    so that one pause halves once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(most)
        self._not_before_s = float("-inf")

    @property
    def limit(self) -> int:
        """So many at a time, one at least."""
        return int(self._limit)

    def pause_s(self, now_s: float) -> float:
        """How long nothing is sent, from now on; 0 or less: it may be sent."""
        return self._not_before_s - now_s

    def answered(self) -> None:
        """A router had room."""
        self._limit = min(float(self._most), self._limit + 1 / self._limit)

    def refused(self, now_s: float, pause_s: float) -> None:
        """A router had none, and wants to be left alone for so long."""
        if now_s >= self._not_before_s:
            self._limit = max(1.0, self._limit / 2)
        self._not_before_s = max(self._not_before_s, now_s + pause_s)
