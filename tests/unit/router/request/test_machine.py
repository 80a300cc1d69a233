"""A request's way without failures, and its ends."""

from dataclasses import replace

import pytest

from diptych.errors import (
    BlocksExhaustedError,
    DeadlineExceededError,
    DiptychError,
    NoWorkerError,
    QueueTimeoutError,
    WorkerDrainingError,
)
from diptych.v1 import common_pb2
from router.generation.answer import KVPath
from router.request import actions, events
from router.request.request_state import RequestState
from tests.unit.router.request.world import (
    LENGTH,
    PROMPT,
    QUEUE_ENDS_IN_S,
    STOP,
    TIMERS,
    World,
    worker,
)


def test_the_plain_path() -> None:
    world = World().begin()
    assert (world.lease.worker, world.reservation.worker) == (worker("p1"), worker("d1"))
    assert world.reservation.to_pull
    world.accept(cached=3)
    world.reserve()
    assert world.grants[world.lease.sequence_id].reader == worker("d1")
    assert not world.binds
    world.grant()
    assert world.binds[world.reservation.sequence_id].source == worker("p1")
    world.first(20)
    assert world.emitted == [20]
    world.prove()
    assert not world.leases
    assert world.started[world.reservation.sequence_id].emitted == (20,)
    world.tokens(21)
    world.tokens(22, 23)
    world.end_reservation(LENGTH, preemptions=2)
    assert world.emitted == [20, 21, 22, 23]
    assert world.outcome == LENGTH
    machine = world.machine
    assert (machine.num_attempts, machine.num_preemptions, machine.attempt.num_cached_tokens) == (
        1,
        2,
        3,
    )
    assert machine.attempt.kv_path == KVPath.DISAGGREGATED
    assert machine.attempt.transfer is not None
    world.check_nothing_is_held()


def test_a_sequence_that_was_handed_off_is_decoding() -> None:
    world = World().begin()
    world.bind()
    world.first()
    states = [world.machine.state]
    world.prove()
    states.append(world.machine.state)
    assert states == [RequestState.PLACED, RequestState.DECODING]


def test_proof_before_the_first_token_waits_for_it() -> None:
    world = World().begin()
    world.bind()
    world.prove()
    assert world.leases
    assert not world.started
    world.first()
    assert world.started
    assert not world.leases


def test_whole_prompt_cached_needs_no_bind() -> None:
    world = World().begin()
    world.reserve(cached=len(PROMPT))
    world.accept()
    assert not world.grants
    world.first()
    assert world.started
    assert not world.binds
    assert not world.leases


def test_first_token_that_ends_the_sequence_releases_both() -> None:
    world = World(stop_token_ids=frozenset({20})).begin()
    world.bind()
    world.first(20, reason=STOP)
    assert world.outcome == STOP
    world.check_nothing_is_held()


def test_one_token_runs_on_prefill_alone() -> None:
    world = World(max_tokens=1).begin()
    assert not world.reservations
    world.accept()
    world.first(20, reason=LENGTH)
    assert world.outcome == LENGTH
    assert world.machine.attempt.kv_path == KVPath.PREFILL_ONLY
    world.check_nothing_is_held()


def test_without_prefill_workers_decode_computes_itself() -> None:
    world = World(prefills=()).begin()
    assert not world.leases
    world.reserve()
    assert world.started[world.reservation.sequence_id].compute_missing
    world.tokens(20)
    world.tokens(21, 22, 23)
    world.end_reservation(LENGTH)
    assert world.outcome == LENGTH
    assert world.machine.attempt.kv_path == KVPath.LOCAL


def test_stop_string_releases_at_once() -> None:
    world = World(stop_at=2).begin()
    world.hand_off()
    world.tokens(21)
    assert world.outcome == STOP
    world.check_nothing_is_held()


def test_last_token_without_ended_finishes_soon() -> None:
    world = World().begin()
    world.hand_off()
    world.tokens(21, 22, 23)
    assert world.outcome is None
    world.pass_time(TIMERS.accept_s)
    assert world.outcome == LENGTH
    world.check_nothing_is_held()


