"""A worker's engine, put together; and what it tells of itself. Event loop only."""

from concurrent.futures import Executor
from dataclasses import dataclass

from diptych.engine.engine import StepEngine
from diptych.engine.protocol import Engine
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.v1 import common_pb2, worker_pb2
from diptych.worker.config import WorkerConfig
from diptych.worker.loading import LoadedModel
from diptych.worker.pool_memory import pool_memory
from diptych.worker.scratch import PoolScratch
from kvtransfer.memory import PoolMemory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineParts:
    """Everything that runs sequences. Lives from loading until the process ends."""

    model: LoadedModel
    pool: BlockPool  # the engine's books of its blocks: for tests that damage free ones
    engine: Engine
    memory: PoolMemory  # of its blocks, and the scratch blocks behind them
    scratch: PoolScratch

    @classmethod
    def build(
        cls, config: WorkerConfig, model: LoadedModel, model_thread: Executor
    ) -> "EngineParts":
        """Make the engine; the caller runs ``engine.run()``."""
        pool = BlockPool(model.num_blocks, config.block_size)
        limits = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            max_model_len=model.max_model_len,
        )
        scheduler = Scheduler(limits, pool)
        engine = StepEngine(
            scheduler, model.runner, model_thread=model_thread, measured=model.measured
        )
        scratch = PoolScratch(range(model.num_blocks, model.kv_cache.num_blocks))
        memory = pool_memory(model.kv_cache)
        return cls(model=model, pool=pool, engine=engine, memory=memory, scratch=scratch)

    def progress(self) -> common_pb2.EngineProgress:
        """For heartbeats: alive and advancing?"""
        return common_pb2.EngineProgress(
            num_steps=self.engine.num_steps,
            step_due=self.engine.step_due,
            predicted_step_s=self.engine.predicted_step_s,
        )

    def describe(self, state: worker_pb2.WorkerState) -> None:
        """Fill in what Watch tells of any engine."""
        state.layout.CopyFrom(self.model.layout)
        state.max_model_len = self.model.max_model_len
        state.max_num_seqs = self.engine.max_num_seqs
        state.text_digest = self.model.text_digest
        state.vocab_size = self.model.config.vocab_size
        state.progress.CopyFrom(self.progress())
        load = self.engine.load()
        state.blocks.CopyFrom(worker_pb2.BlockCounts(**load.blocks._asdict()))
        state.num_running = load.num_running
        state.num_waiting = load.num_waiting
        state.num_pending_prefill_tokens = load.num_pending_prefill_tokens
        state.prefill_tokens_per_s = self.engine.prefill_tokens_per_s
        state.decode_step_s = self.engine.decode_step_s
