"""The request's state machine against workers that accept, refuse, repeat, lie and die."""

import itertools
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych.errors import (
    BlocksExhaustedError,
    DeadlineExceededError,
    DiptychError,
    InvalidRequestError,
    LeaseExpiredError,
    NoWorkerError,
    TransferInterruptedError,
)
from diptych.rpc.status import to_failure
from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2, inference_pb2
from router.placement.policy import LeastLoaded
from router.placement.prefix_memory import PrefixMemory
from router.placement.types import DecodeView, Placement, PrefillView, Query, Snapshot, WorkerId
from router.request import actions, events, wire
from router.request.actions import Action
from router.request.deps import Surroundings
from router.request.emitted_tokens import RequestShape
from router.request.events import Event
from router.request.machine import RequestMachine, RequestState

PROMPT = (11, 12, 13, 14, 15)
STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
TIMERS = Timers()


def prefill(name: str) -> WorkerId:
    return WorkerId(f"{name}:1", name)


def snapshot(
    prefills: tuple[str, ...], decodes: tuple[str, ...], *, local_prefill: bool = True
) -> Snapshot:
    return Snapshot(
        tuple(
            PrefillView(worker=prefill(p), num_pending_tokens=0, max_model_len=100)
            for p in prefills
        ),
        tuple(
            DecodeView(
                worker=prefill(d),
                num_sequences=0,
                max_model_len=100,
                local_prefill=local_prefill,
                proven=frozenset(prefills),
            )
            for d in decodes
        ),
    )


def decoded(ended: decode_pb2.Ended) -> Event:
    """The machine's event for it."""
    event = wire.decode_event(decode_pb2.DecodeEvent(ended=ended))
    assert event is not None
    return event


def policy(**changes: bool) -> LeastLoaded:
    rules = {"allow_local": True, "allow_recompute": True, "has_prefill_pool": True} | changes
    return LeastLoaded(PrefixMemory(64), local_below_tokens=0, **rules)


