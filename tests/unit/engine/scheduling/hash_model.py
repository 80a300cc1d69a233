"""A model whose KV and tokens are hashes of everything before them, over a store of slots.

So any block that is reused, shared or read at the wrong time shows as a wrong token or a wrong
slot. Layers may have windows: a step that sees into what was not pulled shows as well.
"""

from collections.abc import Sequence as Table

from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler
from diptych.engine.scheduling.sequence import Sequence, SequenceState
from diptych.engine.scheduling.step import Chunk, SampledToken, StepOutput, StepPlan
from diptych.finish_reason import FinishReason
from diptych.sampling_params import SamplingParams

VOCAB_SIZE = 3
GARBAGE = -1
NAN = float("nan")


def kv_after(kv: int, token_id: int) -> int:
    """The KV of a token that follows one with ``kv``: names the whole prefix."""
    return (kv * 1_000_003 + token_id + 1) % (1 << 61)


def kv_of(token_ids: list[int], salt: bytes) -> list[int]:
    """The KV of each token."""
    kv, kvs = len(salt), []
    for token_id in token_ids:
        kv = kv_after(kv, token_id)
        kvs.append(kv)
    return kvs


def sampled(last_kv: int, params: SamplingParams, allow_stop: bool) -> int:
    """The one right token after a prefix."""
    token_id = (last_kv ^ params.seed) % 7919 % VOCAB_SIZE
    while not allow_stop and token_id in params.stop_token_ids:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def continuation(seq: Sequence, max_model_len: int) -> tuple[list[int], FinishReason]:
    """Prompt and output by a naive loop, from the prompt alone."""
    tokens, params = seq.token_ids[: seq.num_prompt_tokens], seq.sampling
    while True:
        num_output = len(tokens) - seq.num_prompt_tokens
        allow_stop = num_output >= params.min_tokens
        tokens.append(sampled(kv_of(tokens, seq.cache_salt)[-1], params, allow_stop))
        if allow_stop and tokens[-1] in params.stop_token_ids:
            return tokens, FinishReason.STOP
        if num_output + 1 == params.max_tokens or len(tokens) == max_model_len:
            return tokens, FinishReason.LENGTH


class SlotStore:
    """The KV cache: one number per slot and group of layers."""

    def __init__(self, pool: BlockPool, windows: list[int | None]) -> None:
        self.pool = pool
        self.windows = windows  # of each group
        self.slots: dict[tuple[int, int, int], int] = {}

    def write(
        self, table: Table[int], position: int, kv: int, num_groups: int | None = None
    ) -> None:
        """The first so many groups, or all; whatever was in the others is spoilt."""
        index, offset = divmod(position, self.pool.block_size)
        assert self.pool.is_writable(table[index]), "wrote into a shared or foreign block"
        for group in range(len(self.windows)):
            is_hole = num_groups is not None and group >= num_groups
            self.slots[table[index], offset, group] = GARBAGE if is_hole else kv

    def read(self, table: Table[int], group: int, positions: range) -> list[int]:
        places = (divmod(position, self.pool.block_size) for position in positions)
        return [self.slots[table[index], offset, group] for index, offset in places]

    def check_seen(self, table: Table[int], start: int, kvs: list[int]) -> None:
        """What tokens from ``start`` on see of those before them, and of themselves."""
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, start - window + 1)
            assert self.read(table, group, range(first, len(kvs))) == kvs[first:]

    def check_held(self, block_id: int, num_groups: int, kvs: list[int]) -> None:
        """The first slots of a block, in the first groups."""
        for group in range(num_groups):
            assert self.read([block_id], group, range(len(kvs))) == kvs


class HashRunner:
    """Runs plans on a slot store as a model would: sees the past, writes the chunk."""

    def __init__(self, store: SlotStore, scheduler: Scheduler) -> None:
        self.store = store
        self.scheduler = scheduler
        self.drawn: tuple[SampledToken | None, ...] = ()  # by the last step, on the device

    def execute(self, plan: StepPlan) -> StepOutput:
        steps = zip(plan.chunks, self.scheduler.owners(plan), strict=True)
        self.drawn = tuple([self._run(chunk, seq) for chunk, seq in steps])
        return StepOutput(tokens=self.drawn, duration_s=0.01)

    def _run(self, chunk: Chunk, seq: Sequence) -> SampledToken | None:
        token_ids = seq.token_ids[: chunk.start] + list(chunk.token_ids)
        if chunk.follows is not None:
            drawn = self.drawn[chunk.follows]
            assert drawn is not None, "follows a chunk that draws nothing"
            token_ids[-1] = drawn.token_id
        if seq.state is SequenceState.RUNNING:
            assert token_ids == seq.token_ids[: chunk.end], "went on from another one's token"
        kvs = kv_of(token_ids, seq.cache_salt)
        for position in range(chunk.start, chunk.end):
            self.store.write(chunk.block_table, position, kvs[position])
        self.store.check_seen(chunk.block_table, chunk.start, kvs)
        if chunk.sample is None:
            return None
        return SampledToken(sampled(kvs[-1], chunk.sample.params, chunk.sample.allow_stop), NAN)
