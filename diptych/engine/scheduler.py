"""Which tokens run next, and where their KV goes.

Owns every live :class:`~diptych.engine.sequence.Sequence` and its blocks. Knows
neither the model nor transfers nor time. Pure, synchronous and deterministic;
called on the event loop's thread only.

One step mixes single decode tokens and prefill chunks under a token budget.
Sequences that wait hold all blocks of their tokens or none, so nobody holds
blocks while waiting for more. When a running sequence cannot grow, the youngest
gives its blocks up and is recomputed later (never one whose blocks others read).

Idea: Orca (continuous batching), Sarathi (chunked prefill), vLLM (paging).
"""

from collections.abc import Collection
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from diptych.engine.block_pool import BlockPool
from diptych.engine.sequence import Sequence
from diptych.engine.step import SequenceUpdate, StepOutput, StepPlan


class SchedulerConfig(BaseModel):
    """Limits of a step and of a sequence."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_num_seqs: int = Field(64, ge=1, description="Sequences in the batch.")
    max_batched_tokens: int = Field(
        512, ge=1, description="Tokens of one step; at least max_num_seqs."
    )
    decode_headroom_blocks: int = Field(
        1, ge=0, description="Blocks beyond its tokens that a sequence gets when admitted."
    )
    max_model_len: int = Field(ge=2, description="Longest sequence, prompt and output, tokens.")


class SlotUsage(NamedTuple):
    """Slots of held blocks; a shared block counts for each of its sequences."""

    used: int  # hold KV
    allocated: int


class Scheduler:
    """Sequences, their states and their blocks. Invariants: see the module."""

    num_preemptions: int  # so far, all sequences
    num_lookup_tokens: int  # so far, tokens looked up in the prefix cache at admission
    num_hit_tokens: int  # so far, of those found

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        """Raises ConfigurationError if the pool cannot hold the longest sequence."""
        self.config = config
        self.pool = pool

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits. ``schedule`` may still find no blocks for it."""
        raise NotImplementedError

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        raise NotImplementedError

    @property
    def num_waiting(self) -> int:
        """Sequences that want a place in the batch (reserved ones do not)."""
        raise NotImplementedError

    @property
    def num_pending_prefill_tokens(self) -> int:
        """Tokens to compute before their sequences can sample (single tokens not counted)."""
        raise NotImplementedError

    def slot_usage(self) -> SlotUsage:
        """How full the held blocks are. O(sequences)."""
        raise NotImplementedError

    def add_prefill(self, seq: Sequence) -> None:
        """Admit a ``prefill_only`` sequence: -> WAITING.

        Holds the prefix hit (``num_cached_tokens``) and fresh blocks for the rest; the
        block table does not change again until ``release``.
        Raises InvalidRequestError (never fits), BlocksExhaustedError (not now); nothing
        is then held.
        """
        raise NotImplementedError

    def reserve(self, seq: Sequence) -> None:
        """Hold the prefix hit (``num_cached_tokens``), blocks for the rest and headroom: -> RESERVED.

        ``block_table[num_cached_tokens // block_size :]`` is where missing KV goes.
        Raises as ``add_prefill``.
        """
        raise NotImplementedError

    def mark_proven(self, seq: Sequence) -> None:
        """The KV of all of a RESERVED sequence's tokens is in its blocks and proven."""
        raise NotImplementedError

    def start(self, seq: Sequence, emitted: list[int], compute_missing: bool) -> None:
        """Append ``emitted`` and let a RESERVED sequence run: -> WAITING.

        Raises InvalidRequestError: not proven and not ``compute_missing``, not
        RESERVED, or nothing left to produce. The caller wakes the engine.
        """
        raise NotImplementedError

    def release(self, seq: Sequence, unfinished_block_ids: Collection[int] = ()) -> None:
        """End a sequence in any state: -> FINISHED. Idempotent.

        Its blocks go when the step in flight, if it takes part, is booked. Those in
        ``unfinished_block_ids`` are quarantined until ``pool.end_quarantine``. The
        caller wakes the engine: somebody may wait for the blocks.
        """
        raise NotImplementedError

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None if nothing can run until somebody calls in.

        Each plan is followed by ``update`` before the next ``schedule``.
        """
        raise NotImplementedError

    def update(self, plan: StepPlan, output: StepOutput) -> list[SequenceUpdate]:
        """Book a completed step; one entry per sequence not released meanwhile.

        Sequences that finished are FINISHED with their blocks freed; ``prefill_only``
        ones are LEASED with their blocks held, finished or not.
        """
        raise NotImplementedError
