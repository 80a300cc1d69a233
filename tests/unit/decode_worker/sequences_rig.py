"""A worker's sequences over the real scheduler and pool; pulls are a model of the transport."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from decode_worker.actions import Action, SendEvent
from decode_worker.router_sequences import Fallback, RouterSequences
from decode_worker.worker_limits import WorkerLimits
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import SampledToken, StepOutput
from diptych.errors import (
    WorkerDrainingError,
)
from diptych.v1 import common_pb2, decode_pb2
from kvtransfer.reader.pull_machine import PullRequest, PullResult

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, VOCAB = 4, 12, 32, 16


@dataclass
class ModelPull:
    """A pull whose reads may outlive it."""

    request: PullRequest
    rig: "Rig"
    over: bool = False

    async def run(self) -> PullResult:
        raise AssertionError("the test says how it ends")

    def abandon(self) -> frozenset[int]:
        if not self.over:
            self.over = True
            self.rig.leave_reads(self.request.local_block_ids[: self.rig.num_lingering])
        return frozenset(self.rig.unfinished)


@dataclass
class Observer:
    fallbacks: list[Fallback | None] = field(default_factory=list)

    def reserved(self, command: decode_pb2.Reserve, seq: Sequence) -> None: ...

    def bound(self, command: decode_pb2.Bind) -> None: ...

    def started(self, command: decode_pb2.Start, seq: Sequence, fallback: Fallback | None) -> None:
        self.fallbacks.append(fallback)

    def ended(self, seq: Sequence, ended: decode_pb2.Ended) -> None: ...


class Rig:
    """One worker: a scheduler, the reads that are unfinished, and what was sent."""

    def __init__(self, *, local_prefill: bool = True) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        config = SchedulerConfig(max_num_seqs=4, max_batched_tokens=8, max_model_len=MAX_LEN)
        self.scheduler = Scheduler(config, self.pool)
        self.rules = WorkerLimits(
            vocab_size=VOCAB,
            max_model_len=MAX_LEN,
            block_size=BLOCK_SIZE,
            local_prefill=local_prefill,
        )
        self.unfinished: set[int] = set()
        self.num_lingering = 0  # reads that the next abandoned pull leaves
        self.draining = False
        self.observer = Observer()

    def sequences(self, owner: str = "router") -> RouterSequences:
        return RouterSequences(
            owner,
            self.scheduler,
            self.rules,
            open_pull=lambda request: ModelPull(request, self),
            unfinished_reads=self.unfinished,
            admit=self.admit,
            observer=self.observer,
        )

    def admit(self) -> None:
        if self.draining:
            raise WorkerDrainingError("draining")

    def leave_reads(self, block_ids: Iterable[int]) -> None:
        self.unfinished |= set(block_ids)
        self.pool.quarantine(list(block_ids))

    def end_reads(self) -> None:
        ended = list(self.unfinished)
        self.unfinished.clear()
        self.pool.end_quarantine(ended)

    def step(
        self, routers: Iterable[RouterSequences]
    ) -> list[tuple[RouterSequences, list[Action]]]:
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        for chunk in plan.chunks:
            assert not self.unfinished & set(chunk.block_table), "runs where a read may write"
        tokens = tuple(
            SampledToken(chunk.end % VOCAB, float("nan")) if chunk.sample else None
            for chunk in plan.chunks
        )
        updates = self.scheduler.update(plan, StepOutput(tokens=tokens, duration_s=0.0))
        return [(sequences, sequences.step(updates)) for sequences in routers]


def spec(
    num_tokens: int, *, max_tokens: int = 4, seed: int = 0, num_output: int = 0
) -> common_pb2.SequenceSpec:
    sampling = common_pb2.SamplingParams(temperature=0, seed=1, max_tokens=max_tokens)
    return common_pb2.SequenceSpec(
        token_ids=[(seed + i) % VOCAB for i in range(num_tokens)],
        num_prompt_tokens=num_tokens - num_output,
        sampling=sampling,
    )


def reserve(
    sequence_id: int, num_tokens: int, *, seed: int = 0, yields: bool = False
) -> decode_pb2.Reserve:
    command = decode_pb2.Reserve(sequence_id=sequence_id, spec=spec(num_tokens, seed=seed))
    command.spec.yields = yields
    return command


def events(decided: Iterable[Action]) -> list[decode_pb2.DecodeEvent]:
    return [action.event for action in decided if isinstance(action, SendEvent)]


def kinds(decided: Iterable[Action]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events(decided)]
