"""A worker's engine, put together; and what it tells of itself. Event loop only.

This and :mod:`diptych.engine.protocol` are all that the rest of a worker knows of an engine.
Another one is made into ``EngineParts`` beside ``build``, which makes ours.
"""

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

from diptych.block_needs import BlockNeeds
from diptych.engine.engine import StepEngine
from diptych.engine.protocol import Engine
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.errors import ConfigurationError
from diptych.paced import tightest, to_proto
from diptych.v1 import common_pb2, worker_pb2
from diptych.worker.config import WorkerConfig
from diptych.worker.loading import LoadedModel
from diptych.worker.scratch import PoolScratch
from kvtransfer.memory import HostMemory, PoolMemory, ScratchBlocks
from kvtransfer.rank_pools import RankPools


class Breakable(NamedTuple):
    """What tests damage of a worker that is told to allow faults: blocks that nobody holds."""

    memory: HostMemory
    pool: BlockPool  # says which those are


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineParts:
    """Everything that runs sequences. Lives from loading until the process ends."""

    engine: Engine
    # Of the blocks that the engine's sequences have, by their ids, and scratch.
    memory: PoolMemory | RankPools
    scratch: ScratchBlocks  # blocks of that memory that no sequence ever has
    layout: common_pb2.KVLayout  # of a block; names all by which another engine's could differ
    vocab_size: int
    max_model_len: int  # tokens, of the longest sequence
    text_digest: str  # of tokenizer and config, see :mod:`diptych.text.identity`
    breakable: Breakable | None = None

    @classmethod
    def build(
        cls, config: WorkerConfig, model: LoadedModel, model_thread: Executor
    ) -> "EngineParts":
        """Our engine over a loaded model; the caller runs ``engine.run()``."""
        pool = BlockPool(model.num_blocks, config.block_size, BlockNeeds.of(model.layout))
        limits = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            max_model_len=model.max_model_len,
        )
        scheduler = Scheduler(limits, pool)
        engine = StepEngine(
            scheduler,
            model.runner,
            launcher=model.runner if model.runner.steps_in_flight > 1 else None,
            model_thread=model_thread,
            measured=model.measured,
            prepare=model.runner.prepare,
            tpot_s=None if config.tpot_ms is None else config.tpot_ms / 1000,
        )
        memory = model.memory
        return cls(
            engine=engine,
            memory=memory,
            scratch=PoolScratch(range(model.num_blocks, model.kv_cache.num_blocks)),
            layout=model.layout,
            vocab_size=model.config.vocab_size,
            max_model_len=model.max_model_len,
            text_digest=model.text_digest,
            breakable=Breakable(memory, pool) if isinstance(memory, HostMemory) else None,
        )

    def to_break(self) -> Breakable:
        """For injected faults. Raises ConfigurationError: the host cannot reach the blocks."""
        if self.breakable is None:
            raise ConfigurationError(
                "transfer.allow_faults: faults can be injected into one KV pool in host memory "
                "only, that of device cpu and one rank"
            )
        return self.breakable

    def progress(self) -> common_pb2.EngineProgress:
        """For heartbeats: alive and advancing?"""
        return common_pb2.EngineProgress(
            num_steps=self.engine.num_steps,
            step_due=self.engine.step_due,
            predicted_step_s=self.engine.predicted_step_s,
        )

    def describe(self, state: worker_pb2.WorkerState) -> None:
        """Fill in what Watch tells of any engine."""
        state.layout.CopyFrom(self.layout)
        state.max_model_len = self.max_model_len
        state.max_num_seqs = self.engine.max_num_seqs
        state.text_digest = self.text_digest
        state.vocab_size = self.vocab_size
        state.progress.CopyFrom(self.progress())
        load = self.engine.load()
        state.blocks.CopyFrom(worker_pb2.BlockCounts(**load.blocks._asdict()))
        state.num_running = load.num_running
        state.num_waiting = load.num_waiting
        state.num_reserved = load.num_reserved
        state.num_giving_way = load.giving_way.num
        state.num_giving_way_blocks = load.giving_way.num_blocks
        state.num_pending_prefill_tokens = load.work.num_prefill_tokens
        state.prefill_tokens_per_s = self.engine.prefill_tokens_per_s
        state.decode_step_s = self.engine.decode_step_s
        state.prefill_time_ratio = self.engine.prefill_time_ratio
        age_s = self.engine.prefill_age_s
        if age_s is not None:
            state.prefill_age_s = age_s
        model = self.engine.step_model
        state.step_model.CopyFrom(model.to_proto())
        paced, token_s = self.engine.paced(), model.decode.expected_s(load.work.without_prompts)
        state.num_paced = len(paced)
        state.tightest_paced.extend(to_proto(tightest(paced, token_s)))
        state.max_batched_tokens = self.engine.max_batched_tokens
        state.num_pending_attention_pairs = load.work.num_attention_pairs
        state.num_decoding = load.work.num_decode_rows
        state.num_context_tokens = load.work.num_context_tokens
