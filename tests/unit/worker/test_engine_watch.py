"""A model thread that does not come back from a step ends its worker, and no other does."""

import pytest

from diptych.timers import Timers
from diptych.v1 import common_pb2
from diptych.worker.engine_watch import EngineStuckError, EngineWatch

TIMERS = Timers(heartbeat_s=1.0, lost_peer_s=4.5)


class Rig:
    """A watch, its clock, and what the engine tells."""

    def __init__(self) -> None:
        self.now = 100.0
        self.engine = common_pb2.EngineProgress(step_due=True, predicted_step_s=0.5)
        self.watch = EngineWatch(lambda: self.engine, TIMERS, lambda: self.now)

    def turns(self, seconds: float) -> None:
        """Let time pass in the watch's own turns."""
        for _ in range(round(seconds / self.watch.turn_s)):
            self.now += self.watch.turn_s
            self.watch.check()


def test_a_step_has_its_patience_and_twice_its_prediction() -> None:
    rig = Rig()
    rig.turns(5.25)
    with pytest.raises(EngineStuckError, match=r"stuck: no engine step for 5\.5 s"):
        rig.turns(0.25)


def test_a_step_of_unknown_length_has_twice_the_patience() -> None:
    rig = Rig()
    rig.engine.predicted_step_s = 0.0
    rig.turns(8.75)
    with pytest.raises(EngineStuckError, match=r"9\.0 s"):
        rig.turns(0.25)


def test_steps_that_end_are_forgiven_each() -> None:
    rig = Rig()
    for _ in range(4):
        rig.turns(5.0)
        rig.engine.num_steps += 1
        rig.turns(0.25)


def test_an_idle_engine_owes_nothing() -> None:
    rig = Rig()
    rig.turns(5.0)
    rig.engine.step_due = False
    rig.turns(60.0)
    rig.engine.step_due = True
    rig.turns(5.25)
    with pytest.raises(EngineStuckError):
        rig.turns(0.25)


def test_a_process_that_was_stopped_does_not_blame_its_model_thread() -> None:
    rig = Rig()
    rig.turns(3.0)
    rig.now += 3600.0
    rig.watch.check()  # an hour late, and worth two heartbeats
    rig.engine.num_steps += 1
    rig.turns(5.0)