class World:
    """Executes a machine's actions on paper and answers for the workers."""

    def __init__(
        self,
        prefills: tuple[str, ...] = ("p1", "p2"),
        decodes: tuple[str, ...] = ("d1", "d2"),
        *,
        max_tokens: int = 4,
        stop_token_ids: frozenset[int] = frozenset(),
        deadline_s: float | None = None,
        max_attempts: int = 3,
        local_prefill: bool = True,
        allow_recompute: bool = True,
        stop_at: int | None = None,
    ) -> None:
        self.now = 100.0
        self.policy = policy(allow_recompute=allow_recompute)
        self.prefills, self.decodes = list(prefills), list(decodes)
        self.local_prefill = local_prefill
        self.leases: dict[int, actions.OpenLease] = {}  # open as far as the worker knows
        self.seats: dict[int, actions.Reserve] = {}
        self.grants: dict[int, actions.Grant] = {}
        self.binds: dict[int, actions.Bind] = {}
        self.started: dict[int, actions.Start] = {}
        self.emitted: list[int] = []
        self.retries: list[str] = []
        self.queued = False
        self.outcome: int | DiptychError | None = None
        self.log: list[Action] = []
        self.stop_at = stop_at
        self.ids = itertools.count(1)
        self.machine = RequestMachine(
            RequestShape(prompt_ids=PROMPT, max_tokens=max_tokens, stop_token_ids=stop_token_ids),
            Surroundings(
                clock=lambda: self.now,
                place=self.place,
                new_sequence_id=lambda: next(self.ids),
                new_ticket=lambda: b"t" * 16,
                timers=TIMERS,
                max_attempts=max_attempts,
                allow_recompute=allow_recompute,
            ),
            self.sink,
            deadline_s=deadline_s,
        )

    def place(self, query: Query) -> Placement | None:
        now = snapshot(tuple(self.prefills), tuple(self.decodes), local_prefill=self.local_prefill)
        return self.policy.place(query, now)

    def sink(self, token_ids: Sequence[int], margins: object) -> bool:
        assert self.outcome is None
        self.emitted.extend(token_ids)
        return self.stop_at is not None and len(self.emitted) >= self.stop_at

    def on(self, event: Event) -> None:
        """Let the machine handle it and execute what it says."""
        wanted = self.machine.handle(event)
        for action in wanted:
            assert self.outcome is None, "an action after the last"
            self.log.append(action)
            match action:
                case actions.OpenLease():
                    assert action.sequence_id not in self.leases
                    assert not self.leases, "one lease at a time"
                    self.leases[action.sequence_id] = action
                case actions.Reserve():
                    assert action.sequence_id not in self.seats
                    assert not self.seats, "one seat at a time"
                    self.seats[action.sequence_id] = action
                case actions.CloseLease():
                    del self.leases[action.sequence_id]
                case actions.Release():
                    del self.seats[action.sequence_id]
                case actions.Grant():
                    assert action.sequence_id in self.leases
                    self.grants[action.sequence_id] = action
                case actions.Bind():
                    assert action.sequence_id in self.seats
                    self.binds[action.sequence_id] = action
                case actions.Start():
                    seat = self.seats[action.sequence_id]
                    assert list(action.emitted) == self.emitted[seat.num_emitted :]
                    self.started[action.sequence_id] = action
                case actions.Enqueue():
                    assert not self.queued
                    assert not self.leases
                    assert not self.seats
                    self.queued = True
                case actions.Dequeue():
                    assert self.queued
                    self.queued = False
                case actions.Pump() | actions.RunLocally():
                    pass
                case actions.Retried():
                    self.retries.append(action.retry.value)
                case actions.Finish():
                    self.outcome = action.reason
                case actions.Fail():
                    self.outcome = action.error
        if any(isinstance(action, actions.Pump | actions.Enqueue) for action in wanted):
            self.pump()

    def pump(self, *, room_made: bool = False) -> None:
        if self.queued:
            self.on(events.Offered(room_made))

    # What one open half is asked and answers

    @property
    def lease(self) -> actions.OpenLease:
        (only,) = self.leases.values()
        return only

    @property
    def seat(self) -> actions.Reserve:
        (only,) = self.seats.values()
        return only

    def accept(self, cached: int = 0) -> None:
        self.on(events.Accepted(self.lease.sequence_id, cached))

    def reserve(self, cached: int = 0) -> None:
        self.on(events.Reserved(self.seat.sequence_id, cached))

    def grant(self) -> None:
        grant = self.grants[self.lease.sequence_id]
        self.on(events.Granted(self.lease.sequence_id, grant.grant_id))

    def first(self, token: int = 20, reason: int = 0) -> None:
        position = len(PROMPT) + self.lease.num_emitted
        self.on(events.FirstToken(self.lease.sequence_id, token, position, None, reason))

    def prove(self) -> None:
        bind = self.binds[self.seat.sequence_id]
        stats = common_pb2.TransferStats(num_bytes=7)
        self.on(events.Proven(bind.sequence_id, bind.bind_id, stats))

    def pull_fails(self, reason: int = decode_pb2.PULL_FAILURE_TRANSPORT) -> None:
        bind = self.binds[self.seat.sequence_id]
        self.on(events.PullFailed(bind.sequence_id, bind.bind_id, reason, "cut"))

    def lose_lease(self, error: DiptychError | None = None) -> None:
        sequence_id, _ = self.leases.popitem()
        self.on(events.LeaseEnded(sequence_id, error or NoWorkerError("gone")))

    def lose_seat(self) -> None:
        sequence_id, _ = self.seats.popitem()
        self.on(events.ReservationLost(sequence_id, "gone"))

    def end_seat(
        self, reason: int = 0, error: DiptychError | None = None, preemptions: int = 0
    ) -> None:
        sequence_id, _ = self.seats.popitem()
        ended = decode_pb2.Ended(sequence_id=sequence_id, num_preemptions=preemptions)
        if reason:
            ended.finish_reason = common_pb2.FinishReason.Name(reason)  # type: ignore[assignment]
        if error is not None:
            ended.failure.CopyFrom(to_failure(error))
        self.on(decoded(ended))

    def tokens(self, *token_ids: int, position: int | None = None) -> None:
        if position is None:
            position = len(PROMPT) + len(self.emitted)
        sequence_id = self.seat.sequence_id
        self.on(events.Tokens(sequence_id, position, token_ids, ()))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.on(events.Tick())

    def begin(self) -> "World":
        self.on(events.Begin())
        return self

    def hand_off(self) -> None:
        """From placed until the seat runs; the first token is 20."""
        self.accept()
        self.reserve()
        self.grant()
        self.first()
        self.prove()

    def check_nothing_is_held(self) -> None:
        assert not self.leases
        assert not self.seats
        assert not self.queued


