"""A peer is lost when it is silent, or its engine stands still while a step is due."""

from diptych.timers import Timers
from diptych.v1 import common_pb2
from kvtransfer.liveness import PeerLiveness

TIMERS = Timers(heartbeat_s=1.0, lost_peer_s=4.5)


def ticked(liveness: PeerLiveness, start: float, end: float) -> str | None:
    """The first problem found by looking twice a second."""
    for half_seconds in range(int(start * 2), int(end * 2) + 1):
        problem = liveness.problem(half_seconds / 2)
        if problem is not None:
            return problem
    return None


def progress(num_steps: int, due: bool = True, predicted_s: float = 0) -> common_pb2.EngineProgress:
    return common_pb2.EngineProgress(
        num_steps=num_steps, step_due=due, predicted_step_s=predicted_s
    )


def test_a_silent_peer_is_lost() -> None:
    liveness = PeerLiveness(TIMERS, 0)
    assert ticked(liveness, 0, 4.5) is None
    liveness.heard()
    assert ticked(liveness, 5, 9) is None
    assert "no heartbeat" in (ticked(liveness, 9.5, 11) or "")


def test_our_own_stall_is_not_the_peers() -> None:
    liveness = PeerLiveness(TIMERS, 0)
    assert liveness.problem(60) is None
    assert "no heartbeat" in (ticked(liveness, 60, 63) or "")


def test_an_engine_that_stands_still_is_lost() -> None:
    liveness = PeerLiveness(TIMERS, 0)
    for second in range(10):
        liveness.heard(progress(second))
        assert liveness.problem(second) is None
    for second in range(10, 13):
        liveness.heard(progress(9, predicted_s=1))
        assert liveness.problem(second) is None
    problem = None
    for second in range(13, 20):
        liveness.heard(progress(9, predicted_s=1))
        problem = problem or liveness.problem(second)
    assert problem is not None
    assert "not finished a step" in problem


def test_an_idle_engine_is_not() -> None:
    liveness = PeerLiveness(TIMERS, 0)
    for second in range(20):
        liveness.heard(progress(9, due=False))
        assert liveness.problem(second) is None
