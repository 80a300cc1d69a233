"""Roles that flip while leases and sequences are under way, on one pool: any order of all of it.

Scheduler, pool, leases, sequences and roles are the real ones; the model is a count.
"""

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_worker.actions import SendEvent, SendTokens
from decode_worker.router_sequences import RouterSequences
from decode_worker.worker_limits import WorkerLimits
from diptych.engine.scheduling.audit import pool_mismatch
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.step import SampledToken, StepOutput, StepPlan
from diptych.errors import BlocksExhaustedError, WorkerDrainingError
from diptych.v1 import common_pb2, decode_pb2, prefill_pb2, worker_pb2
from diptych.worker.status import WorkerStatus
from kvtransfer.source.lease_table import LeaseTable
from prefill_worker.lease_session import LeasePhase, LeaseSession
from tests.unit.decode_worker.sequences_rig import ModelPull, Observer, Rig

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, VOCAB, MAX_TOKENS = 4, 16, 32, 16, 4
PREFILL, DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE


def spec(num_tokens: int, seed: int) -> common_pb2.SequenceSpec:
    return common_pb2.SequenceSpec(
        token_ids=[(seed + i) % VOCAB for i in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        sampling=common_pb2.SamplingParams(temperature=0, seed=1, max_tokens=MAX_TOKENS),
    )


class SoftWorker:
    """The pure parts of a worker of both roles, and a clock that each look advances."""

    def __init__(self) -> None:
        self.status = WorkerStatus(PREFILL, DECODE)
        self.status.loaded = True
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        limits = SchedulerConfig(max_num_seqs=4, max_batched_tokens=8, max_model_len=MAX_LEN)
        self.scheduler = Scheduler(limits, self.pool)
        self.table = LeaseTable(BLOCK_SIZE, self.pool.generation)
        self.leases: dict[int, LeaseSession] = {}
        self.sequences = RouterSequences(
            "r",
            self.scheduler,
            WorkerLimits(
                vocab_size=VOCAB, max_model_len=MAX_LEN, block_size=BLOCK_SIZE, local_prefill=True
            ),
            open_pull=lambda request: ModelPull(request, Rig()),
            unfinished_reads=set(),
            admit=lambda: self.status.admit_as(DECODE),
            observer=Observer(),
        )
        self.tokens: dict[int, list[int]] = {}  # of each sequence, as they were sent
        self.ended: dict[int, decode_pb2.Ended] = {}
        self.now = 0.0

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def open_lease(self, sequence_id: int, num_tokens: int, seed: int) -> None:
        """As a stream does. Raises WorkerDrainingError, BlocksExhaustedError."""
        self.status.admit_as(PREFILL)
        lease = LeaseSession(
            self.scheduler, self.table, vocab_size=VOCAB, max_model_len=MAX_LEN, clock=self.clock
        )
        lease.start(
            prefill_pb2.PrefillStart(
                router_incarnation="r", sequence_id=sequence_id, spec=spec(num_tokens, seed)
            )
        )
        self.leases[sequence_id] = lease

    def reserve(self, sequence_id: int, num_tokens: int, seed: int) -> decode_pb2.DecodeEvent:
        """What it answers; a sequence that it takes is started at once."""
        asked = decode_pb2.Reserve(sequence_id=sequence_id, spec=spec(num_tokens, seed))
        (said,) = self.sequences.reserve(asked)
        assert isinstance(said, SendEvent)
        if said.event.HasField("reserved"):
            self.tokens[sequence_id] = []
            start = decode_pb2.Start(sequence_id=sequence_id, compute_missing=True)
            assert self.sequences.start(start) == []
        return said.event

    def step(self) -> bool:
        """One step, if there is something to do."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._finish(plan)
        return plan is not None

    def _finish(self, plan: StepPlan) -> None:
        drawn = tuple(
            SampledToken(chunk.end % VOCAB, 0.5) if chunk.sample else None for chunk in plan.chunks
        )
        updates = self.scheduler.update(plan, StepOutput(tokens=drawn, duration_s=0.0))
        for update in updates:
            for lease in self.leases.values():
                lease.step(update, self.clock())
        for action in self.sequences.step(updates):
            if isinstance(action, SendTokens):
                for token in action.tokens:
                    self.tokens[token.sequence_id].append(token.token_id)
            elif isinstance(action, SendEvent):
                self.ended[action.event.ended.sequence_id] = action.event.ended


class Flips(RuleBasedStateMachine):
    """What is admitted ends well, whatever the roles are meanwhile; and nothing else is."""

    def __init__(self) -> None:
        super().__init__()
        self.worker = SoftWorker()
        self.lengths: dict[int, int] = {}  # prompts of admitted sequences
        self.ids = count(1)

    @rule(roles=st.sampled_from([(PREFILL,), (DECODE,), (DECODE, PREFILL)]))
    def flip(self, roles: tuple[worker_pb2.WorkerRole, ...]) -> None:
        worker = self.worker
        before = (len(worker.leases), len(worker.sequences), worker.pool.counts())
        worker.status.set_roles(roles)
        assert set(worker.status.roles) == set(roles)
        assert (len(worker.leases), len(worker.sequences), worker.pool.counts()) == before

    @rule(num_tokens=st.integers(1, 12), seed=st.integers(0, 3))
    def open_lease(self, num_tokens: int, seed: int) -> None:
        refused = None
        try:
            self.worker.open_lease(next(self.ids), num_tokens, seed)
        except (WorkerDrainingError, BlocksExhaustedError) as error:
            refused = error
        is_held = PREFILL in self.worker.status.roles
        assert isinstance(refused, WorkerDrainingError) is not is_held

    @rule(num_tokens=st.integers(1, 12), seed=st.integers(0, 3))
    def reserve(self, num_tokens: int, seed: int) -> None:
        sequence_id = next(self.ids)
        said = self.worker.reserve(sequence_id, num_tokens, seed)
        is_held = DECODE in self.worker.status.roles
        is_refused = said.ended.failure.reason == WorkerDrainingError.reason
        assert is_refused is not is_held
        if said.HasField("reserved"):
            self.lengths[sequence_id] = num_tokens

    @rule()
    def step(self) -> None:
        self.worker.step()

    @precondition(lambda self: self.worker.leases)
    @rule(data=st.data())
    def close_lease(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.worker.leases)))
        self.worker.leases.pop(sequence_id).close()

    @invariant()
    def the_books_agree(self) -> None:
        assert pool_mismatch(self.worker.pool, self.worker.scheduler) is None

    def teardown(self) -> None:
        worker = self.worker
        while worker.step():
            pass
        phases = [lease.phase for lease in worker.leases.values()]
        assert phases == [LeasePhase.COMPUTED] * len(phases), "what was leased is computed"
        for lease in worker.leases.values():
            lease.close()
        while worker.step():
            pass
        assert len(worker.sequences) == 0
        for sequence_id, length in self.lengths.items():
            assert worker.ended[sequence_id].finish_reason == common_pb2.FINISH_REASON_LENGTH
            wanted = [(length + i) % VOCAB for i in range(MAX_TOKENS)]
            assert worker.tokens[sequence_id] == wanted
        counts = worker.pool.counts()
        assert counts.free + counts.cached == counts.total


TestFlips = Flips.TestCase
TestFlips.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