def test_the_plain_path() -> None:
    world = World().begin()
    assert (world.lease.worker, world.seat.worker) == (prefill("p1"), prefill("d1"))
    world.accept(cached=3)
    world.reserve()
    assert world.grants[world.lease.sequence_id].reader == prefill("d1")
    assert not world.binds
    world.grant()
    assert world.binds[world.seat.sequence_id].source == prefill("p1")
    world.first(20)
    assert world.emitted == [20]
    world.prove()
    assert not world.leases
    assert world.started[world.seat.sequence_id].emitted == (20,)
    world.tokens(21)
    world.tokens(22, 23)
    world.end_seat(LENGTH, preemptions=2)
    assert world.emitted == [20, 21, 22, 23]
    assert world.outcome == LENGTH
    machine = world.machine
    assert (machine.num_attempts, machine.num_preemptions, machine.num_cached_tokens) == (1, 2, 3)
    assert machine.attempt.kv_path == inference_pb2.KV_PATH_DISAGGREGATED
    assert machine.attempt.transfer is not None
    world.check_nothing_is_held()


def test_proof_before_the_first_token_waits_for_it() -> None:
    world = World().begin()
    world.accept()
    world.reserve()
    world.grant()
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
    world.accept()
    world.reserve()
    world.grant()
    world.first(20, reason=STOP)
    assert world.outcome == STOP
    world.check_nothing_is_held()


def test_one_token_runs_on_prefill_alone() -> None:
    world = World(max_tokens=1).begin()
    assert not world.seats
    world.accept()
    world.first(20, reason=LENGTH)
    assert world.outcome == LENGTH
    assert world.machine.attempt.kv_path == inference_pb2.KV_PATH_PREFILL_ONLY
    world.check_nothing_is_held()


def test_without_prefill_workers_decode_computes_itself() -> None:
    world = World(prefills=()).begin()
    assert not world.leases
    world.reserve()
    assert world.started[world.seat.sequence_id].compute_missing
    world.tokens(20)
    world.tokens(21, 22, 23)
    world.end_seat(LENGTH)
    assert world.outcome == LENGTH
    assert world.machine.attempt.kv_path == inference_pb2.KV_PATH_LOCAL


def test_stop_string_releases_at_once() -> None:
    world = World(stop_at=2).begin()
    world.hand_off()
    world.tokens(21)
    assert world.outcome == STOP
    world.check_nothing_is_held()


def test_refusal_by_decode_keeps_the_lease() -> None:
    world = World().begin()
    lease = world.lease
    world.end_seat(error=BlocksExhaustedError("full"))
    assert world.lease is lease
    assert world.seat.worker == prefill("d2")
    assert world.machine.num_attempts == 1
    world.hand_off()
    assert world.started


def test_refusal_by_prefill_keeps_the_seat() -> None:
    world = World().begin()
    seat = world.seat
    world.lose_lease(BlocksExhaustedError("full"))
    assert world.seat is seat
    assert world.lease.worker == prefill("p2")


def test_all_refuse_then_waits_then_says_why() -> None:
    world = World(prefills=("p1",), decodes=("d1",)).begin()
    for pause_s in (0.05, 0.1, 0.2):
        world.end_seat(error=BlocksExhaustedError("full"))
        assert world.queued
        world.pump()
        assert world.queued, "not before the pause is over"
        world.pass_time(pause_s)
        assert not world.queued
    world.end_seat(error=BlocksExhaustedError("full"))
    world.decodes.clear()
    world.pass_time(TIMERS.no_worker_s)
    assert isinstance(world.outcome, BlocksExhaustedError)
    world.check_nothing_is_held()