def test_an_answer_that_is_whole_by_its_deadline_is_one() -> None:
    """Though its worker's Ended comes late, and brings nothing but counts."""
    world = World(deadline_s=110.0).begin()
    world.hand_off()
    world.now = 110.0 - TIMERS.accept_s / 2
    world.tokens(21, 22, 23)
    world.pass_time(TIMERS.accept_s / 2)
    assert world.outcome == LENGTH
    world.check_nothing_is_held()


def test_deadline_frees_everything_at_once() -> None:
    world = World(deadline_s=110.0).begin()
    world.hand_off()
    assert world.machine.wake_at_s == 110.0
    world.pass_time(10)
    assert isinstance(world.outcome, DeadlineExceededError)
    world.check_nothing_is_held()


@pytest.mark.parametrize("num_steps", range(6))
def test_cancel_at_every_stage(num_steps: int) -> None:
    world = World().begin()
    steps = (world.accept, world.reserve, world.grant, world.first, world.prove)
    for step in steps[:num_steps]:
        step()
    world.on(events.Cancelled())
    world.check_nothing_is_held()
    assert world.machine.wake_at_s is None


def test_a_running_sequences_tokens_cost_neither_clock_nor_action_nor_question() -> None:
    world = World(max_tokens=40).begin()
    world.hand_off()
    before = (world.num_clock_calls, world.num_asked, len(world.log), world.machine.wake_at_s)
    for token in range(21, 50):
        world.tokens(token)
    after = (world.num_clock_calls, world.num_asked, len(world.log), world.machine.wake_at_s)
    assert before == after
    assert world.emitted == list(range(20, 50))


def test_placement_is_asked_once_for_one_that_nothing_happens_to() -> None:
    world = World().begin()
    world.hand_off()
    world.tokens(21, 22, 23)
    world.end_reservation(LENGTH)
    assert world.num_asked == 1


def test_another_choice_says_when_workers_granted_it_all() -> None:
    """It was queued in front, and nobody is to be held back for it any longer than that."""
    world = World()
    world.on(events.Begin(front=True))
    world.accept()
    assert actions.Settled() not in world.log
    world.reserve()
    assert world.log.count(actions.Settled()) == 1
    world.grant()
    world.first()
    world.prove()
    assert world.log.count(actions.Settled()) == 1


def test_another_choice_waits_for_its_sisters_as_long_as_they_take() -> None:
    """They alone may be what it waits for: it would end them, and the request."""
    world = World()
    world.is_full = True
    world.on(events.Begin(front=True))
    for _ in range(3):
        world.now += TIMERS.no_worker_s + 0.1
        world.on(events.Tick())
    assert world.queued
    assert not any(isinstance(each, actions.Fail) for each in world.log)
    world.is_full = False
    world.pump(room_made=True)
    world.bind()
    world.is_full = True
    world.lose_lease()
    world.now += TIMERS.no_worker_s + 0.1
    world.on(events.Tick())  # once it was placed it waits as any other
    assert isinstance(world.log[-1], actions.Fail)
    assert isinstance(world.log[-1].error, QueueTimeoutError)


def test_a_worker_that_refuses_another_choice_once_does_not_end_it() -> None:
    """Its blocks may be its sisters'."""
    world = World(("p1",), ("d1",), local_prefill=True, believed_cached=("d1",))
    world.on(events.Begin(front=True))
    world.end_reservation(error=BlocksExhaustedError("no free blocks"))
    world.is_full = True
    for _ in range(3):
        world.pass_time(TIMERS.no_worker_s + 0.1)
    assert world.queued
    assert world.outcome is None
    world.is_full = False
    world.pump(room_made=True)
    assert world.reservations


def test_a_worker_that_does_not_answer_another_choice_does_not_keep_it_for_ever() -> None:
    world = World(("p1",), ("d1",), local_prefill=True, believed_cached=("d1",))
    world.on(events.Begin(front=True))
    world.is_full = True
    world.pass_time(TIMERS.accept_s + 0.1)
    assert world.queued
    world.pass_time(TIMERS.no_worker_s + 0.1)
    assert world.outcome is not None


