"""A router's sequences under any order of commands, pulls, late reads, steps and broken streams.

The scheduler and the pool are the real ones; pulls are a model of the transport:
an abandoned or failed pull may leave reads that write into its blocks until they end.
"""

import math
import time
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_worker.actions import Action, RunPull, SendEvent, SendTokens, StopPull
from decode_worker.held_sequence import Phase
from decode_worker.outbox import NewToken
from decode_worker.router_sequences import Fallback
from diptych.engine.scheduling.step import SampledToken, SequenceUpdate, StepOutput, StepPlan
from diptych.errors import (
    DiptychError,
    InvalidRequestError,
    LogitsError,
)
from diptych.v1 import common_pb2, decode_pb2
from tests.unit.decode_worker.sequences_rig import (
    MAX_LEN,
    NUM_BLOCKS,
    VOCAB,
    ModelPull,
    Rig,
    events,
    kinds,
    reserve,
    spec,
)

MAX_STEPS = 100  # until all that a worker holds has ended
SELDOM = st.sampled_from([False] * 7 + [True])


class RouterSequencesMachine(RuleBasedStateMachine):
    """Two routers on one worker. ``log`` holds, for each sequence, what was said of it."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.routers = [self.rig.sequences("a"), self.rig.sequences("b")]
        self.next_ids = [count(1), count(1)]  # each router's own: they are the same numbers
        self.log: dict[tuple[int, int], list[str]] = {}
        self.known: dict[tuple[int, int], int] = {}  # tokens the router has of it
        self.cached: dict[tuple[int, int], int] = {}
        self.pulls: dict[tuple[int, int], RunPull] = {}  # under way
        self.bind_id = 0

    def act(self, router: int, decided: list[Action]) -> None:
        for action in decided:
            match action:
                case RunPull(sequence_id, _, _):
                    assert (router, sequence_id) not in self.pulls, "two pulls at once"
                    self.pulls[router, sequence_id] = action
                case StopPull(sequence_id, bind_id):
                    stopped = self.pulls.pop((router, sequence_id))
                    assert stopped.bind_id == bind_id
                    assert isinstance(stopped.pull, ModelPull)
                    assert stopped.pull.over
                case SendTokens(tokens):
                    for token in tokens:
                        key = (router, token.sequence_id)
                        assert token.position == self.known[key], "a gap or a repeat"
                        self.known[key] += 1
                        self.say(key, "token")
                case SendEvent(event):
                    kind = event.WhichOneof("event")
                    assert kind is not None
                    message = getattr(event, kind)
                    key = (router, message.sequence_id)
                    if kind == "reserved":
                        self.cached[key] = message.num_cached_tokens
                    self.say(key, kind)

    def say(self, key: tuple[int, int], what: str) -> None:
        assert "ended" not in self.log[key], f"{what} after ended"
        self.log[key].append(what)

    def pick(self, data: st.DataObject) -> tuple[int, int]:
        """Mostly one that has not ended."""
        held = [key for key, said in self.log.items() if "ended" not in said]
        is_any = data.draw(SELDOM) or not held
        return data.draw(st.sampled_from(sorted(self.log if is_any else held)))

    @rule(
        routers=st.sampled_from([[0], [1], [0, 1], [1, 0]]),
        num=st.integers(1, 24),
        seed=st.integers(0, 2),
    )
    def reserve(self, routers: list[int], num: int, seed: int) -> None:
        for router in routers:
            key = (router, next(self.next_ids[router]))
            self.log[key], self.known[key] = [], num
            self.act(router, self.routers[router].reserve(reserve(key[1], num, seed=seed)))
            assert self.log[key] in (["reserved"], ["ended"])

    @precondition(lambda self: self.log)
    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        router, sequence_id = key = self.pick(data)
        self.bind_id += 1
        command = decode_pb2.Bind(
            sequence_id=sequence_id,
            bind_id=self.bind_id,
            first_missing_token=self.cached.get(key, 0),
        )
        self.act(router, self.routers[router].bind(command))

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), proven=st.booleans(), num_lingering=st.integers(0, 2))
    def pull_ends(self, data: st.DataObject, proven: bool, num_lingering: int) -> None:
        router, sequence_id = key = data.draw(st.sampled_from(sorted(self.pulls)))
        run = self.pulls.pop(key)
        pull, sequences = run.pull, self.routers[router]
        assert isinstance(pull, ModelPull)
        pull.over = True
        if proven and not self.rig.unfinished & set(pull.request.local_block_ids):
            stats = common_pb2.TransferStats()
            self.act(router, sequences.pull_proven(sequence_id, run.bind_id, stats))
            assert sequences.phase_of(sequence_id) is Phase.PROVEN
        else:
            self.rig.leave_reads(pull.request.local_block_ids[:num_lingering])
            failure = decode_pb2.PULL_FAILURE_TRANSPORT
            self.act(router, sequences.pull_failed(sequence_id, run.bind_id, failure, "broken"))
            assert sequences.phase_of(sequence_id) is Phase.RESERVED
            assert self.log[key][-1] == "pull_failed"

    @precondition(lambda self: self.log)
    @rule(
        data=st.data(),
        num_emitted=st.integers(0, 2),
        compute_missing=st.sampled_from([True, True, True, False]),
    )
    def start(self, data: st.DataObject, num_emitted: int, compute_missing: bool) -> None:
        router, sequence_id = key = self.pick(data)
        sequences = self.routers[router]
        before = sequences.phase_of(sequence_id)
        emitted = [(self.known[key] + i) % VOCAB for i in range(num_emitted)]
        command = decode_pb2.Start(
            sequence_id=sequence_id, emitted_token_ids=emitted, compute_missing=compute_missing
        )
        if before is not Phase.RUNNING:
            self.known[key] += num_emitted
        self.act(router, sequences.start(command))
        if before in (Phase.RESERVED, Phase.PULLING) and not compute_missing:
            assert sequences.phase_of(sequence_id) is None
        if before is Phase.PROVEN and self.known[key] < MAX_LEN:
            assert sequences.phase_of(sequence_id) is Phase.RUNNING

    @precondition(lambda self: self.log)
    @rule(data=st.data(), is_done=SELDOM)
    def release(self, data: st.DataObject, is_done: bool) -> None:
        if not is_done:
            return
        router, sequence_id = key = self.pick(data)
        self.act(router, self.routers[router].release(sequence_id))
        assert self.log[key][-1] == "ended"
        assert self.routers[router].release(sequence_id) == []

    @rule(num_lingering=st.integers(0, 2))
    def next_abandoned_pull_leaves(self, num_lingering: int) -> None:
        self.rig.num_lingering = num_lingering

    @rule()
    def reads_end(self) -> None:
        self.rig.end_reads()

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for sequences, decided in self.rig.step(self.routers):
                self.act(self.routers.index(sequences), decided)

    @rule(router=st.integers(0, 1), breaks=SELDOM)
    def stream_breaks(self, router: int, breaks: bool) -> None:
        if not breaks:
            return
        self.act(router, self.routers[router].release_all())
        assert len(self.routers[router]) == 0
        self.routers[router] = self.rig.sequences("ab"[router])

    @invariant()
    def every_sequence_is_open_or_ended_once(self) -> None:
        for (router, sequence_id), said in self.log.items():
            is_open = self.routers[router].phase_of(sequence_id) is not None
            assert said.count("ended") == (0 if is_open else 1)

    @invariant()
    def pulls_run_exactly_where_the_session_says(self) -> None:
        for router, sequence_id in self.log:
            pulling = self.routers[router].phase_of(sequence_id) is Phase.PULLING
            assert pulling == ((router, sequence_id) in self.pulls)

    @invariant()
    def blocks_have_owners(self) -> None:
        counts = self.rig.pool.counts()
        assert sum(counts) == 2 * counts.total
        if not any(map(len, self.routers)):
            assert counts.running == counts.reserved == counts.leased == 0
            assert counts.quarantined == len(self.rig.unfinished)

    def run_to_the_end(self) -> None:
        """All that is held gets its tokens: each router those of its own sequences."""
        self.rig.end_reads()
        for router, sequence_id in sorted(self.log):
            start = decode_pb2.Start(sequence_id=sequence_id, compute_missing=True)
            self.act(router, self.routers[router].start(start))
        for _ in range(MAX_STEPS):
            self.step(1)
        assert not any(map(len, self.routers)), "no end in sight"

    def teardown(self) -> None:
        self.run_to_the_end()
        self.rig.end_reads()
        counts = self.rig.pool.counts()
        assert counts.free + counts.cached == counts.total


TestRouterSequences = RouterSequencesMachine.TestCase
TestRouterSequences.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def failure_of(decided: list[Action]) -> DiptychError | str:
    (event,) = events(decided)[-1:]
    return event.ended.failure.reason


def test_a_released_pull_is_stopped_first() -> None:
    rig = Rig()
    sequences = rig.sequences()
    sequences.reserve(reserve(1, 9))
    bind = decode_pb2.Bind(sequence_id=1, bind_id=1, source_address="p", ticket=b"t" * 16)
    (run,) = sequences.bind(bind)
    assert isinstance(run, RunPull)
    assert isinstance(run.pull, ModelPull)
    assert len(run.pull.request.local_block_ids) >= 3
    rig.num_lingering = 2
    decided = sequences.release(1)
    assert decided[0] == StopPull(1, 1)
    assert kinds(decided) == ["ended"]
    assert rig.pool.counts().quarantined == 2
    rig.end_reads()
    assert rig.pool.counts().free == NUM_BLOCKS


def test_a_step_gives_each_router_the_tokens_of_its_own_sequence() -> None:
    """Every router counts from 1: two have sequences of one id."""
    rig = Rig()
    routers = [rig.sequences("a"), rig.sequences("b")]
    for sequences, num_tokens in zip(routers, (3, 5), strict=True):
        sequences.reserve(reserve(1, num_tokens))
        sequences.start(decode_pb2.Start(sequence_id=1, compute_missing=True))
    sent = [decided for _, decided in rig.step(routers)]
    assert sent == [
        [SendTokens((NewToken(1, 3, 3, None),))],
        [SendTokens((NewToken(1, 5, 5, None),))],
    ]


def test_an_older_bind_is_ignored_and_a_newer_replaces() -> None:
    sequences = Rig().sequences()
    sequences.reserve(reserve(1, 9))
    sequences.bind(decode_pb2.Bind(sequence_id=1, bind_id=2))
    assert sequences.bind(decode_pb2.Bind(sequence_id=1, bind_id=2)) == []
    stop, run = sequences.bind(decode_pb2.Bind(sequence_id=1, bind_id=3))
    assert stop == StopPull(1, 2)
    assert isinstance(run, RunPull)
    assert sequences.pull_proven(1, 2, common_pb2.TransferStats()) == []
    assert kinds(sequences.pull_proven(1, 3, common_pb2.TransferStats())) == ["proven"]


def test_local_prefill_may_be_forbidden() -> None:
    sequences = Rig(local_prefill=False).sequences()
    sequences.reserve(reserve(1, 9))
    decided = sequences.start(decode_pb2.Start(sequence_id=1, compute_missing=True))
    assert failure_of(decided) == "REQUEST_INVALID"
    assert len(sequences) == 0


def test_a_pace_counts_from_when_the_first_token_was_out() -> None:
    rig = Rig()
    sequences = rig.sequences()
    for sequence_id, emitted in ((1, [1]), (2, [])):
        sequences.reserve(reserve(sequence_id, 3))
        sequences.start(
            decode_pb2.Start(
                sequence_id=sequence_id,
                emitted_token_ids=emitted,
                emitted_age_s=0.5,
                compute_missing=True,
            )
        )
    told, silent = (sequences._held[sequence_id].sequence for sequence_id in (1, 2))
    assert told.emitted_s == pytest.approx(time.monotonic() - 0.5, abs=0.25)
    assert silent.emitted_s is None


def test_a_first_token_is_due_when_it_was_however_long_the_pull_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where unfinished reads take the blocks that it had."""
    rig = Rig()
    sequences, command = rig.sequences(), reserve(1, 9)
    command.spec.due_in_s = 2.0
    sequences.reserve(command)
    before = sequences._held[1].sequence
    sequences.bind(decode_pb2.Bind(sequence_id=1, bind_id=1))
    rig.num_lingering = 2
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 5.0)
    sequences.start(decode_pb2.Start(sequence_id=1, compute_missing=True))
    after = sequences._held[1].sequence
    assert after is not before
    assert after.due_s == before.due_s