def test_a_pause_is_over_when_room_was_made() -> None:
    world = World(prefills=("p1",), decodes=("d1",)).begin()
    world.end_seat(error=BlocksExhaustedError("full"))
    world.pump()
    assert world.queued
    world.pump(room_made=True)
    assert not world.queued


def test_silence_after_the_request_is_a_refusal() -> None:
    world = World().begin()
    world.accept()
    world.pass_time(TIMERS.accept_s)
    assert world.seat.worker == prefill("d2")
    assert world.machine.num_attempts == 1


def test_failed_pull_is_bound_again_once() -> None:
    world = World(decodes=("d1",)).begin()
    world.accept()
    world.reserve()
    world.grant()
    world.first()
    world.pull_fails()
    assert world.grants[world.lease.sequence_id].grant_id == 2
    world.grant()
    assert world.binds[world.seat.sequence_id].bind_id == 2
    world.prove()
    assert world.started
    assert world.retries == ["rebind"]
    assert world.machine.num_attempts == 2


def test_a_lost_lease_that_its_reader_noticed_first_costs_one_attempt() -> None:
    world = World(decodes=("d1",)).begin()
    world.accept()
    world.reserve()
    world.grant()
    world.pull_fails()
    world.lose_lease()
    assert world.lease.worker == prefill("p2")
    assert world.machine.num_attempts == 2
    assert world.retries == ["rebind", "prefill_again"]


def test_pull_failing_twice_prefills_elsewhere_with_what_was_emitted() -> None:
    world = World(decodes=("d1",)).begin()
    world.accept()
    world.reserve()
    world.grant()
    world.first()
    world.pull_fails()
    world.grant()
    world.pull_fails()
    assert world.lease.worker == prefill("p2")
    assert world.lease.num_emitted == 1
    world.accept()
    world.reserve()
    world.grant()
    world.first(21)
    world.prove()
    world.tokens(22, 23)
    world.end_seat(LENGTH)
    assert world.emitted == [20, 21, 22, 23]
    assert world.retries == ["rebind", "prefill_again"]


def test_without_another_prefill_worker_the_seat_recomputes() -> None:
    world = World(prefills=("p1",), decodes=("d1",)).begin()
    world.accept()
    world.reserve()
    world.grant()
    world.first()
    seat = world.seat
    world.lose_lease()
    assert world.seat is seat
    assert world.started[seat.sequence_id] == actions.Start(seat.sequence_id, (20,), True)
    assert world.machine.attempt.kv_path == inference_pb2.KV_PATH_RECOMPUTED
    assert world.retries == ["recompute"]


def test_forbidden_recompute_waits_instead() -> None:
    world = World(prefills=("p1",), decodes=("d1",), allow_recompute=False).begin()
    world.accept()
    world.reserve()
    world.prefills.clear()
    world.lose_lease()
    assert world.queued
    world.pass_time(TIMERS.no_worker_s)
    assert isinstance(world.outcome, NoWorkerError)


def test_lost_prefill_after_proof_needs_only_the_token() -> None:
    world = World().begin()
    world.accept()
    world.reserve()
    world.grant()
    world.prove()
    world.lose_lease()
    assert world.started[world.seat.sequence_id].compute_missing
    world.tokens(20, 21, 22, 23)
    world.end_seat(LENGTH)
    assert world.outcome == LENGTH


def test_lost_decode_before_proof_binds_another_to_the_lease() -> None:
    world = World().begin()
    world.accept()
    world.reserve()
    world.grant()
    world.first()
    lease = world.lease
    world.lose_seat()
    assert world.lease is lease
    assert world.seat.worker == prefill("d2")
    world.reserve()
    world.grant()
    world.prove()
    assert world.started[world.seat.sequence_id].emitted == (20,)
    assert world.retries == ["rebind"]


def test_lost_decode_mid_stream_starts_over_from_what_was_emitted() -> None:
    world = World().begin()
    world.hand_off()
    world.tokens(21)
    world.lose_seat()
    assert world.seat.worker == prefill("d2")
    assert world.lease.num_emitted == world.seat.num_emitted == 2
    world.accept()
    world.reserve()
    world.grant()
    world.first(22)
    world.prove()
    world.tokens(23)
    world.end_seat(LENGTH)
    assert world.emitted == [20, 21, 22, 23]
    assert world.outcome == LENGTH


