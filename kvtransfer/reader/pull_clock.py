"""When what happened in one pull: whether it takes too long, and the figures made of it."""

from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2
from kvtransfer.reader.pull_machine import PullError, PullMachine, PullState

_OVERDUE_RATIO = 1.5  # of the time between heartbeats: a source that is there is never as silent


class PullClock:
    """Collects instants (seconds of one monotonic clock, passed in); pure. Event loop only."""

    def __init__(self, timers: Timers, now: float, *, in_queue: bool = False) -> None:
        """``in_queue``: the source lets it wait for its turn before it opens, as every probe."""
        self._timers = timers
        self._in_queue = in_queue
        self._started_s = now
        self._moved_s = now  # anything: a message that matters, a landing
        self._last_range_s = 0.0
        self._proven_s = 0.0
        self._digest_s = 0.0  # a length
        self._busy_since_s = 0.0
        self._reads: list[tuple[float, float]] = []

    def moved(self, now: float) -> None:
        """The pull made progress just now."""
        self._moved_s = now

    def announced(self, now: float, *, idle: bool) -> None:
        """A range came; ``idle``: nothing that came before is still to land."""
        self._last_range_s = now
        if idle:
            self._moved_s = self._busy_since_s = now

    def landed(
        self, now: float, started_s: float | None, ended_s: float, digest_s: float = 0.0
    ) -> None:
        """A read took this long; without a start it began when the pull was last idle."""
        self.moved(now)
        self._reads.append((self._busy_since_s if started_s is None else started_s, ended_s))
        self._digest_s += digest_s

    def proven(self, now: float) -> None:
        """The source confirmed."""
        self._proven_s = now

    def problem(self, now: float, machine: PullMachine, silence_s: float) -> PullError | None:
        """How the pull has failed by standing still, or None.

        ``silence_s``: for how long nothing at all has come from the source.
        """
        idle_s = now - self._moved_s
        match machine.state:
            case PullState.WAITING if idle_s > self._timers.read_progress_s:
                message = "an earlier read of these blocks is unfinished"
                return PullError(decode_pb2.PULL_FAILURE_TRANSPORT, message, unasked=True)
            case PullState.CONFIRMING if idle_s > self._timers.confirm_s:
                return self._unconfirmed(silence_s)
            case PullState.OPENING if self._in_queue:
                return None  # its heartbeats say that it is there
            case PullState.READING if not machine.num_unlanded_blocks:
                return None  # the source computes, and its heartbeats say so
        if idle_s > self._timers.read_progress_s:
            message = f"no progress for {idle_s:.1f} s"
            return PullError(decode_pb2.PULL_FAILURE_TRANSPORT, message)
        return None

    def stats(self, transport: str, num_bytes: int, num_tokens: int) -> common_pb2.TransferStats:
        """The figures of a proven pull."""
        return common_pb2.TransferStats(
            transport=transport,
            num_bytes=num_bytes,
            num_tokens=num_tokens,
            read_s=self._read_s(),
            exposed_s=self._proven_s - self._last_range_s,
            total_s=self._proven_s - self._started_s,
            digest_s=self._digest_s,
        )

    def _unconfirmed(self, silence_s: float) -> PullError | None:
        message = f"not confirmed within {self._timers.confirm_s} s"
        if silence_s > self._timers.confirm_s:  # no heartbeat either
            return PullError(decode_pb2.PULL_FAILURE_SOURCE_LOST, f"the source is lost: {message}")
        if silence_s > _OVERDUE_RATIO * self._timers.heartbeat_s:  # soon it is known which of both
            return None
        return PullError(decode_pb2.PULL_FAILURE_UNPROVEN, message)

    def _read_s(self) -> float:
        """Length of the union of all reads."""
        total_s, covered_s = 0.0, 0.0
        for started_s, ended_s in sorted(self._reads):
            total_s += max(0.0, ended_s - max(started_s, covered_s))
            covered_s = max(covered_s, ended_s)
        return total_s
