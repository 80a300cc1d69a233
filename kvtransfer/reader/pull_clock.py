"""When what happened in one pull, and the figures made of it."""

import time

from diptych.v1 import common_pb2


class PullClock:
    """Collects instants (time.monotonic); knows nothing of why. Event loop only."""

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.moved_s = started_s  # anything: a message that matters, a landing
        self.last_range_s = 0.0
        self.proven_s = 0.0
        self.digest_s = 0.0  # a length
        self._busy_since_s = 0.0
        self._reads: list[tuple[float, float]] = []

    def moved(self) -> None:
        """The pull made progress just now."""
        self.moved_s = time.monotonic()

    def announced(self, idle: bool) -> None:
        """A range came; ``idle``: nothing that came before is still to land."""
        self.last_range_s = time.monotonic()
        if idle:
            self.moved_s = self._busy_since_s = self.last_range_s

    def landed(self, started_s: float | None, ended_s: float, digest_s: float) -> None:
        """A read took this long; without a start it began when the pull was last idle."""
        self.moved()
        self._reads.append((self._busy_since_s if started_s is None else started_s, ended_s))
        self.digest_s += digest_s

    def proven(self) -> None:
        self.proven_s = time.monotonic()

    def stats(self, transport: str, num_bytes: int, num_tokens: int) -> common_pb2.TransferStats:
        """The figures of a proven pull."""
        return common_pb2.TransferStats(
            transport=transport,
            num_bytes=num_bytes,
            num_tokens=num_tokens,
            read_s=self._read_s(),
            exposed_s=self.proven_s - self.last_range_s,
            total_s=self.proven_s - self.started_s,
            digest_s=self.digest_s,
        )

    def _read_s(self) -> float:
        """Length of the union of all reads."""
        total_s, covered_s = 0.0, 0.0
        for started_s, ended_s in sorted(self._reads):
            total_s += max(0.0, ended_s - max(started_s, covered_s))
            covered_s = max(covered_s, ended_s)
        return total_s
