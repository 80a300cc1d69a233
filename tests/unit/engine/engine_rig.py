"""An engine over a fake runner, what its listener heard, and sequences for it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from diptych.engine.engine import StepEngine
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey, SequenceState
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.sampling_params import SamplingParams


class EngineRig:
    def __init__(self, engine_of: Callable[[Scheduler], StepEngine]) -> None:
        config = SchedulerConfig(max_model_len=60, max_batched_tokens=16, max_num_seqs=8)
        self.pool = BlockPool(16, 4)
        self.scheduler = Scheduler(config, self.pool)
        self.engine = engine_of(self.scheduler)
        self.updates: list[SequenceUpdate] = []
        self.stepped = asyncio.Event()
        self.engine.subscribe(self._listen)

    def _listen(self, updates: list[SequenceUpdate]) -> None:
        self.updates += updates
        self.stepped.set()

    def start(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        *,
        return_margins: bool = False,
        token_id: int = 1,
        yields: bool = False,
        tpot_s: float = 0.0,
    ) -> Sequence:
        seq = Sequence(
            key=SequenceKey("router", num_prompt_tokens),
            token_ids=[token_id] * num_prompt_tokens,
            num_prompt_tokens=num_prompt_tokens,
            sampling=SamplingParams(max_tokens=max_tokens, return_margins=return_margins),
            yields=yields,
            tpot_s=tpot_s,
        )
        self.engine.reserve(seq)
        self.engine.start(seq, [], compute_missing=True)
        return seq

    async def until_finished(self, seq: Sequence) -> None:
        while seq.state is not SequenceState.FINISHED:
            self.stepped.clear()
            await self.stepped.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.engine.run(), name="engine")
            yield task
            if not task.cancelling():
                task.cancel()
