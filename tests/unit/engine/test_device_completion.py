"""Nothing is announced, cached, freed or sampled before the device has completed the step.

Searched for by :mod:`tests.unit.engine.late_machine`, in ten thousand walks over a device with two
steps in flight, and by Hypothesis, which shrinks what it finds. Each way to be hasty breaks the
promise that it should.
"""

import logging
import re
from collections.abc import Collection, Mapping

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from diptych.engine.scheduling import chunks, scheduler
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.block_tables import BlockTables
from diptych.engine.scheduling.scheduler import Scheduler
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import Chunk, SampledToken, SequenceUpdate, StepOutput, StepPlan
from diptych.engine.scheduling.step_results import StepResults
from diptych.errors import DiptychError
from tests import notes
from tests.search_seed import seed_of
from tests.unit.engine import late_machine
from tests.unit.engine.late_device import (
    HastyLaunchingThread,
    ModelThread,
    ReadingEarlyThread,
)
from tests.unit.engine.late_machine import AheadMachine, DeviceMachine
from tests.unit.engine.scheduling.early_frees import (
    free_with_the_release,
    free_with_the_step_that_ends_it,
)
from tests.unit.engine.scheduling.mutations import Patch

IS_LONG = settings.get_current_profile_name() == "long"
NUM_WALKS = 10_000
NUM_WALKS_TO_FIND = 500
NUM_RUNS = 10_000 if IS_LONG else 200
EVENTS = (
    "two in flight",
    "followed",
    "preempted",
    "stop found late",
    "cancelled in flight",
    "fetched",
    "broken off",
    "failed step",
)

TestDevice = DeviceMachine.TestCase
TestDevice.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_two_steps_in_flight_keep_every_promise_in_every_order(note: notes.Note) -> None:
    search = settings(max_examples=NUM_RUNS, stateful_step_count=60, deadline=None)
    AheadMachine.met.clear()
    run_state_machine_as_test(AheadMachine, settings=search)
    met = {event: AheadMachine.met[event] for event in EVENTS}
    note(f"a late device, {NUM_RUNS} runs: {met}")
    assert all(met.values()), met