@pytest.mark.parametrize("ends", ["step", "release", "stream"])
def test_who_lost_its_blocks_to_late_reads_waits_for_those_that_leave_for_it(ends: str) -> None:
    rig = Rig()
    sequences = rig.sequences()
    sequences.reserve(reserve(1, 24, yields=True))
    sequences.start(decode_pb2.Start(sequence_id=1, compute_missing=True))
    while not rig.scheduler.decoding:
        rig.step([sequences])
    assert kinds(sequences.reserve(reserve(2, 13, seed=1))) == ["reserved"]
    sequences.bind(decode_pb2.Bind(sequence_id=2, bind_id=1))
    rig.num_lingering = 2
    plan = rig.scheduler.schedule()
    assert plan is not None
    start = decode_pb2.Start(sequence_id=2, emitted_token_ids=[5], compute_missing=True)
    assert sequences.start(start) == [StopPull(2, 1)]
    assert sequences.bind(decode_pb2.Bind(sequence_id=2, bind_id=2)) == []
    assert sequences.start(start) == []
    assert rig.observer.fallbacks == [Fallback.LOCAL]
    if ends != "step":
        ended = sequences.release(2) if ends == "release" else sequences.release_all()
        assert set(kinds(ended)) == {"ended"}
    output = StepOutput(tokens=(SampledToken(3, math.nan),), duration_s=0.0)
    decided = sequences.step(rig.scheduler.update(plan, output))
    assert kinds(decided) == []
    if ends == "step":
        assert rig.observer.fallbacks == [Fallback.LOCAL, Fallback.RECOMPUTE]
        while sequences.phase_of(2) is not None:
            ((_, decided),) = rig.step([sequences])
        assert events(decided)[-1].ended.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert events(decided)[-1].ended.num_computed_tokens == 16
    else:
        assert rig.observer.fallbacks == [Fallback.LOCAL]


