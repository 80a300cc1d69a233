"""Leases under any order of starts, grants, steps and ends: a free pool in the end, always."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import SampledToken, StepOutput, StepPlan
from diptych.errors import BlocksExhaustedError, InvalidRequestError, LeaseExpiredError
from diptych.v1 import common_pb2, prefill_pb2
from kvtransfer.source.lease_table import LeaseTable
from prefill_worker.lease_session import LeasePhase, LeaseSession

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, VOCAB = 4, 12, 32, 16


class Rig:
    """One worker's pure parts, and a clock that each look advances."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        config = SchedulerConfig(max_num_seqs=4, max_batched_tokens=8, max_model_len=MAX_LEN)
        self.scheduler = Scheduler(config, self.pool)
        self.leases = LeaseTable(BLOCK_SIZE, self.pool.generation)
        self.now = 0.0

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def session(self) -> LeaseSession:
        return LeaseSession(
            self.scheduler,
            self.leases,
            vocab_size=VOCAB,
            max_model_len=MAX_LEN,
            clock=self.clock,
        )

    def finish(
        self, plan: StepPlan, sessions: list[LeaseSession]
    ) -> list[prefill_pb2.PrefillEvent]:
        tokens = tuple(SampledToken(1, 0.5) if chunk.sample else None for chunk in plan.chunks)
        updates = self.scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.0))
        events = [s.step(u, self.clock()) for u in updates for s in sessions]
        return [event for event in events if event is not None]


def start(
    sequence_id: int, num_tokens: int, *, seed: int = 0, max_tokens: int = 4
) -> prefill_pb2.PrefillStart:
    sampling = common_pb2.SamplingParams(
        temperature=0, seed=1, max_tokens=max_tokens, return_margins=True
    )
    spec = common_pb2.SequenceSpec(
        token_ids=[(seed + i) % VOCAB for i in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        sampling=sampling,
    )
    return prefill_pb2.PrefillStart(router_incarnation="r", sequence_id=sequence_id, spec=spec)


def grant(number: int) -> prefill_pb2.Grant:
    ticket = number.to_bytes(16, "big")
    return prefill_pb2.Grant(grant_id=number, ticket=ticket, reader_incarnation="d")


def test_a_lease_offers_the_blocks_that_another_computed_while_it_waited() -> None:
    rig = Rig()
    first, second = rig.session(), rig.session()
    first.start(start(1, 18))
    second.start(start(2, 17))
    key = SequenceKey("r", 2)
    while second.phase is LeasePhase.COMPUTING:
        plan = rig.scheduler.schedule()
        assert plan is not None
        rig.finish(plan, [first, second])
    assert first.sequence is not None
    announced = rig.leases.ranges(key)
    ids = [block_id for each in announced for block_id in each.block_ids]
    assert ids[:4] == first.sequence.block_table[:4]
    generations = [number for each in announced for number in each.generations]
    assert generations == [rig.pool.generation(block_id) for block_id in ids]
    first.close()
    second.grant(grant(1))
    assert second.sequence is not None
    assert ids == second.sequence.block_table
    assert rig.leases.open_leases


def test_what_is_cached_is_offered_before_the_first_step() -> None:
    rig = Rig()
    for number in (1, 2):
        session = rig.session()
        num_cached = session.start(start(number, 18)).accepted.num_cached_tokens
        announced = sum(each.num_tokens for each in rig.leases.ranges(SequenceKey("r", number)))
        assert announced == num_cached == (0, 16)[number - 1]
        while session.phase is LeasePhase.COMPUTING:
            plan = rig.scheduler.schedule()
            assert plan is not None
            rig.finish(plan, [session])
        session.close()


class LeaseMachine(RuleBasedStateMachine):
    """Several streams; commands also come while a step is in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.sessions: list[LeaseSession] = []
        self.plan: StepPlan | None = None
        self.number = 0

    def pick(self, data: st.DataObject) -> LeaseSession:
        return data.draw(st.sampled_from(self.sessions))

    @rule(num_tokens=st.integers(1, 31), seed=st.integers(0, 2))
    def start(self, num_tokens: int, seed: int) -> None:
        session = self.rig.session()
        self.number += 1
        before = self.rig.pool.counts()
        try:
            event = session.start(start(self.number, num_tokens, seed=seed))
        except BlocksExhaustedError:
            assert session.phase is LeasePhase.NEW
            assert self.rig.pool.counts() == before
        else:
            assert event.accepted.num_cached_tokens < num_tokens
            self.sessions.append(session)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        session = self.pick(data)
        self.number += 1
        event = session.grant(grant(self.number))
        assert event is not None
        assert event.granted.grant_id == self.number
        assert not session.unbound

    @precondition(lambda self: self.plan is None)
    @rule()
    def step_begins(self) -> None:
        self.plan = self.rig.scheduler.schedule()

    @precondition(lambda self: self.plan is not None)
    @rule()
    def step_ends(self) -> None:
        assert self.plan is not None
        for event in self.rig.finish(self.plan, self.sessions):
            assert event.first_token.position > 0
        self.plan = None

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = self.pick(data)
        self.sessions.remove(session)
        session.close()
        session.close()

    @invariant()
    def computed_means_leased(self) -> None:
        counts = self.rig.pool.counts()
        computed = [s for s in self.sessions if s.phase is LeasePhase.COMPUTED]
        assert bool(counts.leased) == bool(computed)
        assert all(s.times.sampled_at is not None for s in computed)

    def teardown(self) -> None:
        for session in self.sessions:
            session.close()
        if self.plan is not None:
            assert self.rig.finish(self.plan, self.sessions) == []
        counts = self.rig.pool.counts()
        assert counts.free + counts.cached == counts.total


TestLease = LeaseMachine.TestCase
TestLease.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_finished_lease_nobody_was_granted_is_unbound() -> None:
    rig = Rig()
    session = rig.session()
    session.start(start(1, 6))
    assert not session.unbound
    plan = rig.scheduler.schedule()
    assert plan is not None
    (event,) = rig.finish(plan, [session])
    assert event.first_token.position == 6
    assert event.first_token.margin == 0.5
    times = session.times
    assert None not in (times.accepted_at, times.first_step_at, times.sampled_at)
    assert session.unbound
    session.grant(grant(1))
    assert not session.unbound


def test_one_token_finishes() -> None:
    rig = Rig()
    session = rig.session()
    session.start(start(1, 6, max_tokens=1))
    plan = rig.scheduler.schedule()
    assert plan is not None
    (event,) = rig.finish(plan, [session])
    assert event.first_token.finish_reason == common_pb2.FINISH_REASON_LENGTH


def test_protocol_errors_name_the_field() -> None:
    session = Rig().session()
    with pytest.raises(InvalidRequestError, match="grant: came while NEW"):
        session.grant(grant(1))
    session.start(start(1, 6))
    with pytest.raises(InvalidRequestError, match="start: came while COMPUTING"):
        session.start(start(2, 6))
    session.grant(grant(2))
    assert session.grant(grant(2)) is None, "repeated"
    assert session.grant(grant(1)) is None, "overtaken"


def test_after_close_nothing_can_be_granted() -> None:
    session = Rig().session()
    session.start(start(1, 6))
    session.close()
    with pytest.raises(LeaseExpiredError):
        session.grant(grant(1))


def test_a_grant_that_is_refused_takes_no_number() -> None:
    session = Rig().session()
    session.start(start(1, 6))
    with pytest.raises(InvalidRequestError, match="16 bytes"):
        session.grant(prefill_pb2.Grant(grant_id=1, ticket=b"short", reader_incarnation="d"))
    assert session.grant(grant(1)) is not None
