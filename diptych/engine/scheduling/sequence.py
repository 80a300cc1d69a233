"""A sequence: its tokens and its sampling parameters, and where its KV is.

Principle: everything but ``token_ids`` and ``sampling`` is a cache that any
worker can rebuild. Owned by the engine (in ours by the scheduler) on the event loop's
thread; the model thread sees only the
:class:`~diptych.engine.scheduling.step.StepPlan` made from it.
"""

import enum
import math
import time
from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diptych.engine.scheduling.report import Report
from diptych.sampling_params import SamplingParams
from diptych.v1 import common_pb2


class SequenceKey(NamedTuple):
    """Names a sequence on a worker; never reused."""

    owner: str  # the router's incarnation
    sequence_id: int


class SequenceState(enum.Enum):
    """Where a sequence stands; the scheduler holds the transition table."""

    RESERVED = enum.auto()  # blocks held, KV to come from elsewhere or Start to come
    WAITING = enum.auto()  # wants steps, has no place in the batch
    RUNNING = enum.auto()  # in the batch
    LEASED = enum.auto()  # prefilled; blocks held for readers, no steps
    FINISHED = enum.auto()  # nothing held


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sequence on one worker.

    Invariant: ``num_computed_tokens <= len(token_ids)``; the KV of the first
    ``num_computed_tokens`` tokens lies in ``block_table``. Lengths in tokens.
    """

    key: SequenceKey
    token_ids: list[int]  # prompt, then output; grows by one per sampled token
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: bytes = b""
    prefill_only: bool = False  # stop after the first sampled token and hold the blocks
    to_pull: bool = False  # a reserved one's missing KV is to come from elsewhere
    report: Report | None = None  # what to tell of the tokens of a prefill_only one
    yields: bool = False  # others go first, until it has aged: see yielding.py
    payer: bytes = b""  # whose prompts take turns with others': see turns.py
    tier: int = 0  # of that payer
    tier_weight: float = 1.0
    due_s: float = math.inf  # its first token is wanted by then, by the engine's clock
    tpot_s: float = 0.0  # between tokens on average, that it is promised: see pacer.py; 0: nothing
    num_expected_tokens: int = 0  # of its whole answer; 0: not known
    emitted_s: float | None = None  # its last token was drawn elsewhere, and out then; see pacer.py

    # What an engine writes: diptych.engine.protocol.Engine says what each promises.
    state: SequenceState = SequenceState.RESERVED
    block_table: list[int] = field(default_factory=list)  # physical ids, logical order
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prefix hit when it was admitted
    num_preemptions: int = 0

    # Our scheduler's own; neither another engine nor a worker looks at them.
    block_keys: list[bytes] = field(default_factory=list)  # of whole blocks, chained; lazily
    arrival: int = 0  # order of becoming runnable: first come, first served
    packed_table: "array[int] | None" = None  # block_table for plans; never changed, replaced
    packed_tokens: "array[int] | None" = None  # the first of token_ids, for plans that need them
    is_private: bool = False  # its KV came of tokens with a step without numbers: nobody shares it
    # By steps in flight: tokens behind num_computed_tokens whose KV they compute, none exactly if
    # it takes part in none; and tokens behind token_ids that they draw.
    num_in_flight_tokens: int = 0
    num_unknown_tokens: int = 0
    # Of one that yields: since when steps pass it by, and whether it does so no longer.
    passed_since_s: float | None = None
    has_aged: bool = False
    # It gets no step before this is done, see is_prepared; kept as long as steps may need it.
    preparation: Future[Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Without KV; of one that decodes it is the last one."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether each step computes one token of it: none before that one is without KV."""
        return self.num_pending_tokens == 1

    @property
    def is_prepared(self) -> bool:
        """Whether a token of it can be drawn: what its sampling parameters need is there."""
        return self.preparation is None or self.preparation.done()

    @property
    def has_fixed_table(self) -> bool:
        """Whether readers may know of its blocks: a plan had them."""
        return self.prefill_only and self.packed_table is not None

    @property
    def gives_way(self) -> bool:
        """Whether others go first now."""
        return self.yields and not self.has_aged

    @property
    def num_planned_tokens(self) -> int:
        """That there are when the steps in flight have ended, if it goes on then."""
        return len(self.token_ids) + self.num_unknown_tokens

    @property
    def num_planned_computed_tokens(self) -> int:
        """Of which there is the KV then."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def decodes_next(self) -> bool:
        """Whether the next step that is planned computes one token of it, and draws another."""
        num_planned = len(self.token_ids) + self.num_unknown_tokens
        return num_planned - self.num_computed_tokens - self.num_in_flight_tokens == 1

    @property
    def num_shareable_tokens(self) -> int:
        """Of which others may compute the KV, if it is to draw a token: not the last one's."""
        num_tokens = self.num_tokens
        return (
            num_tokens - 1 if self.report is None else self.report.num_shareable_tokens(num_tokens)
        )

    def emitted(self, age_s: float) -> None:
        """Its last token has been out for so long, and was drawn elsewhere."""
        self.emitted_s = time.monotonic() - age_s

    @classmethod
    def from_spec(
        cls,
        key: SequenceKey,
        spec: common_pb2.SequenceSpec,
        *,
        prefill_only: bool,
        report: Report | None = None,
    ) -> "Sequence":
        """Make a fresh sequence from the wire."""
        return cls(
            key=key,
            token_ids=list(spec.token_ids),
            num_prompt_tokens=spec.num_prompt_tokens,
            sampling=SamplingParams.from_proto(spec.sampling),
            cache_salt=spec.cache_salt,
            prefill_only=prefill_only,
            report=report,
            yields=spec.yields,
            payer=spec.payer,
            tier=spec.tier,
            tier_weight=spec.tier_weight or 1.0,
            due_s=time.monotonic() + spec.due_in_s if spec.HasField("due_in_s") else math.inf,
            tpot_s=spec.tpot_s,
            num_expected_tokens=spec.num_expected_tokens,
        )
