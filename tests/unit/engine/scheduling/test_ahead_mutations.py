"""The scheduler's machine notices whoever plans ahead carelessly, and says what is wrong."""

import re

import pytest
from hypothesis import strategies as st

from diptych.engine.scheduling import scheduler
from diptych.engine.scheduling.making_way import MakingWay
from diptych.engine.scheduling.scheduler import Scheduler
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step_results import StepResults
from tests.unit.engine.scheduling.early_frees import (
    free_with_the_release,
    free_with_the_step_that_ends_it,
)
from tests.unit.engine.scheduling.mutations import Patch, noticed
from tests.unit.engine.scheduling.test_scheduler_machine import AheadMachine


def preempt_who_is_at_work(patch: pytest.MonkeyPatch) -> None:
    def grow(self: Scheduler) -> list[Sequence] | None:
        try:
            going_on = self._grow_running()
        except ValueError:  # there is nobody left to preempt
            return None
        return [seq for seq in going_on if not seq.num_unknown_tokens]

    patch.setattr(Scheduler, "_grow_ahead", grow)


def tell_of_who_has_ended(patch: pytest.MonkeyPatch) -> None:
    original = StepResults._leave_batch

    def leave(self: StepResults, seq: Sequence) -> None:
        if seq.num_in_flight_tokens and not seq.prefill_only:
            return  # it ends with its last step instead
        original(self, seq)

    patch.setattr(StepResults, "_leave_batch", leave)


def go_ahead_of_a_last_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "ends_with_next", lambda seq, max_model_len: False)


def go_ahead_of_a_token_that_the_host_draws(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "waits_for_token", lambda seq: False)


def take_the_blocks_of_who_gives_way_and_is_at_work(patch: pytest.MonkeyPatch) -> None:
    original = MakingWay.make_room

    def make_room(self: MakingWay, num_blocks: int) -> bool:
        is_made = original(self, num_blocks)
        for seq in self._leaving:
            self._preempt(seq)
        self._leaving.clear()
        return is_made

    patch.setattr(MakingWay, "make_room", make_room)


TOO_EARLY = "freed before the last step|reused under a step|a shared or foreign block"
MUTATIONS = [
    (free_with_the_step_that_ends_it, TOO_EARLY),
    (free_with_the_release, TOO_EARLY),
    (preempt_who_is_at_work, f"{TOO_EARLY}|and preempted since"),
    (take_the_blocks_of_who_gives_way_and_is_at_work, f"{TOO_EARLY}|and preempted since"),
    (tell_of_who_has_ended, "behind its end"),
    (go_ahead_of_a_last_token, "ahead of its (one|last) token"),
    (go_ahead_of_a_token_that_the_host_draws, "ahead of a token that the host has to see"),
]


class Crowded(AheadMachine):
    """Sequences get into each other's way, and blocks have no holes."""

    block_sizes, pool_sizes, min_longest = st.just(2), st.just(7), 12

    def draw_windows(self, data: st.DataObject) -> list[int | None]:
        return [None]


@pytest.mark.parametrize(
    ("patch", "message"), MUTATIONS, ids=[patch.__name__ for patch, _ in MUTATIONS]
)
def test_the_mutation_is_found(patch: Patch, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    said: list[str] = []
    error: BaseException | None = noticed(Crowded)
    while error is not None:  # what the teardown met hides what led to it
        said.append(str(error).partition("Failing test case")[0])
        error = error.__context__
    assert re.search(message, "; ".join(said)), said
