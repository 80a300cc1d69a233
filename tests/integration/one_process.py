"""An engine without tasks and processes: what a hand-off has to equal."""

from typing import NamedTuple

from diptych.engine.kv.cache import KV_DTYPES, KVCache
from diptych.engine.model.decoder import Decoder
from diptych.engine.runner import Runner
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey, SequenceState
from diptych.formats import KVDtypeName
from diptych.sampling_params import SamplingParams
from tests.engines import CPU
from tests.integration.conftest import BLOCK_SIZE

MAX_BATCHED_TOKENS = 64
NUM_BLOCKS = 64


class Answer(NamedTuple):
    token_ids: list[int]
    num_cached_tokens: int
    num_preemptions: int


class OneProcess:
    """Scheduler, pool and runner, stepped by hand."""

    def __init__(self, model: Decoder, dtype: KVDtypeName, num_blocks: int = NUM_BLOCKS) -> None:
        self.cache = KVCache(model.config, num_blocks, BLOCK_SIZE, KV_DTYPES[dtype])
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        config = SchedulerConfig(
            max_model_len=num_blocks * BLOCK_SIZE,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            max_num_seqs=8,
        )
        self._scheduler = Scheduler(config, self.pool)
        self._runner = Runner(model, self.cache, CPU)

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
        """All at once."""
        sequences = [self._start(i, token_ids, num_tokens) for i, token_ids in enumerate(prompts)]
        while any(seq.state is not SequenceState.FINISHED for seq in sequences):
            plan = self._scheduler.schedule()
            assert plan is not None
            self._scheduler.update(plan, self._runner.execute(plan))
        return [
            Answer(
                seq.token_ids[seq.num_prompt_tokens :], seq.num_cached_tokens, seq.num_preemptions
            )
            for seq in sequences
        ]

    def _start(self, number: int, token_ids: list[int], num_tokens: int) -> Sequence:
        seq = Sequence(
            key=SequenceKey("router", number),
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens),
        )
        self._scheduler.reserve(seq)
        self._scheduler.start(seq, [], compute_missing=True)
        return seq
