"""A peer is lost when it is silent, or its engine stands still while a step is due."""

import pytest

from diptych.rpc.liveness import Liveness
from diptych.timers import Timers
from diptych.v1 import common_pb2

TIMERS = Timers(heartbeat_s=1.0, lost_peer_s=4.5)
_CHECKS_PER_S = 4


def problem_after(liveness: Liveness, now: float, seconds: float) -> str | None:
    """The first problem that checks from ``now`` on find."""
    for check in range(round(seconds * _CHECKS_PER_S)):
        found = liveness.problem(now + (check + 1) / _CHECKS_PER_S)
        if found is not None:
            return found
    return None


def lost_at(progress: common_pb2.EngineProgress, within: int = 60) -> int | None:
    """In which second a peer is lost whose heartbeats all say ``progress``."""
    liveness = Liveness(TIMERS, 0.0)
    for second in range(within):
        liveness.heard(progress)
        found = problem_after(liveness, second, 1)
        if found is not None:
            assert "no engine step" in found
            return second
    return None


def test_silence_is_noticed_in_five_seconds() -> None:
    liveness = Liveness(TIMERS, 0.0)
    assert problem_after(liveness, 0, 4.25) is None
    liveness.heard()
    assert problem_after(liveness, 4.25, 4.25) is None
    assert "silent" in str(problem_after(liveness, 8.5, 0.5))
    assert liveness.silent_s == 4.5


def test_own_pause_is_not_held_against_the_peer() -> None:
    liveness = Liveness(TIMERS, 0.0)
    assert liveness.problem(60.0) is None
    assert problem_after(liveness, 60, 2.25) is None, "it counts as two heartbeats"
    assert "silent" in str(problem_after(liveness, 62.25, 0.25))


def test_a_due_step_has_twice_its_prediction() -> None:
    due = common_pb2.EngineProgress(num_steps=3, step_due=True, predicted_step_s=1.0)
    assert lost_at(due) == 6


def test_a_first_step_is_unknown_and_has_another_period_of_patience() -> None:
    """A healthy source whose first step takes longer than ``lost_peer_s`` is not lost."""
    assert lost_at(common_pb2.EngineProgress(num_steps=0, step_due=True)) == 8


@pytest.mark.parametrize("idle", [True, False])
def test_steps_or_idleness_keep_it_alive(idle: bool) -> None:
    liveness = Liveness(TIMERS, 0.0)
    for second in range(30):
        num_steps = 3 if idle else second // 4
        liveness.heard(common_pb2.EngineProgress(num_steps=num_steps, step_due=not idle))
        assert problem_after(liveness, second, 1) is None


def test_messages_without_progress_tell_nothing_of_the_engine() -> None:
    liveness = Liveness(TIMERS, 0.0)
    liveness.heard(common_pb2.EngineProgress(num_steps=3, step_due=True, predicted_step_s=1.0))
    found = None
    for second in range(10):
        liveness.heard()
        found = found or problem_after(liveness, second, 1)
    assert "no engine step" in str(found)