@pytest.mark.timeout(900)
def test_ten_thousand_walks_keep_every_promise(
    note: notes.Note, search_seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """From the run's seed on: every run walks elsewhere."""
    AheadMachine.met.clear()
    caplog.set_level(logging.CRITICAL, "diptych")  # steps fail by the thousand
    for seed in walks_from(search_seed):
        said = said_of_walk(seed)
        assert not said, said
    met = {event: AheadMachine.met[event] for event in EVENTS}
    note(f"a late device, {NUM_WALKS} walks from {search_seed}: {met}")
    assert all(met.values()), met


def walks_from(first: int) -> range:
    return range(first, first + NUM_WALKS)


def said_of_walk(seed: int) -> str:
    """What is wrong in it, and which it is; nothing, if nothing is."""
    try:
        AheadMachine.walk(seed)
    except Exception as broken:  # noqa: BLE001 - however it ends, it can be walked again
        return f"AheadMachine.walk({seed}): {broken!r}"
    return ""


def test_each_run_walks_elsewhere_and_says_from_where(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    walked: list[int] = []
    said: list[str] = []

    def walk(seed: int) -> None:
        walked.append(seed)
        AheadMachine.met.update(EVENTS)

    monkeypatch.setattr(AheadMachine, "walk", walk)
    firsts = [seed_of(None), seed_of("random"), seed_of("17")]
    for first in firsts:
        test_ten_thousand_walks_keep_every_promise(said.append, first, caplog)
    assert firsts[-1] == 17
    assert len({*firsts, seed_of(None), seed_of("random")}) == 5
    assert walked == [seed for first in firsts for seed in walks_from(first)]
    for first, text in zip(firsts, said, strict=True):
        assert f"from {first}:" in text


def test_a_walk_that_breaks_in_any_way_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Scheduler, plan: StepPlan, output: StepOutput) -> list[SequenceUpdate]:
        raise KeyError("lost")

    monkeypatch.setattr(Scheduler, "update", step)
    broken = next(filter(None, map(said_of_walk, range(17, 17 + NUM_WALKS_TO_FIND))))
    assert re.fullmatch(r"AheadMachine\.walk\(\d+\): KeyError\('lost'\)", broken)


def over(thread: type[ModelThread]) -> Patch:
    """A model thread that does not wait for an event."""
    return lambda patch: patch.setattr(AheadMachine, "model_thread", thread)


def cache_with_the_plan(patch: pytest.MonkeyPatch) -> None:
    original = chunks.next_chunk

    def next_chunk(
        seq: Sequence, end: int, tables: BlockTables, drawn_by: Mapping[Sequence, int]
    ) -> Chunk:
        chunk = original(seq, end, tables, drawn_by)
        tables.enter_computed(seq, chunk.start, min(end, seq.num_tokens))
        return chunk

    patch.setattr(scheduler, "next_chunk", next_chunk)


def announce_the_step_in_flight(patch: pytest.MonkeyPatch) -> None:
    original = StepResults._book

    def book(
        self: StepResults, seq: Sequence, chunk: Chunk, token: SampledToken | DiptychError | None
    ) -> SequenceUpdate:
        num_in_flight = seq.num_in_flight_tokens
        update = original(self, seq, chunk, token)
        return update._replace(num_computed_tokens=update.num_computed_tokens + num_in_flight)

    patch.setattr(StepResults, "_book", book)


def go_on_from_another_row(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._plan

    def plan(self: Scheduler, ends: Mapping[Sequence, int]) -> StepPlan:
        made = original(self, ends)
        followers = [chunk for chunk in made.chunks if chunk.follows is not None]
        rows = [chunk.follows for chunk in reversed(followers)]
        for chunk, row in zip(followers, rows, strict=True):
            object.__setattr__(chunk, "follows", row)
        return made

    patch.setattr(Scheduler, "_plan", plan)


def tell_of_who_has_ended(patch: pytest.MonkeyPatch) -> None:
    original = StepResults._leave_batch

    def leave(self: StepResults, seq: Sequence) -> None:
        if not seq.num_in_flight_tokens or seq.prefill_only:
            original(self, seq)  # the others end with their last step instead

    patch.setattr(StepResults, "_leave_batch", leave)


def forget_whom_the_step_ahead_served(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.update

    def update(self: Scheduler, plan: StepPlan, output: StepOutput) -> list[SequenceUpdate]:
        ahead = {
            seq
            for seq, chunk in zip(self.owners(plan), plan.chunks, strict=True)
            if chunk.follows is not None
        }
        return [each for each in original(self, plan, output) if each.sequence not in ahead]

    patch.setattr(Scheduler, "update", update)


def hand_out_what_reads_may_write(patch: pytest.MonkeyPatch) -> None:
    def quarantine(self: BlockPool, block_ids: Collection[int]) -> None:
        pass

    patch.setattr(BlockPool, "quarantine", quarantine)


FREED = f"{late_machine.FREED_EARLY}|{late_machine.REUSED_EARLY}"
ANNOUNCED = f"{late_machine.ANNOUNCED_EARLY}|{late_machine.TAKEN_FROM_READERS}"
TOLD = f"{late_machine.ANNOUNCED_EARLY}|{late_machine.CACHED_EARLY}"
MIXED_UP = f"{late_machine.WRONG_TOKEN}|ATTENDED"
READ_INTO = f"{late_machine.READ_INTO_A_STEP}|quarantined 0"
MUTATIONS: list[tuple[str, Patch, str]] = [
    ("no wait without tokens", over(HastyLaunchingThread), TOLD),
    ("no wait for tokens", over(ReadingEarlyThread), f"{TOLD}|{late_machine.WRONG_TOKEN}"),
    ("freed with its end", free_with_the_step_that_ends_it, FREED),
    ("freed with the release", free_with_the_release, FREED),
    ("cached with the plan", cache_with_the_plan, late_machine.CACHED_EARLY),
    ("announced in flight", announce_the_step_in_flight, ANNOUNCED),
    ("another one's row", go_on_from_another_row, MIXED_UP),
    ("told of who has ended", tell_of_who_has_ended, MIXED_UP),
    ("a token lost", forget_whom_the_step_ahead_served, late_machine.WRONG_TOKEN),
    ("no quarantine", hand_out_what_reads_may_write, READ_INTO),
]


@pytest.mark.parametrize(
    ("patch", "promise"), [each[1:] for each in MUTATIONS], ids=[each[0] for each in MUTATIONS]
)
def test_the_mutation_is_found(patch: Patch, promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    assert any(re.search(promise, said_of_walk(seed)) for seed in range(NUM_WALKS_TO_FIND))