def test_fallbacks_are_told_apart() -> None:
    rig = Rig()
    sequences = rig.sequences()
    sequences.reserve(reserve(1, 9))
    sequences.start(decode_pb2.Start(sequence_id=1, compute_missing=True))
    sequences.reserve(reserve(2, 3))
    sequences.bind(decode_pb2.Bind(sequence_id=2, bind_id=1))
    sequences.start(decode_pb2.Start(sequence_id=2, compute_missing=True))
    sequences.reserve(reserve(3, 2))
    sequences.bind(decode_pb2.Bind(sequence_id=3, bind_id=1))
    sequences.pull_proven(3, 1, common_pb2.TransferStats())
    sequences.start(decode_pb2.Start(sequence_id=3, emitted_token_ids=[1]))
    assert rig.observer.fallbacks == [Fallback.LOCAL, Fallback.RECOMPUTE, None]


def test_a_draining_worker_reserves_nothing() -> None:
    rig = Rig()
    rig.draining = True
    assert failure_of(rig.sequences().reserve(reserve(1, 9))) == "WORKER_DRAINING"


def test_what_cannot_run_here_is_not_reserved() -> None:
    rig = Rig()
    command = reserve(1, 9)
    command.spec.token_ids[3] = VOCAB
    assert failure_of(rig.sequences().reserve(command)) == "REQUEST_INVALID"
    assert rig.pool.num_available_blocks == NUM_BLOCKS


