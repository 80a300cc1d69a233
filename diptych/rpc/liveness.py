"""Is the peer of a long stream alive, and its engine advancing? Pure; clock passed in.

The one rule of the cluster, for whoever reads a stream with heartbeats: routers
judge workers by it, a decode worker its source, a source its reader.
"""

from diptych.timers import Timers
from diptych.v1 import common_pb2


class Liveness:
    """Judges one peer by the messages of one stream.

    A peer is lost when it is silent for ``lost_peer_s``, or when a step of its engine
    has been due for ``lost_peer_s`` and the time that a step is allowed: twice its
    prediction, and another ``lost_peer_s`` where there is none, as for the first step of
    an engine that timed none before it.

    The judge counts time in ticks of at most ``2 * heartbeat_s``, so that a pause
    of its own event loop is not held against the peer. Times in seconds.
    """

    def __init__(self, timers: Timers, now: float) -> None:
        self._timers = timers
        self._checked_at = now
        self._silent_s = 0.0
        self._stalled_s = 0.0
        self._num_steps: int | None = None
        self._step_due = False
        self._allowed_s = 0.0

    @property
    def check_every_s(self) -> float:
        """How often to call :meth:`problem`."""
        return self._timers.heartbeat_s / 4

    @property
    def silent_s(self) -> float:
        """Time without a message, as of the last :meth:`problem`."""
        return self._silent_s

    def heard(self, progress: common_pb2.EngineProgress | None = None) -> None:
        """A message came; ``progress`` where it tells how the peer's engine stands."""
        self._silent_s = 0.0
        if progress is None:
            return
        if not progress.step_due or progress.num_steps != self._num_steps:
            self._stalled_s = 0.0
        self._num_steps, self._step_due = progress.num_steps, progress.step_due
        self._allowed_s = 2 * progress.predicted_step_s or self._timers.lost_peer_s

    def problem(self, now: float) -> str | None:
        """Why the peer is lost; None while it is not."""
        tick_s = min(now - self._checked_at, 2 * self._timers.heartbeat_s)
        self._checked_at = now
        self._silent_s += tick_s
        if self._silent_s >= self._timers.lost_peer_s:
            return f"silent for {self._silent_s:.1f} s"
        if self._step_due:
            self._stalled_s += tick_s
            if self._stalled_s >= self._timers.lost_peer_s + self._allowed_s:
                return f"no engine step for {self._stalled_s:.1f} s with work waiting"
        return None
