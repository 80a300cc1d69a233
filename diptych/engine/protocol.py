"""What a worker needs of an engine: sequences go in, what steps did to them comes out.

Workers are written to this and to the plain data that it names, not to our scheduler, runner
or pool, so that another engine can stand here. Everything is for the event loop's thread.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from diptych.cache_log import CacheLog
from diptych.engine.scheduling.block_pool import BlockCounts
from diptych.engine.scheduling.queues import GivingWay
from diptych.engine.scheduling.sequence import Sequence
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.paced import Paced
from diptych.step_model import StepModel, StepWork

# Told of each step when it is over, though the next one may be at work; may call the engine.
StepListener = Callable[[list[SequenceUpdate]], None]


class StepRecord(NamedTuple):
    """One completed step."""

    # The engine's clock when it was handed to the model thread, maybe behind another one.
    started_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    duration_s: float  # on the model thread
    overhead_s: float  # what else came since the last one was booked: listeners, deciding, hops
    expected_s: float = 0.0  # both, as the step model had it before this step; 0: not known
    upper_s: float = 0.0  # that nine of ten such steps do not exceed


class EngineLoad(NamedTuple):
    """How much an engine has to do, and what became of its blocks. Counters since its start."""

    blocks: BlockCounts
    num_running: int  # sequences in the batch
    num_waiting: int  # that want a place in it
    num_reserved: int  # that will, once their KV or their start has come
    num_preemptions: int
    num_lookup_tokens: int  # of admitted sequences
    num_hit_tokens: int  # of those, found in the prefix cache
    work: StepWork = StepWork()  # a token of each that decodes, and what prompts still need
    num_batch_preemptions: int = 0  # of num_preemptions, of sequences that yield
    num_set_aside: int = 0  # times that one of those lost its place to another, and no blocks
    num_sat_out: int = 0  # steps of others that one of those sat out, while it decoded
    giving_way: GivingWay = GivingWay()  # of those that run or wait


class Engine(Protocol):
    """One engine. It owns its sequences' blocks; nobody else allocates or frees any.

    A sequence holds all blocks of its tokens from the call that admits it (``add_prefill``,
    ``reserve``) until ``release`` or its end, and then until the last step that it takes part in
    is complete. ``Sequence.block_table`` names them in order. A range of tokens may be
    announced to readers, with its blocks, when an update says that it is computed: the device
    has completed it by then. The token of a step comes with the last range before it.

    A sequence is the caller's to make and the engine's to write, from the call that admits it:

    - ``num_cached_tokens``, then and never again: a multiple of the block size, or all tokens of
      a reserved sequence, which then is proven;
    - ``block_table``, and ``num_computed_tokens``, whose KV lies in it;
    - ``state``: RESERVED, WAITING, RUNNING, LEASED (a ``prefill_only`` one that has its token) or
      FINISHED;
    - ``token_ids``: it appends what ``start`` is given, and each token that it draws;
    - ``num_preemptions``, counted up.

    Its other fields are either the caller's, or our scheduler's own, of which it says so.
    """

    def add_prefill(self, seq: Sequence) -> None:
        """Admit a ``prefill_only`` sequence: it is computed, and stays for readers.

        Its first ``num_cached_tokens`` are there at once. Other blocks than those may be
        swapped until its first update, and none from then on. Raises InvalidRequestError,
        BlocksExhaustedError; nothing is then held. And BlocksComingError, where others leave for
        it: to be asked again after each step.
        """
        ...

    def reserve(self, seq: Sequence) -> None:
        """Hold a prefix hit, and blocks into which the caller may have the rest written.

        The hit of a sequence ``to_pull`` may be of use only with the rest: if ``start`` has it
        computed instead, from further back. Raises as ``add_prefill``.
        """
        ...

    def mark_proven(self, seq: Sequence) -> None:
        """All KV that a reserved sequence needs lies in its blocks, and is what it must be.

        What else is in the blocks that it was not given as a hit may be anything
        (:mod:`diptych.block_needs`).
        """
        ...

    def start(self, seq: Sequence, emitted: list[int], compute_missing: bool) -> None:
        """Append ``emitted`` and let a reserved sequence run. Raises InvalidRequestError."""
        ...

    def release(self, seq: Sequence) -> None:
        """End a sequence in any state; blocks in quarantine stay there. Idempotent."""
        ...

    def generation(self, block_id: int) -> int:
        """How often the block was handed out for writing."""
        ...

    def quarantine(self, block_ids: Collection[int]) -> None:
        """Hand these blocks, which a sequence holds, to nobody until ``end_quarantine``."""
        ...

    def end_quarantine(self, block_ids: Collection[int]) -> None:
        """No read writes these blocks any more."""
        ...

    def subscribe(self, listener: StepListener) -> Callable[[], None]:
        """Call ``listener`` after each step; call what is returned when that shall end."""
        ...

    async def run(self) -> None:
        """Run steps until cancelled. Raises what the worker has to end for."""
        ...

    def abandon(self) -> None:
        """The steps in flight will never end: a cancelled ``run`` does not wait for them."""
        ...

    def load(self) -> EngineLoad:
        """How it stands. O(sequences)."""
        ...

    def paced(self) -> list[Paced]:
        """How far those are that decode and asked for a pace. O(sequences)."""
        ...

    def mismatch(self, quarantined: Collection[int]) -> str | None:
        """What is wrong with the books of its blocks, if these are in quarantine; for alarms."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Sequences that its batch can have."""
        ...

    @property
    def max_batched_tokens(self) -> int:
        """Tokens that one step can have."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps that have ended."""
        ...

    @property
    def step_due(self) -> bool:
        """Whether ``num_steps`` must advance."""
        ...

    @property
    def predicted_step_s(self) -> float:
        """What the oldest step in flight, else the last, should take at most; 0 until known."""
        ...

    @property
    def last_step(self) -> StepRecord | None:
        """The step that listeners are being told of; None: it failed, or there was none."""
        ...

    @property
    def prefill_tokens_per_s(self) -> float:
        """Moving average over steps that are mostly prefill; 0 until known."""
        ...

    @property
    def decode_step_s(self) -> float:
        """Moving average of steps without prefill chunks, s; 0 until known."""
        ...

    @property
    def prefill_time_ratio(self) -> float:
        """Of its time of late, how much went into steps with prefill chunks."""
        ...

    @property
    def prefill_age_s(self) -> float | None:
        """How long it has been at the prompts that it has, s; below 0: it begins in so long.

        None: it has none. As long as the step that runs, if that has prefill chunks.
        """
        ...

    @property
    def step_model(self) -> StepModel:
        """How long its steps take, from one's decision to the next one's, as learned from them."""
        ...

    @property
    def cache_log(self) -> CacheLog | None:
        """Which blocks others could share, by key; None: routers are not told of it."""
        ...
