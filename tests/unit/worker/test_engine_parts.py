"""What a worker knows of its engine is in EngineParts, whoever made the engine."""

from collections.abc import Callable, Collection
from itertools import count

import pytest

from diptych.engine.protocol import EngineLoad, StepListener, StepRecord
from diptych.engine.scheduling.block_pool import BlockCounts
from diptych.engine.scheduling.queues import GivingWay
from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.engine.scheduling.step import SampledToken, SequenceUpdate
from diptych.errors import ConfigurationError
from diptych.paced import Paced, from_proto
from diptych.step_model import StepCost, StepModel, StepWork
from diptych.v1 import common_pb2, prefill_pb2, worker_pb2
from diptych.worker.engine_parts import EngineParts
from diptych.worker.scratch import PoolScratch
from kvtransfer.source.lease_table import LeaseTable
from prefill_worker.lease_session import LeasePhase, LeaseSession
from tests.device_memory import DeviceMemory

BLOCK_SIZE, BLOCK_BYTES, NUM_BLOCKS = 4, 64, 8
PACED = Paced(0.05, 0.6, 10, 20), Paced(0.05, 1.2, 20, 40)  # 0.9 and 1.8 s for these
LOST = Paced(0.05, 1.6, 10, 40)  # 22 ms for each of these, where a step of two takes 32


class OtherEngine:
    """None of our classes: computes whole prompts, one a step, and draws 7. No cache, no batch."""

    max_num_seqs = 3
    predicted_step_s = 0.25
    prefill_tokens_per_s = 100.0
    decode_step_s = 0.125
    prefill_time_ratio = 0.25
    prefill_age_s: float | None = None
    max_batched_tokens = 64
    step_model = StepModel(decode=StepCost(0.03, 0.001, num_steps=40))
    last_step: StepRecord | None = None
    cache_log = None

    def __init__(self) -> None:
        self.num_steps = 0
        self._block_ids = count()
        self._waiting: list[Sequence] = []
        self._listeners: list[StepListener] = []

    @property
    def step_due(self) -> bool:
        return bool(self._waiting)

    def add_prefill(self, seq: Sequence) -> None:
        self.reserve(seq)
        self._waiting.append(seq)

    def reserve(self, seq: Sequence) -> None:
        seq.block_table += [next(self._block_ids) for _ in range(-(-seq.num_tokens // BLOCK_SIZE))]

    def mark_proven(self, seq: Sequence) -> None:
        seq.num_computed_tokens = seq.num_tokens

    def start(self, seq: Sequence, emitted: list[int], compute_missing: bool) -> None:
        seq.token_ids += emitted
        self._waiting.append(seq)

    def release(self, seq: Sequence) -> None:
        seq.state = SequenceState.FINISHED
        seq.block_table.clear()

    def generation(self, block_id: int) -> int:
        return 1

    def quarantine(self, block_ids: Collection[int]) -> None: ...
    def end_quarantine(self, block_ids: Collection[int]) -> None: ...

    def subscribe(self, listener: StepListener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def run(self) -> None:
        while self._waiting:
            seq = self._waiting.pop(0)
            seq.num_computed_tokens, num_step_tokens = seq.num_tokens, seq.num_tokens
            seq.token_ids.append(7)
            seq.state = SequenceState.LEASED
            position = seq.num_tokens - 1
            token = SampledToken(7, 0.0)
            self.num_steps += 1
            for listener in self._listeners:
                listener([SequenceUpdate(seq, position, num_step_tokens, token, position, None)])

    def abandon(self) -> None: ...

    def load(self) -> EngineLoad:
        blocks = BlockCounts(NUM_BLOCKS, NUM_BLOCKS, 0, 0, 0, 0, 0)
        work = StepWork(2, 30, 0, 45)
        num_waiting, giving_way = len(self._waiting), GivingWay(2, 7)
        return EngineLoad(blocks, 0, num_waiting, 3, 0, 0, 0, work, giving_way=giving_way)

    def paced(self) -> list[Paced]:
        return [PACED[1], LOST, PACED[0]]

    def mismatch(self, quarantined: Collection[int]) -> str | None:
        return None


def other_parts() -> EngineParts:
    """With its KV where the host cannot look."""
    return EngineParts(
        engine=OtherEngine(),
        memory=DeviceMemory(bytearray((NUM_BLOCKS + 2) * BLOCK_BYTES), BLOCK_BYTES),
        scratch=PoolScratch(range(NUM_BLOCKS, NUM_BLOCKS + 2)),
        layout=common_pb2.KVLayout(block_size=BLOCK_SIZE, block_bytes=BLOCK_BYTES),
        vocab_size=100,
        max_model_len=30,
        text_digest="text",
    )


def test_watch_tells_of_any_engine() -> None:
    parts, state = other_parts(), worker_pb2.WorkerState()
    parts.describe(state)
    assert state.layout == parts.layout
    assert (state.vocab_size, state.max_model_len, state.max_num_seqs) == (100, 30, 3)
    assert (state.text_digest, state.blocks.free) == ("text", NUM_BLOCKS)
    assert (state.prefill_tokens_per_s, state.decode_step_s) == (100.0, 0.125)
    assert StepModel.from_proto(state.step_model) == OtherEngine.step_model
    assert state.prefill_time_ratio == 0.25
    assert not state.HasField("prefill_age_s"), "it has no prompts"
    assert state.max_batched_tokens == 64
    assert (state.num_decoding, state.num_context_tokens) == (2, 30)
    assert state.num_pending_attention_pairs == 45
    assert (state.num_giving_way, state.num_giving_way_blocks) == (2, 7)
    assert state.num_reserved == 3
    assert state.num_paced == 3
    assert from_proto(state.tightest_paced) == PACED
    assert parts.progress() == common_pb2.EngineProgress(predicted_step_s=0.25)


async def test_a_lease_stands_on_any_engine() -> None:
    parts = other_parts()
    leases = LeaseTable(parts.layout.block_size, parts.engine.generation)
    session = LeaseSession(
        parts.engine,
        leases,
        vocab_size=parts.vocab_size,
        max_model_len=parts.max_model_len,
        clock=lambda: 0.0,
    )
    events: list[prefill_pb2.PrefillEvent | None] = []
    parts.engine.subscribe(lambda updates: events.append(session.step(updates[0], 0.0)))
    spec = common_pb2.SequenceSpec(
        token_ids=range(10),
        num_prompt_tokens=10,
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=4),
    )
    session.start(prefill_pb2.PrefillStart(router_incarnation="r", sequence_id=1, spec=spec))
    await parts.engine.run()
    (event,) = events
    assert event is not None
    assert event.first_token.token_id == 7
    assert session.phase is LeasePhase.COMPUTED
    session.close()
    assert session.sequence is not None
    assert not session.sequence.block_table


def test_faults_need_memory_of_the_host() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^transfer.allow_faults: .*one KV pool in host memory only"
    ):
        other_parts().to_break()