def test_lost_decode_after_the_last_token_changes_nothing() -> None:
    world = World().begin()
    world.hand_off()
    world.tokens(21, 22, 23)
    world.lose_seat()
    assert world.outcome == LENGTH
    assert world.machine.num_attempts == 1


def test_last_token_without_ended_finishes_soon() -> None:
    world = World().begin()
    world.hand_off()
    world.tokens(21, 22, 23)
    assert world.outcome is None
    world.pass_time(TIMERS.accept_s)
    assert world.outcome == LENGTH
    world.check_nothing_is_held()


def test_attempts_are_limited() -> None:
    world = World().begin()
    world.lose_lease()
    world.lose_lease()
    assert world.retries == ["prefill_again", "recompute"]
    assert world.outcome is None
    world.lose_seat()
    assert isinstance(world.outcome, DiptychError)
    assert "was lost" in world.outcome.message
    world.check_nothing_is_held()


def test_failed_hand_offs_end_in_the_typed_error() -> None:
    world = World(prefills=("p1",), decodes=("d1",), max_attempts=2, local_prefill=False).begin()
    world.accept()
    world.reserve()
    world.grant()
    world.pull_fails()
    world.grant()
    world.pull_fails()
    assert isinstance(world.outcome, TransferInterruptedError)


def test_expired_lease_blames_nobody() -> None:
    world = World(prefills=("p1",), decodes=("d1",)).begin()
    world.accept()
    world.reserve()
    world.lose_lease(LeaseExpiredError("nobody came"))
    assert world.lease.worker == prefill("p1")
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


