"""What may happen to the hand-off, in any order: what goes over streams, losses, crashes."""

from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from diptych.v1 import decode_pb2, prefill_pb2
from kvtransfer.config import DigestLevel
from tests.protocol.cluster import EVERYTHING, NUM_ROUTERS, Cluster
from tests.protocol.pulls import FakeRead
from tests.protocol.routers import Question

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
ROUTERS = st.integers(0, NUM_ROUTERS - 1)
SLOW = ("", "", "land", "digest", "deliver prefill", "deliver decode", "deliver fetch", "step")
MAX_ASKING = 4


class ProtocolMachine(RuleBasedStateMachine):
    """``Cluster.check`` runs after every event; the end heals everything and counts."""

    num_workers = 2  # of each role
    watch = EVERYTHING

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(self.num_workers, watch=self.watch)

    @initialize(
        digest_level=st.sampled_from(["full", "off", "sampled", "off"]),
        questions=st.lists(st.tuples(QUESTIONS, ROUTERS), min_size=1, max_size=3),
    )
    def begin(self, digest_level: DigestLevel, questions: list[tuple[Question, int]]) -> None:
        if digest_level != "full":
            self.cluster = Cluster(self.num_workers, digest_level, self.watch)
        for question, router in questions:
            self.cluster.ask(question, router)

    @rule(question=QUESTIONS, router=ROUTERS)
    def ask(self, question: Question, router: int) -> None:
        if sum(not request.is_over for request in self.cluster.requests) < MAX_ASKING:
            self.cluster.ask(question, router)

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
            self.cluster.run(random, 1, "land")

    @rule(seed=st.integers(0, 2**16), num_tokens=st.integers(1, 8))
    def equally_long_prompts_whose_tickets_are_mixed_up(self, seed: int, num_tokens: int) -> None:
        random = Random(seed)
        for base in BASES[1:]:
            self.ask(Question(base[:num_tokens], 4, None, None), 0)
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
    @rule(index=st.integers(0, 20), num_kept=st.integers(0, 2), num_kept_down=st.integers(0, 2))
    def a_stream_breaks(self, index: int, num_kept: int, num_kept_down: int) -> None:
        streams = list(self.cluster.streams)
        streams[-1 - index % len(streams)].breaks(num_kept, num_kept_down)
        self.cluster.check()

    @rule(
        seed=st.integers(0, 2**16),
        which=st.sampled_from(["fetch up", "fetch down"]),
        num_events_until=st.sampled_from([0, 20, 60]),
    )
    def a_message_of_a_fetch_is_lost(self, seed: int, which: str, num_events_until: int) -> None:
        """gRPC loses none; a Fetch numbers its events all the same, and asks to be confirmed.

        With no other fault to follow, that alone is noticed: where the last range is lost, no
        gap between ranges shows it. So the loss waits, until the source has said everything.
        """
        random = Random(seed)
        for _ in range(30):
            self.cluster.run(random, 1)
            ways = [way for s in self.cluster.streams for way in (s.up, s.down)]
            waiting = [way for way in ways if way.name == which and way.messages]
            if waiting:
                self.cluster.run(random, num_events_until, "deliver fetch")
                way = random.choice(waiting)
                if way.messages:
                    way.drop(way.messages[-1])
                    self.cluster.heal()
                return

    @rule(seed=st.integers(0, 2**16))
    def the_last_message_of_a_stream_is_lost(self, seed: int) -> None:
        """The end of a stream may overtake what was sent right before it."""
        random = Random(seed)
        for _ in range(30):
            self.cluster.run(random, 1)
            for stream in self.cluster.streams:
                if stream.up.drop_last() or stream.down.drop_last():
                    return

    @precondition(lambda self: self.cluster.reads())
    @rule(index=st.integers(0, 20))
    def a_lease_breaks_while_it_is_read(self, index: int) -> None:
        leases = [s for s in self.cluster.streams if s.up.name.startswith("prefill")]
        if leases:
            leases[index % len(leases)].breaks()
            self.cluster.run(Random(index), 10, "land")

    @precondition(lambda self: self.cluster.reads())
    @rule(index=st.integers(0, 9))
    def an_event_of_a_fetch_comes_twice(self, index: int) -> None:
        """The router binds again, to the same blocks, before what was posted has landed."""
        self._read(index).pull.hears_an_event_again()
        self.cluster.run(Random(index), 40, "land")

    @rule(seed=st.integers(0, 2**16), num_tokens=st.integers(1, 8))
    def a_lease_breaks_and_its_reader_hears_of_it_late(self, seed: int, num_tokens: int) -> None:
        """Meanwhile its blocks become other sequences', and what was posted lands."""
        self.ask(Question(BASES[seed % len(BASES)], 1, None, None), 0)
        self.go_on_until_a_read_is_posted(seed)
        if not self.cluster.reads():
            return
        random, unheard = Random(seed), ("wake fetch", "deliver prefill down")
        pull = random.choice(self.cluster.reads()).pull
        for _ in range(40):
            if not pull.is_all_posted:
                self.cluster.run(random, 1, "land")
        stream = self.cluster.lease_of(pull)
        if stream is None:
            return
        stream.breaks()
        stream.up.deliver()
        for base in BASES:
            self.ask(Question(base[:num_tokens], 1, None, None), 1)
        self.cluster.run(random, 40, (*unheard, "land", "deliver fetch"))
        pull.land_all()
        self.cluster.run(random, 10, unheard)

    @rule(index=st.integers(0, 3), num_kept=st.integers(0, 2))
    def a_worker_restarts(self, index: int, num_kept: int) -> None:
        workers = self.cluster.workers
        self.cluster.crash_worker(workers[index % len(workers)], num_kept)

    @rule(router=ROUTERS, num_kept=st.integers(0, 2))
    def a_router_restarts(self, router: int, num_kept: int) -> None:
        self.cluster.crash_router(router, num_kept)

    @rule(index=st.integers(0, 3))
    def a_pair_is_lost(self, index: int) -> None:
        decode = self.cluster.decodes[index // 2 % self.num_workers]
        decode.connected.pop(self.cluster.prefills[index % self.num_workers].identity, None)

    @rule(index=st.integers(0, 1))
    def an_agent_is_torn_down(self, index: int) -> None:
        self.cluster.decodes[index % self.num_workers].tear_down_agent()
        self.cluster.check()

    @precondition(lambda self: self.cluster.reads() and self.cluster.setting.digest_level != "off")
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
                for message in stream.up.messages:
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


class SmallMachine(ProtocolMachine):
    """One worker of each role that never restarts: deep rather than wide."""

    num_workers = 1
    a_worker_restarts = None  # type: ignore[assignment]
    a_router_restarts = None  # type: ignore[assignment]
    time_passes = None  # type: ignore[assignment]


IS_LONG = settings.get_current_profile_name() == "long"
NUM_EXAMPLES = 10_000 if IS_LONG else 80
SEARCH = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