def test_another_choice_does_not_wait_where_no_worker_is_left() -> None:
    world = World()
    world.prefills, world.decodes = [], []
    world.on(events.Begin(front=True))
    world.now += TIMERS.no_worker_s + 0.1
    world.on(events.Tick())
    assert isinstance(world.log[-1], actions.Fail)
    assert isinstance(world.log[-1].error, NoWorkerError)


def test_another_choice_does_not_wait_for_workers_that_could_never_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who had room for one so long is gone, with its sisters; others are there."""
    world = World()
    world.is_full = True
    world.on(events.Begin(front=True))
    world.pass_time(TIMERS.no_worker_s + 0.1)
    assert world.queued
    short = tuple(replace(view, max_model_len=4) for view in world.snapshot().decode)
    left = replace(world.snapshot(), decode=short)
    monkeypatch.setattr(world, "snapshot", lambda: left)
    world.pass_time(TIMERS.no_worker_s + 0.1)
    assert isinstance(world.outcome, NoWorkerError)
    assert "busy or not" in world.outcome.message


@pytest.mark.parametrize(
    ("refusal", "told"),
    [(WorkerDrainingError("bye"), QueueTimeoutError), (BlocksExhaustedError("full"), None)],
)
def test_a_worker_that_went_is_not_why_a_request_waited_too_long_behind_others(
    refusal: DiptychError, told: type[DiptychError] | None
) -> None:
    """Its client is told when the queue has room; those that are short of blocks are there."""
    world = World(("p1",), ("d1",)).begin()
    world.is_full = True
    world.lose_lease(refusal)
    assert world.queued
    world.prefills = ["p2"]
    world.pass_time(TIMERS.no_worker_s)
    assert isinstance(world.outcome, told or type(refusal))
    if told is not None:
        assert world.outcome.retry_after_s == QUEUE_ENDS_IN_S


def test_one_that_was_placed_again_says_so_too_and_one_that_waited_for_its_turn_does_not() -> None:
    world = World().begin()
    world.bind()
    assert actions.Settled() not in world.log
    world.is_full = True
    world.lose_lease()
    assert world.queued
    world.is_full = False
    world.pump(room_made=True)
    world.bind()
    assert world.log.count(actions.Settled()) == 1


def test_tokens_of_a_reservation_that_was_given_up_are_nobodys() -> None:
    world = World().begin()
    world.hand_off()
    given_up = world.reservation.sequence_id
    world.lose_reservation()
    world.hand_off()
    emitted = list(world.emitted)
    position = len(PROMPT) + len(emitted)
    world.on(events.Tokens(given_up, position, (99,), ()))
    assert world.emitted == emitted
    world.tokens(22)
    assert world.emitted == [*emitted, 22]


def test_only_the_newest_grant_and_the_newest_pull_count() -> None:
    """What is said late of those before it means nothing."""
    world = World().begin()
    world.bind()
    world.first()
    lease_id, sequence_id = world.lease.sequence_id, world.reservation.sequence_id
    world.pull_fails()
    assert world.grants[lease_id].grant_id == 2
    world.on(events.Granted(lease_id, 1))
    assert world.binds[sequence_id].bind_id == 1
    world.on(events.Granted(lease_id, 2))
    assert world.binds[sequence_id].bind_id == 2
    world.on(events.Proven(sequence_id, 1, common_pb2.TransferStats()))
    assert not world.started
    world.prove()
    assert world.started


def test_each_grant_has_a_ticket_of_its_own_which_its_pull_shows() -> None:
    """A source takes none twice."""
    world = World().begin()
    world.bind()
    world.first()
    world.pull_fails()
    world.bind()
    granted = [each.ticket for each in world.log if isinstance(each, actions.Grant)]
    shown = [each.ticket for each in world.log if isinstance(each, actions.Bind)]
    assert granted == shown == [number.to_bytes(16, "big") for number in (1, 2)]