class RequestMachineMachine(RuleBasedStateMachine):
    """Anything may happen in any order; late messages for old halves too."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(max_tokens=6, deadline_s=260.0, max_attempts=5).begin()
        self.old_leases: list[int] = []
        self.old_seats: list[int] = []

    def token_at(self, position: int) -> int:
        """What any worker samples there: sampling is a pure function of the position here."""
        return 1000 + position

    def lease_id(self, data: st.DataObject) -> int:
        self.old_leases.extend(i for i in self.world.leases if i not in self.old_leases)
        return data.draw(st.sampled_from(self.old_leases or [0]))

    def seat_id(self, data: st.DataObject) -> int:
        self.old_seats.extend(i for i in self.world.seats if i not in self.old_seats)
        return data.draw(st.sampled_from(self.old_seats or [0]))

    # What well-behaved workers do next, so that runs get deep

    @precondition(lambda self: self.world.leases or self.world.seats)
    @rule()
    def workers_answer(self) -> None:
        """Whatever each half was asked for last is answered."""
        world = self.world
        for seat in list(world.seats.values()):
            world.on(events.Reserved(seat.sequence_id, 0))
        for lease in list(world.leases.values()):
            world.on(events.Accepted(lease.sequence_id, 0))
        for lease in list(world.leases.values()):
            grant = world.grants.get(lease.sequence_id)
            if grant is not None:
                world.on(events.Granted(lease.sequence_id, grant.grant_id))

    @precondition(lambda self: self.world.leases)
    @rule()
    def prefill_samples(self) -> None:
        world = self.world
        position = len(PROMPT) + world.lease.num_emitted
        last = LENGTH if position == len(PROMPT) + 5 else 0
        token = self.token_at(position)
        sequence_id = world.lease.sequence_id
        world.on(events.FirstToken(sequence_id, token, position, None, last))

    @precondition(lambda self: any(i in self.world.binds for i in self.world.seats))
    @rule()
    def pull_lands(self) -> None:
        self.world.prove()

    @precondition(lambda self: any(i in self.world.binds for i in self.world.seats))
    @rule(reason=st.integers(0, 9))
    def pull_breaks(self, reason: int) -> None:
        self.world.pull_fails(reason)

    @precondition(lambda self: any(i in self.world.started for i in self.world.seats))
    @rule(num=st.integers(1, 2))
    def seat_runs(self, num: int) -> None:
        first = len(PROMPT) + len(self.world.emitted)
        self.world.tokens(*(self.token_at(p) for p in range(first, first + num)))

    # Anything else, late and repeated messages among it

    @rule(data=st.data(), what=st.sampled_from(["lease", "seat"]), number=st.integers(0, 6))
    def anything_is_said(self, data: st.DataObject, what: str, number: int) -> None:
        """Any message, for any half there ever was; nothing in it need be right."""
        on = self.world.on
        if what == "lease":
            sequence_id = self.lease_id(data)
            if data.draw(st.booleans()):
                on(events.Accepted(sequence_id, number))
                on(events.Granted(sequence_id, number))
            else:
                position = len(PROMPT) + len(self.world.emitted) + data.draw(st.integers(-2, 1))
                token = self.token_at(position)
                on(events.FirstToken(sequence_id, token, position, None, 0))
            return
        sequence_id = self.seat_id(data)
        kind = data.draw(st.sampled_from(["reserved", "pull", "tokens"]))
        if kind == "reserved":
            on(events.Reserved(sequence_id, number))
        elif kind == "pull":
            on(events.Proven(sequence_id, number, common_pb2.TransferStats()))
            on(events.PullFailed(sequence_id, number, number, ""))
        else:
            position = len(PROMPT) + len(self.world.emitted) + data.draw(st.integers(-2, 1))
            token_ids = [self.token_at(p) for p in range(position, position + number)]
            on(events.Tokens(sequence_id, position, token_ids, ()))

    @rule(
        data=st.data(),
        error=st.sampled_from([BlocksExhaustedError, NoWorkerError, LeaseExpiredError]),
        what=st.sampled_from(["lease", "seat", "stream", "finished"]),
    )
    def a_half_ends(self, data: st.DataObject, error: type[DiptychError], what: str) -> None:
        world = self.world
        if what == "lease":
            sequence_id = self.lease_id(data)
            world.leases.pop(sequence_id, None)
            world.on(events.LeaseEnded(sequence_id, error("it ended")))
            return
        sequence_id = self.seat_id(data)
        ended = decode_pb2.Ended(sequence_id=sequence_id)
        if what == "finished":
            if sequence_id not in world.started or len(world.emitted) < 6:
                return
            ended.finish_reason = common_pb2.FINISH_REASON_LENGTH
        else:
            ended.failure.CopyFrom(to_failure(error("it broke")))
        world.seats.pop(sequence_id, None)
        if what == "stream":
            world.on(events.ReservationLost(sequence_id, "it broke"))
        else:
            world.on(decoded(ended))

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.05, 0.05, 0.1, 0.1, 0.5, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(
        prefills=st.sets(st.sampled_from(["p1", "p2"])),
        decodes=st.sets(st.sampled_from(["d1", "d2"]), min_size=1),
        local=st.booleans(),
    )
    def workers_come_and_go(self, prefills: set[str], decodes: set[str], local: bool) -> None:
        self.world.prefills, self.world.decodes = sorted(prefills), sorted(decodes)
        self.world.local_prefill = local
        self.world.pump()

    @precondition(lambda self: len(self.world.log) > 8)
    @rule(sure=st.integers(0, 9))
    def client_leaves(self, sure: int) -> None:
        if sure == 9:
            self.world.on(events.Cancelled())

    @invariant()
    def tokens_are_emitted_once_and_in_order(self) -> None:
        emitted = self.world.emitted
        first = len(PROMPT)
        assert emitted == [self.token_at(p) for p in range(first, first + len(emitted))]
        assert len(emitted) <= 6

    @invariant()
    def nothing_is_held_at_the_end(self) -> None:
        if self.world.machine.state is RequestState.DONE:
            self.world.check_nothing_is_held()
            assert self.world.machine.wake_at_s is None
        else:
            assert self.world.outcome is None
            held = self.world.leases or self.world.seats or self.world.queued
            assert held, "neither waiting nor placed"
            assert self.world.machine.wake_at_s is not None

    def teardown(self) -> None:
        for _ in range(40):
            self.world.pass_time(5.0)
        assert self.world.machine.state is RequestState.DONE
        self.world.check_nothing_is_held()


RequestMachineMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None
)
TestRequestMachine = RequestMachineMachine.TestCase
