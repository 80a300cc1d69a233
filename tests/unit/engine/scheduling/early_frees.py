"""Bugs that free what a step in flight may still write to, for the machines that must find them."""

import pytest

from diptych.engine.scheduling.block_pool import Owner
from diptych.engine.scheduling.scheduler import Scheduler
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step_results import StepResults


def free_with_the_step_that_ends_it(patch: pytest.MonkeyPatch) -> None:
    def drop(self: StepResults, seq: Sequence) -> None:
        if seq.block_table:
            self._tables.drop(seq, Owner.RUNNING)

    patch.setattr(StepResults, "_drop_if_landed", drop)


def free_with_the_release(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.release

    def release(self: Scheduler, seq: Sequence) -> None:
        num, seq.num_in_flight_tokens = seq.num_in_flight_tokens, 0
        original(self, seq)
        seq.num_in_flight_tokens = num

    patch.setattr(Scheduler, "release", release)
