"""Is the peer of a long stream alive, and its engine advancing? Pure; clock passed in."""

from diptych.timers import Timers
from diptych.v1 import common_pb2


class PeerLiveness:
    """Judges one peer by its messages and heartbeats.

    Silence is counted in ticks no longer than ``2 * heartbeat_s``: a stall of the
    judge's own event loop is not held against the peer. Times in seconds.
    """

    def __init__(self, timers: Timers, now: float) -> None:
        self._timers = timers
        self._silence_s = 0.0
        self._stuck_s = 0.0
        self._ticked_at = now
        self._progress: common_pb2.EngineProgress | None = None

    def heard(self, progress: common_pb2.EngineProgress | None = None) -> None:
        """A message came; a heartbeat brings the engine's progress too."""
        self._silence_s = 0.0
        if progress is None:
            return
        last = self._progress
        if last is None or not progress.step_due or progress.num_steps != last.num_steps:
            self._stuck_s = 0.0
        self._progress = progress

    @property
    def silence_s(self) -> float:
        """Since the last message, as of the last ``problem``."""
        return self._silence_s

    def problem(self, now: float) -> str | None:
        """Why the peer is lost, or None. Call at least once per ``heartbeat_s``."""
        tick_s = min(now - self._ticked_at, 2 * self._timers.heartbeat_s)
        self._ticked_at = now
        self._silence_s += tick_s
        if self._silence_s > self._timers.lost_peer_s:
            return f"no heartbeat for {self._silence_s:.1f} s"
        if self._progress is not None and self._progress.step_due:
            self._stuck_s += tick_s
            if self._stuck_s > self._timers.lost_peer_s + self._progress.predicted_step_s:
                return f"its engine has not finished a step for {self._stuck_s:.1f} s"
        return None