def test_too_full_is_said_at_once() -> None:
    sequences = Rig().sequences()
    sequences.reserve(reserve(1, 24))
    assert failure_of(sequences.reserve(reserve(2, 24, seed=5))) == "KV_BLOCKS_EXHAUSTED"
    assert sequences.phase_of(1) is Phase.RESERVED


class BatchAtWork:
    """A batch's sequence holds most blocks, and a step with it is in flight."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.sequences = self.rig.sequences()
        self.sequences.reserve(reserve(1, 24, yields=True))
        self.sequences.start(decode_pb2.Start(sequence_id=1, compute_missing=True))
        plan = self.rig.scheduler.schedule()
        assert plan is not None
        self.plan = plan

    def end_step(self) -> list[Action]:
        output = StepOutput(tokens=(None,), duration_s=0.0)
        return self.sequences.step(self.rig.scheduler.update(self.plan, output))


def test_blocks_of_a_batch_at_work_are_reserved_when_its_step_ends() -> None:
    at_work = BatchAtWork()
    assert at_work.sequences.reserve(reserve(2, 24, seed=5)) == []
    with pytest.raises(InvalidRequestError, match="in use"):
        at_work.sequences.reserve(reserve(2, 24, seed=5))
    assert kinds(at_work.end_step()) == ["reserved"]
    assert at_work.sequences.phase_of(2) is Phase.RESERVED
    assert at_work.sequences.phase_of(1) is Phase.RUNNING
    assert at_work.rig.scheduler.num_batch_preemptions == 1


def test_for_another_of_a_batch_nobody_leaves() -> None:
    at_work = BatchAtWork()
    refused = at_work.sequences.reserve(reserve(2, 24, seed=5, yields=True))
    assert failure_of(refused) == "KV_BLOCKS_EXHAUSTED"


@pytest.mark.parametrize("is_all", [False, True])
def test_who_is_released_before_its_blocks_come_ends_once(is_all: bool) -> None:
    at_work = BatchAtWork()
    sequences = at_work.sequences
    sequences.reserve(reserve(2, 24, seed=5))
    ended = events(sequences.release_all() if is_all else sequences.release(2))
    assert [event.ended.sequence_id for event in ended] == ([2, 1] if is_all else [2])
    assert sequences.release(2) == []
    assert not any(event.HasField("reserved") for event in events(at_work.end_step()))


def test_a_sequence_without_numbers_ends_with_an_error() -> None:
    rig = Rig()
    sequences = rig.sequences()
    for sequence_id in (1, 2):
        sequences.reserve(reserve(sequence_id, 3, seed=sequence_id))
        sequences.start(decode_pb2.Start(sequence_id=sequence_id, compute_missing=True))
    plan = rig.scheduler.schedule()
    assert plan is not None
    tokens = (LogitsError("not numbers"), SampledToken(1, float("nan")))
    updates = rig.scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.0))
    said = events(sequences.step(updates))
    assert [event.ended.failure.reason for event in said if event.HasField("ended")] == [
        "LOGITS_NOT_FINITE"
    ]
    assert sequences.phase_of(2) is Phase.RUNNING
    assert len(sequences) == 1


def test_computed_tokens_are_counted() -> None:
    rig = Rig()
    sequences = rig.sequences()
    sequences.reserve(reserve(1, 9))
    sequences.start(decode_pb2.Start(sequence_id=1, compute_missing=True))
    said: list[decode_pb2.DecodeEvent] = []
    while len(sequences):
        said += [e for _, decided in rig.step([sequences]) for e in events(decided)]
    (event,) = said
    assert event.ended.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert event.ended.num_computed_tokens == 9 + 3  # the last token's KV is never needed
    assert event.ended.num_computed_prompt_tokens == 9


def test_what_a_preempted_sequence_finds_cached_is_not_counted_as_computed() -> None:
    rig = Rig()
    sequences, update = rig.sequences(), rig.scheduler.update
    num_in_steps = 0

    def count(plan: StepPlan, output: StepOutput) -> list[SequenceUpdate]:
        nonlocal num_in_steps
        num_in_steps += plan.num_tokens
        return update(plan, output)

    rig.scheduler.update = count  # type: ignore[method-assign]
    for sequence_id in (1, 2):
        wanted = spec(20, max_tokens=12, seed=5 * sequence_id)
        sequences.reserve(decode_pb2.Reserve(sequence_id=sequence_id, spec=wanted))
        sequences.start(decode_pb2.Start(sequence_id=sequence_id, compute_missing=True))
    said: list[decode_pb2.DecodeEvent] = []
    while len(sequences):
        said += [e for _, decided in rig.step([sequences]) for e in events(decided)]
    assert sum(event.ended.num_preemptions for event in said) > 0
    assert sum(event.ended.num_computed_tokens for event in said) == num_in_steps
    again = [event.ended for event in said if event.ended.num_preemptions]
    assert all(ended.num_computed_prompt_tokens > 20 for ended in again), "counted again"
