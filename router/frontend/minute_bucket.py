"""So much a minute, and no more than a minute's worth at a time: a token bucket. Pure."""


class MinuteBucket:
    """Full at first; what is taken comes back evenly. Times in s, of any one clock.

    Invariant: the level is at most what comes back in a minute. It may be below nothing: one
    who wants more than a minute's worth takes all of it on credit, once the bucket is full.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._as_of_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until so much could be taken; 0: now."""
        self._fill(now_s)
        lacking = min(amount, self.per_minute) - self._level
        return max(0.0, lacking * 60.0 / self.per_minute)

    def take(self, amount: float) -> None:
        """Whether or not it is there."""
        self._level -= amount

    def give_back(self, amount: float) -> None:
        """Some that was taken was not used."""
        self._level = min(self._level + amount, float(self.per_minute))

    def change(self, per_minute: int, now_s: float) -> None:
        """From now on it is another rate; what was taken stays taken."""
        self._fill(now_s)
        taken = self.per_minute - self._level
        self.per_minute, self._level = per_minute, per_minute - taken

    def is_full(self, now_s: float) -> bool:
        """Whether a new one would be the same."""
        self._fill(now_s)
        return self._level >= self.per_minute

    def _fill(self, now_s: float) -> None:
        passed_s, self._as_of_s = max(0.0, now_s - self._as_of_s), now_s
        self._level = min(self._level + passed_s * self.per_minute / 60.0, float(self.per_minute))
