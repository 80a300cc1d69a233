"""What a request's machine does when workers refuse, fail and die."""

import pytest

from diptych.errors import (
    RETRY_LATER_S,
    BlocksExhaustedError,
    DiptychError,
    InvalidRequestError,
    LeaseExpiredError,
    LogitsError,
    NoWorkerError,
    QueueTimeoutError,
    StepFailedError,
    TransferInterruptedError,
    WorkerLostError,
)
from diptych.v1 import decode_pb2
from router.generation.answer import KVPath
from router.placement.placement import DecodeOnly, Paired, Placement, Why
from router.placement.query import Query
from router.request import actions
from router.request.request_state import RequestState
from tests.unit.router.request.world import (
    LENGTH,
    PROMPT,
    QUEUE_ENDS_IN_S,
    TIMERS,
    World,
    worker,
)


def test_refusal_by_decode_keeps_the_lease() -> None:
    world = World().begin()
    lease = world.lease
    world.end_reservation(error=BlocksExhaustedError("full"))
    assert world.lease is lease
    assert world.reservation.worker == worker("d2")
    assert world.machine.num_attempts == 1
    world.hand_off()
    assert world.started


def test_refusal_by_prefill_keeps_the_reservation() -> None:
    world = World().begin()
    reservation = world.reservation
    world.lose_lease(BlocksExhaustedError("full"))
    assert world.reservation is reservation
    assert world.lease.worker == worker("p2")


def test_all_refuse_then_waits_then_says_why() -> None:
    world = World(prefills=("p1",), decodes=("d1",)).begin()
    for pause_s in (0.05, 0.1, 0.2):
        world.end_reservation(error=BlocksExhaustedError("full"))
        assert world.queued
        world.pump()
        assert world.queued, "not before the pause is over"
        world.pass_time(pause_s)
        assert not world.queued
    world.end_reservation(error=BlocksExhaustedError("full"))
    world.decodes.clear()
    world.pass_time(TIMERS.no_worker_s)
    assert isinstance(world.outcome, BlocksExhaustedError)
    world.check_nothing_is_held()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_client_hears_when_to_come_back_whoever_refused(role: str) -> None:
    world = World(prefills=("p1",), decodes=("d1",)).begin()
    refusal = BlocksExhaustedError("full")
    assert refusal.retry_after_s is None
    if role == "prefill":
        world.lose_lease(refusal)
    else:
        world.end_reservation(error=refusal)
    assert world.queued
    world.decodes.clear()
    world.pass_time(TIMERS.no_worker_s)
    assert isinstance(world.outcome, BlocksExhaustedError)
    assert world.outcome.retry_after_s == RETRY_LATER_S


@pytest.mark.parametrize(("drawn", "pause_s"), [(0.0, 0.025), (0.5, 0.05), (0.99, 0.0745)])
def test_those_who_refuse_each_other_do_not_come_again_at_one_moment(
    drawn: float, pause_s: float
) -> None:
    """Each may hold what the other lacks: then neither would ever be served."""
    world = World(prefills=("p1",), decodes=("d1",), draw=lambda: drawn).begin()
    world.end_reservation(error=BlocksExhaustedError("full"))
    assert world.machine.wake_at_s == pytest.approx(world.now + pause_s)


def test_a_pause_is_over_when_room_was_made() -> None:
    world = World(prefills=("p1",), decodes=("d1",)).begin()
    world.end_reservation(error=BlocksExhaustedError("full"))
    world.pump()
    assert world.queued
    world.pump(room_made=True)
    assert not world.queued


def test_silence_after_the_request_is_a_refusal() -> None:
    world = World().begin()
    world.accept()
    world.pass_time(TIMERS.accept_s)
    assert world.reservation.worker == worker("d2")
    assert world.machine.num_attempts == 1


def test_failed_pull_is_bound_again_once() -> None:
    world = World(decodes=("d1",)).begin()
    world.bind()
    world.first()
    world.pull_fails()
    assert world.grants[world.lease.sequence_id].grant_id == 2
    world.grant()
    assert world.binds[world.reservation.sequence_id].bind_id == 2
    world.prove()
    assert world.started
    assert world.retries == ["rebind"]
    assert world.machine.num_attempts == 2


def test_a_lost_lease_that_its_reader_noticed_first_costs_one_attempt() -> None:
    world = World(decodes=("d1",)).begin()
    world.bind()
    world.pull_fails()
    world.lose_lease()
    assert world.lease.worker == worker("p2")
    assert world.machine.num_attempts == 2
    assert world.retries == ["rebind", "prefill_again"]


