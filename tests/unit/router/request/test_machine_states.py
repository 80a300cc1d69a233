"""The request's machine under anything, in any order; late and repeated messages too."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.errors import (
    BlocksExhaustedError,
    DiptychError,
    LeaseExpiredError,
    LogitsError,
    NoWorkerError,
)
from diptych.rpc.status import to_failure
from diptych.v1 import common_pb2, decode_pb2
from router.request import events
from router.request.request_state import RequestState
from tests.unit.router.request.world import LENGTH, PROMPT, World, decoded

ERRORS = [BlocksExhaustedError, NoWorkerError, LeaseExpiredError, LogitsError]


class RequestMachineMachine(RuleBasedStateMachine):
    """Anything may happen in any order; late messages for old leases and reservations too."""

    def __init__(self) -> None:
        super().__init__()
        self.model_digest = ""  # with which the output began
        self.old_leases: list[int] = []
        self.old_reservations: list[int] = []

    @initialize(in_order=st.booleans())
    def begin(self, in_order: bool) -> None:
        self.world = World(
            max_tokens=6,
            deadline_s=260.0,
            max_attempts=5,
            believed_cached=("d2",),
            in_order=in_order,
        ).begin()

    def token_at(self, position: int) -> int:
        """What any worker samples there: sampling is a pure function of the position here."""
        return 1000 + position

    def lease_id(self, data: st.DataObject) -> int:
        self.old_leases.extend(i for i in self.world.leases if i not in self.old_leases)
        return data.draw(st.sampled_from(self.old_leases or [0]))

    def reservation_id(self, data: st.DataObject) -> int:
        self.old_reservations.extend(
            i for i in self.world.reservations if i not in self.old_reservations
        )
        return data.draw(st.sampled_from(self.old_reservations or [0]))

    # What well-behaved workers do next, so that runs get deep

    @precondition(lambda self: self.world.leases or self.world.reservations)
    @rule()
    def workers_answer(self) -> None:
        """Whatever lease and reservation were asked for last is answered."""
        world = self.world
        for reservation in list(world.reservations.values()):
            world.on(events.Reserved(reservation.sequence_id, 0))
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

    @precondition(lambda self: any(i in self.world.binds for i in self.world.reservations))
    @rule()
    def pull_lands(self) -> None:
        self.world.prove()

    @precondition(lambda self: any(i in self.world.binds for i in self.world.reservations))
    @rule(reason=st.integers(0, 9))
    def pull_breaks(self, reason: int) -> None:
        self.world.pull_fails(reason)

    @precondition(lambda self: any(i in self.world.started for i in self.world.reservations))
    @rule(num=st.integers(1, 2))
    def reservation_runs(self, num: int) -> None:
        first = len(PROMPT) + len(self.world.emitted)
        self.world.tokens(*(self.token_at(p) for p in range(first, first + num)))

    # Anything else, late and repeated messages among it

    @rule(data=st.data(), what=st.sampled_from(["lease", "reservation"]), number=st.integers(0, 6))
    def anything_is_said(self, data: st.DataObject, what: str, number: int) -> None:
        """Any message, for any lease or reservation there ever was; nothing in it need be right."""
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
        sequence_id = self.reservation_id(data)
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
        error=st.sampled_from(ERRORS),
        what=st.sampled_from(["lease", "reservation", "stream", "finished"]),
    )
    def a_half_ends(self, data: st.DataObject, error: type[DiptychError], what: str) -> None:
        world = self.world
        if what == "lease":
            sequence_id = self.lease_id(data)
            world.leases.pop(sequence_id, None)
            world.on(events.LeaseEnded(sequence_id, error("it ended")))
            return
        sequence_id = self.reservation_id(data)
        ended = decode_pb2.Ended(sequence_id=sequence_id)
        if what == "finished":
            if sequence_id not in world.started or len(world.emitted) < 6:
                return
            ended.finish_reason = common_pb2.FINISH_REASON_LENGTH
        else:
            ended.failure.CopyFrom(to_failure(error("it broke")))
        world.reservations.pop(sequence_id, None)
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

    @rule(served=st.sampled_from(["a", "a", "a", "b", ""]))
    def another_model_is_served(self, served: str) -> None:
        self.world.served = served

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
    def output_is_of_one_model(self) -> None:
        if self.world.emitted:
            told = self.world.machine.model_digest
            self.model_digest = self.model_digest or told
            assert told == self.model_digest

    @invariant()
    def nothing_is_held_at_the_end(self) -> None:
        if self.world.machine.state is RequestState.DONE:
            self.world.check_nothing_is_held()
            assert self.world.machine.wake_at_s is None
        else:
            assert self.world.outcome is None
            held = self.world.leases or self.world.reservations or self.world.queued
            assert held, "neither waiting nor placed"
            assert self.world.machine.wake_at_s is not None

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for _ in range(40):
            self.world.pass_time(5.0)
        assert self.world.machine.state is RequestState.DONE
        self.world.check_nothing_is_held()


RequestMachineMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None
)
TestRequestMachine = RequestMachineMachine.TestCase
