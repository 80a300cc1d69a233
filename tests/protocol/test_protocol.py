"""The hand-off under every order of messages, losses, duplicates, delays and crashes."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from diptych.v1 import decode_pb2, prefill_pb2
from tests.protocol.cluster import Cluster
from tests.protocol.routers import Question
from tests.protocol.workers import FakeRead

BASES = ((1, 2, 3, 4, 1, 2, 7, 3), (1, 2, 3, 4, 0, 7, 7, 1), (6, 6, 1, 0, 2, 3, 4, 4))
QUESTIONS = st.builds(
    lambda base, num_tokens, max_tokens, deadline_s, stop_at: Question(
        base[:num_tokens], max_tokens, deadline_s, stop_at
    ),
    st.sampled_from(BASES),
    st.integers(1, 8),
    st.sampled_from([6, 4, 2, 1]),
    st.sampled_from([None, None, None, 1.0]),
    st.sampled_from([None, None, None, 2]),
)
SLOW = ("", "", "land", "digest", "deliver prefill", "deliver decode", "deliver fetch", "step")
MAX_ASKING = 4


class ProtocolMachine(RuleBasedStateMachine):
    """``Cluster.check`` runs after every event; the end heals everything and counts."""

    num_workers = 2  # of each role

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(self.num_workers, self.num_workers)

    @initialize(questions=st.lists(QUESTIONS, min_size=1, max_size=3))
    def begin(self, questions: list[Question]) -> None:
        for question in questions:
            self.cluster.ask(question)

    @rule(question=QUESTIONS)
    def ask(self, question: Question) -> None:
        if sum(not request.is_over for request in self.cluster.requests) < MAX_ASKING:
            self.cluster.ask(question)

    @rule(
        seed=st.integers(0, 2**16),
        num_events=st.sampled_from([1, 3, 8, 20, 40]),
        slow=st.sampled_from(SLOW),
    )
    def go_on(self, seed: int, num_events: int, slow: str) -> None:
        """So many events in some order; those named ``slow`` wait."""
        self.cluster.run(Random(seed), num_events, slow)

    go_on_too = go_on_still = go_on

    @rule(seed=st.integers(0, 2**16))
    def go_on_until_a_read_is_posted(self, seed: int) -> None:
        random = Random(seed)
        for _ in range(40):
            if self.cluster.reads():
                break
            self.cluster.run(random, 1)

    @rule(seed=st.integers(0, 2**16), num_tokens=st.integers(1, 8))
    def equally_long_prompts_whose_tickets_are_mixed_up(self, seed: int, num_tokens: int) -> None:
        random = Random(seed)
        for base in BASES[1:]:
            self.ask(Question(base[:num_tokens], 4, None, None))
        for _ in range(60):
            if self.cluster.mix_up_tickets():
                break
            self.cluster.run(random, 1)

    @rule(seconds=st.sampled_from([0.05, 0.3, 0.6, 1.1, 2.1, 5.1]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.pass_time(seconds)

    @precondition(lambda self: self.cluster.requests)
    @rule(index=st.integers(0, 3))
    def cancel(self, index: int) -> None:
        request = self.cluster.requests[-1 - index % len(self.cluster.requests)]
        if not request.is_over:
            request.cancel()
            self.cluster.check()

    @precondition(lambda self: self.cluster.streams)
    @rule(index=st.integers(0, 20), num_kept=st.integers(0, 2))
    def a_stream_breaks(self, index: int, num_kept: int) -> None:
        streams = list(self.cluster.streams)
        streams[-1 - index % len(streams)].breaks(num_kept)
        self.cluster.check()

    @precondition(lambda self: self.cluster.reads())
    @rule(index=st.integers(0, 20))
    def a_lease_breaks_while_it_is_read(self, index: int) -> None:
        leases = [s for s in self.cluster.streams if s.up.name.startswith("prefill")]
        if leases:
            leases[index % len(leases)].breaks()
            self.cluster.run(Random(index), 10, "land")

    @rule(index=st.integers(0, 3), num_kept=st.integers(0, 2))
    def a_worker_restarts(self, index: int, num_kept: int) -> None:
        workers = self.cluster.workers
        self.cluster.crash_worker(workers[index % len(workers)], num_kept)

    @rule(num_kept=st.integers(0, 2))
    def the_router_restarts(self, num_kept: int) -> None:
        self.cluster.crash_router(num_kept)

    @rule(index=st.integers(0, 3))
    def a_pair_is_lost(self, index: int) -> None:
        decode = self.cluster.decodes[index // 2 % self.num_workers]
        decode.connected.pop(self.cluster.prefills[index % self.num_workers].identity, None)

    @rule(index=st.integers(0, 1))
    def an_agent_is_torn_down(self, index: int) -> None:
        self.cluster.decodes[index % self.num_workers].tear_down_agent()
        self.cluster.check()

    @precondition(lambda self: self.cluster.reads())
    @rule(index=st.integers(0, 9), fault=st.sampled_from(["flip", "truncate", "tear"]))
    def a_read_lands_damaged(self, index: int, fault: str) -> None:
        self._read(index).land(fault)
        self.cluster.check()

    @precondition(lambda self: self.cluster.reads())
    @rule(index=st.integers(0, 9), lost=st.booleans())
    def a_read_fails(self, index: int, lost: bool) -> None:
        self.cluster.end_read(self._read(index), lost=lost)

    @precondition(lambda self: self.cluster.reads())
    @rule(index=st.integers(0, 9), all_of_them=st.booleans())
    def a_read_is_unfinished_for_long(self, index: int, all_of_them: bool) -> None:
        for read in self.cluster.reads() if all_of_them else [self._read(index)]:
            read.stuck = True

    @precondition(lambda self: self.cluster.reads())
    @rule(index=st.integers(0, 9))
    def a_read_writes_and_goes_on(self, index: int) -> None:
        self._read(index).write("tear")
        self.cluster.check()

    def _read(self, index: int) -> FakeRead:
        reads = self.cluster.reads()
        return reads[index % len(reads)]

    @rule(seed=st.integers(0, 2**16))
    def a_message_is_repeated(self, seed: int) -> None:
        """The next that a retry could repeat."""
        random = Random(seed)
        for _ in range(30):
            self.cluster.run(random, 1)
            for stream in self.cluster.streams:
                for message in list(stream.up.queue):
                    if _may_be_repeated(message):
                        stream.up.repeat(message)
                        self.cluster.run(random, 3)
                        return

    def teardown(self) -> None:
        self.cluster.heal()


def _may_be_repeated(message: object) -> bool:
    match message:
        case prefill_pb2.PrefillCommand():
            return message.HasField("grant")
        case decode_pb2.DecodeCommand():
            return message.WhichOneof("command") in ("bind", "release")
        case _:
            return type(message).__name__ == "FetchCommand" and message.HasField("confirm")  # type: ignore[attr-defined]


TestProtocol = ProtocolMachine.TestCase


class SmallMachine(ProtocolMachine):
    """One worker of each role that never restarts: deep rather than wide."""

    num_workers = 1
    a_worker_restarts = None  # type: ignore[assignment]
    the_router_restarts = None  # type: ignore[assignment]
    time_passes = None  # type: ignore[assignment]


IS_LONG = settings.get_current_profile_name() == "long"
TestSmall = SmallMachine.TestCase
TestSmall.settings = TestProtocol.settings = settings(
    max_examples=10_000 if IS_LONG else 80,
    stateful_step_count=30,
    derandomize=not IS_LONG,  # the short form is the same each time
    deadline=None,
)
pytestmark = pytest.mark.timeout(7200 if IS_LONG else 300)