def test_pull_failing_twice_prefills_elsewhere_with_what_was_emitted() -> None:
    world = World(decodes=("d1",)).begin()
    world.bind()
    world.first()
    world.pull_fails()
    world.grant()
    world.pull_fails()
    assert world.lease.worker == worker("p2")
    assert world.lease.num_emitted == 1
    world.bind()
    world.first(21)
    world.prove()
    world.tokens(22, 23)
    world.end_reservation(LENGTH)
    assert world.emitted == [20, 21, 22, 23]
    assert world.retries == ["rebind", "prefill_again"]


def test_without_another_prefill_worker_the_reservation_recomputes() -> None:
    world = World(prefills=("p1",), decodes=("d1",)).begin()
    world.bind()
    world.first()
    reservation = world.reservation
    world.lose_lease()
    assert world.reservation is reservation
    assert world.started[reservation.sequence_id] == actions.Start(
        reservation.sequence_id, (20,), True
    )
    assert world.machine.attempt.kv_path == KVPath.RECOMPUTED
    assert world.retries == ["recompute"]


def test_a_worker_hears_for_how_long_the_first_token_has_been_out() -> None:
    world = World(prefills=("p1",), decodes=("d1",)).begin()
    world.bind()
    world.first()
    world.pass_time(0.25)
    world.prove()
    first = world.reservation.sequence_id
    assert world.started[first] == actions.Start(first, (20,), False, 0.25)


def test_forbidden_recompute_waits_instead() -> None:
    world = World(prefills=("p1",), decodes=("d1",), allow_recompute=False).begin()
    world.accept()
    world.reserve()
    world.prefills.clear()
    world.lose_lease()
    assert world.queued
    world.pass_time(TIMERS.no_worker_s)
    assert isinstance(world.outcome, WorkerLostError)


def test_lost_prefill_after_proof_needs_only_the_token() -> None:
    world = World().begin()
    world.bind()
    world.prove()
    world.lose_lease()
    assert world.started[world.reservation.sequence_id].compute_missing
    world.tokens(20, 21, 22, 23)
    world.end_reservation(LENGTH)
    assert world.outcome == LENGTH


def test_lost_prefill_before_decode_answered_is_computed_once_it_has() -> None:
    world = World(prefills=("p1",)).begin()
    world.prefills = []
    world.lose_lease()
    assert not world.ran_locally
    states = [world.machine.state]
    world.reserve(cached=0)
    assert world.ran_locally
    states.append(world.machine.state)
    assert states == [RequestState.PLACED, RequestState.DECODING]


def test_lost_decode_before_proof_binds_another_to_the_lease() -> None:
    world = World().begin()
    world.bind()
    world.first()
    lease = world.lease
    world.lose_reservation()
    assert world.lease is lease
    assert world.reservation.worker == worker("d2")
    world.reserve()
    world.grant()
    world.prove()
    assert world.started[world.reservation.sequence_id].emitted == (20,)
    assert world.retries == ["rebind"]


def test_lost_decode_mid_stream_starts_over_from_what_was_emitted() -> None:
    world = World().begin()
    world.hand_off()
    world.tokens(21)
    world.lose_reservation()
    assert world.reservation.worker == worker("d2")
    assert world.lease.num_emitted == world.reservation.num_emitted == 2
    world.bind()
    world.first(22)
    world.prove()
    world.tokens(23)
    world.end_reservation(LENGTH)
    assert world.emitted == [20, 21, 22, 23]
    assert world.outcome == LENGTH


def test_lost_decode_after_the_last_token_changes_nothing() -> None:
    world = World().begin()
    world.hand_off()
    world.tokens(21, 22, 23)
    world.lose_reservation()
    assert world.outcome == LENGTH
    assert world.machine.num_attempts == 1


def test_attempts_are_limited() -> None:
    world = World().begin()
    world.lose_lease()
    world.lose_lease()
    assert world.retries == ["prefill_again", "recompute"]
    assert world.outcome is None
    world.lose_reservation()
    assert isinstance(world.outcome, DiptychError)
    assert "was lost" in world.outcome.message
    world.check_nothing_is_held()


def test_failed_hand_offs_end_in_the_typed_error() -> None:
    world = World(prefills=("p1",), decodes=("d1",), max_attempts=2, local_prefill=False).begin()
    world.bind()
    world.pull_fails()
    world.grant()
    world.pull_fails()
    assert isinstance(world.outcome, TransferInterruptedError)


def test_expired_lease_blames_nobody() -> None:
    world = World(prefills=("p1",), decodes=("d1",)).begin()
    world.accept()
    world.reserve()
    world.lose_lease(LeaseExpiredError("nobody came"))
    assert world.lease.worker == worker("p1")
    assert world.retries == ["prefill_again"]


def test_a_worker_that_calls_it_invalid_ends_it() -> None:
    world = World().begin()
    world.lose_lease(InvalidRequestError("bad", field="spec"))
    assert isinstance(world.outcome, InvalidRequestError)
    world.check_nothing_is_held()


def test_repeated_tokens_are_ignored_and_a_gap_is_a_failure() -> None:
    world = World(max_tokens=9).begin()
    world.hand_off()
    world.tokens(20, 21, position=len(PROMPT))
    assert world.emitted == [20, 21]
    world.tokens(20, 21, position=len(PROMPT))
    assert world.emitted == [20, 21]
    world.tokens(25, position=len(PROMPT) + 5)
    assert world.emitted == [20, 21]
    assert world.machine.num_attempts == 2


def test_waiting_behind_others_is_not_the_lack_of_a_worker() -> None:
    world = World()
    world.is_full = True
    world.begin()
    world.pass_time(TIMERS.no_worker_s)
    assert isinstance(world.outcome, QueueTimeoutError)
    assert world.outcome.retry_after_s == QUEUE_ENDS_IN_S


def test_what_is_too_long_for_all_that_are_there_waits_as_any_other_and_is_told_why() -> None:
    """As while the worker that is long enough for it is away."""
    world = World(max_tokens=1000).begin()
    assert world.queued
    world.pass_time(TIMERS.no_worker_s - 1.0)
    assert world.outcome is None
    world.pass_time(1.0)
    assert isinstance(world.outcome, NoWorkerError)
    assert "busy or not" in world.outcome.message


def test_without_any_worker_the_request_ends_with_that() -> None:
    world = World(decodes=()).begin()
    world.pass_time(TIMERS.no_worker_s)
    assert isinstance(world.outcome, NoWorkerError)


@pytest.mark.parametrize(("ended", "decode"), [("lease", "d1"), ("reservation", "d2")])
def test_scores_that_are_no_numbers_are_tried_once_elsewhere(ended: str, decode: str) -> None:
    world = World(max_tokens=9).begin()
    if ended == "lease":
        world.lose_lease(LogitsError("nan"))
    else:
        world.hand_off()
        world.tokens(21)
        world.end_reservation(error=LogitsError("nan"))
    assert (world.lease.worker, world.reservation.worker) == (worker("p2"), worker(decode))
    assert world.lease.num_emitted == len(world.emitted)
    assert world.retries == ["prefill_again"]
    world.hand_off()
    world.end_reservation(error=LogitsError("nan"))
    assert isinstance(world.outcome, LogitsError)
    assert world.machine.num_attempts == 2
    world.check_nothing_is_held()


@pytest.mark.parametrize("ended", ["lease", "reservation"])
def test_a_step_that_fails_in_the_last_attempt_is_what_the_client_is_told(ended: str) -> None:
    """Not that there was no worker: the client would try what may fail each time."""
    world = World(max_tokens=9, max_attempts=2).begin()
    for _ in range(2):
        if ended == "lease":
            world.lose_lease(StepFailedError("a model step failed: 1f"))
        else:
            world.hand_off()
            world.end_reservation(error=StepFailedError("a model step failed: 1f"))
    assert isinstance(world.outcome, StepFailedError)
    assert world.outcome.message.endswith(":1: a model step failed: 1f")
    world.check_nothing_is_held()


def test_bad_scores_over_pulled_kv_avoid_its_source_before_the_only_decode_worker() -> None:
    world = World(decodes=("d1",)).begin()
    world.hand_off()
    world.end_reservation(error=LogitsError("nan"))
    assert (world.lease.worker, world.reservation.worker) == (worker("p2"), worker("d1"))


def test_bad_scores_with_one_worker_of_each_are_computed_again_without_its_source() -> None:
    world = World(prefills=("p1",), decodes=("d1",)).begin()
    world.hand_off()
    world.end_reservation(error=LogitsError("nan"))
    assert not world.leases
    world.reserve()
    assert world.started[world.reservation.sequence_id].compute_missing
    assert world.retries == ["recompute"]


def test_a_prefix_that_is_not_cached_after_all_is_prefilled_for_the_reservation() -> None:
    world = World(believed_cached=("d2",)).begin()
    assert world.reservation.worker == worker("d2")
    assert not world.leases
    reservation = world.reservation
    world.reserve(cached=0)
    assert not world.started, "the whole prompt would be computed there"
    assert world.reservation is reservation
    assert world.lease.worker == worker("p1")
    world.accept()
    world.grant()
    world.first()
    world.prove()
    assert not world.started[reservation.sequence_id].compute_missing
    attempt = world.machine.attempt
    assert attempt.kv_path == KVPath.DISAGGREGATED
    assert attempt.prefill_worker == worker("p1").address
    assert (world.machine.num_attempts, world.retries, world.ran_locally) == (1, [], [])


def test_a_prefix_that_is_cached_as_believed_is_computed_where_it_is() -> None:
    world = World(believed_cached=("d2",)).begin()
    assert not world.reservation.to_pull
    world.reserve(cached=len(PROMPT) - 1)
    assert world.started[world.reservation.sequence_id].compute_missing
    assert world.ran_locally == [Why.CHOICE]
    assert world.machine.attempt.num_cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize(("block_size", "num_cached"), [(1, len(PROMPT) - 1), (len(PROMPT), 0)])
def test_of_a_prompt_that_is_cached_whole_the_last_block_is_computed_again(
    block_size: int, num_cached: int
) -> None:
    world = World(believed_cached=("d2",), block_size=block_size).begin()
    world.reserve(cached=len(PROMPT))
    assert world.started[world.reservation.sequence_id].compute_missing
    assert world.machine.attempt.num_cached_tokens == num_cached


def test_a_prefix_that_is_not_cached_is_computed_there_if_nobody_else_can() -> None:
    world = World(prefills=("p1",), believed_cached=("d2",)).begin()
    world.prefills.clear()
    world.reserve(cached=0)
    assert world.started[world.reservation.sequence_id].compute_missing
    assert world.machine.attempt.kv_path == KVPath.LOCAL
    assert world.machine.attempt.num_cached_tokens == 0


def test_refusals_for_a_prefix_that_is_not_cached_end_in_computing_it() -> None:
    """Each refusal is remembered, though the reservation is held again and again."""
    world = World(decodes=("d2",), believed_cached=("d2",)).begin()
    for _ in range(20):
        if world.started or world.queued:
            break
        if world.leases:
            world.lose_lease(BlocksExhaustedError("full"))
        else:
            world.reserve(cached=0)
    assert world.started or world.queued


class Soft(World):
    """Workers of both roles, of which one is believed to have the prompt."""

    def place(self, query: Query) -> Placement | None:
        if query.on_decode is not None:
            return Paired(worker("a"), query.on_decode, in_order=True)
        return DecodeOnly(worker("b"), Why.CHOICE, len(PROMPT))


def test_who_holds_the_greater_of_two_asks_nothing_of_the_lesser() -> None:
    """Though what it holds was not asked for as one of a pair."""
    world = Soft().begin()
    world.reserve(cached=0)
    assert not world.leases
    assert world.ran_locally == [Why.CHOICE]


def test_the_other_half_of_a_pair_that_was_given_up_is_not_asked_for() -> None:
    world = World(in_order=True).begin()
    assert world.reservation.worker == worker("d1")
    world.prefills.clear()
    world.end_reservation(error=BlocksExhaustedError("full"))
    assert world.reservation.worker == worker("d2")
    world.reserve()
    assert not any(isinstance(action, actions.OpenLease) for action in world.log)
    assert world.ran_locally


def test_no_lesser_decode_worker_is_asked_for_a_lease_that_is_held() -> None:
    world = World(in_order=True).begin()
    world.reserve()
    assert world.lease.worker == worker("p1")
    world.accept()
    world.lose_reservation()
    assert world.reservation.worker == worker("d2")
    assert not world.leases, "it is asked for once the lesser is held"
    world.reserve()
    assert world.leases


def test_a_source_that_is_lost_is_not_asked_for_another_reader_either() -> None:
    world = World(prefills=("p1",)).begin()
    world.bind()
    world.first()
    world.pull_fails(decode_pb2.PULL_FAILURE_SOURCE_LOST)
    assert not world.leases
    assert world.ran_locally == [Why.RECOMPUTE]


def test_the_pause_after_refusals_is_short_again_once_all_was_granted() -> None:
    world = World(prefills=("p1",), decodes=("d1",), max_tokens=9).begin()
    for pause_s in (0.05, 0.1):
        world.end_reservation(error=BlocksExhaustedError("full"))
        world.pass_time(pause_s)
        assert not world.queued
    world.hand_off()
    world.lose_reservation()
    assert world.queued
    world.pass_time(0.05)
    assert not world.queued
