"""One lease on a prefill worker, from Start to the end of its stream: pure state.

Commands and results of steps go in, messages for the router come out. It calls the
engine and the lease table itself: both change state and wait for nothing. The clock
is passed in; no asyncio, no gRPC. Called on the event loop by one LeaseStream.

Invariant: blocks are held, and the lease is in the table, from ``start`` until
``close``, whatever happens between.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from diptych.block_hash import prompt_digest
from diptych.engine.scheduling.report import Pooling, PoolingReport
from diptych.engine.scheduling.sequence import Sequence, SequenceKey
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import InvalidRequestError, LeaseExpiredError
from diptych.token_logprobs import PromptLogprobs
from diptych.transitions import Transitions
from diptych.v1 import common_pb2, prefill_pb2
from diptych.worker.check_spec import check_spec
from kvtransfer.source.lease_table import LeaseTable
from prefill_worker.asked_report import read_report


class LeasePhase(enum.Enum):
    """Where a lease stands."""

    NEW = enum.auto()  # Start to come
    COMPUTING = enum.auto()  # blocks held, prompt not whole
    COMPUTED = enum.auto()  # first token sampled, blocks held for readers
    CLOSED = enum.auto()  # nothing held


class SessionEvent(enum.Enum):
    """What moves it. From the router, what is illegal ends the stream."""

    START = enum.auto()
    GRANT = enum.auto()
    STEP = enum.auto()  # a chunk of the prompt was computed
    SAMPLE = enum.auto()  # the last one
    CLOSE = enum.auto()


SESSION_TRANSITIONS = Transitions(
    {
        LeasePhase.NEW: {
            SessionEvent.START: LeasePhase.COMPUTING,
            SessionEvent.CLOSE: LeasePhase.CLOSED,
        },
        LeasePhase.COMPUTING: {
            SessionEvent.GRANT: LeasePhase.COMPUTING,
            SessionEvent.STEP: LeasePhase.COMPUTING,
            SessionEvent.SAMPLE: LeasePhase.COMPUTED,
            SessionEvent.CLOSE: LeasePhase.CLOSED,
        },
        LeasePhase.COMPUTED: {
            SessionEvent.GRANT: LeasePhase.COMPUTED,
            SessionEvent.CLOSE: LeasePhase.CLOSED,
        },
    },
    ignored={LeasePhase.CLOSED: {SessionEvent.CLOSE}},
)


class PrefillEngine(Protocol):
    """The part of diptych.engine.protocol.Engine that a lease needs."""

    def add_prefill(self, seq: Sequence) -> None: ...
    def release(self, seq: Sequence) -> None: ...


@dataclass(slots=True)
class LeaseTimes:
    """Monotonic times, s. What has not happened yet is None."""

    accepted_at: float | None = None
    first_step_at: float | None = None  # start of the first step with a part of this prompt
    sampled_at: float | None = None


class LeaseSession:
    """The state of one lease."""

    def __init__(
        self,
        engine: PrefillEngine,
        leases: LeaseTable,
        *,
        vocab_size: int,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._leases = leases
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._clock = clock
        self._num_tokens = 0  # of the prompt: what the lease covers
        self._sums: list[float] = []  # of hidden states, where they are pooled
        self._grant_id: int | None = None
        self.times = LeaseTimes()
        """When what happened; for spans and metrics."""
        self.sequence: Sequence | None = None
        self.phase = LeasePhase.NEW

    @property
    def unbound(self) -> bool:
        """Whether it is finished and nobody was granted it: it may not stay long."""
        return self.phase is LeasePhase.COMPUTED and self._grant_id is None

    def start(self, command: prefill_pb2.PrefillStart) -> prefill_pb2.PrefillEvent:
        """Hold all blocks of the prompt and queue it: Accepted.

        Raises InvalidRequestError; BlocksExhaustedError when the pool is too full.
        """
        self._expect(SessionEvent.START, field="start")
        check_spec(command.spec, vocab_size=self._vocab_size, max_model_len=self._max_model_len)
        key = SequenceKey(command.router_incarnation, command.sequence_id)
        report = read_report(command)
        sequence = Sequence.from_spec(key, command.spec, prefill_only=True, report=report)
        self._engine.add_prefill(sequence)
        self.sequence = sequence
        self._num_tokens = sequence.num_tokens
        digest = prompt_digest(sequence.token_ids, sequence.cache_salt)
        self._leases.open(key, sequence.block_table, self._num_tokens, digest)
        self._move(SessionEvent.START)
        self.times.accepted_at = self._clock()
        if sequence.num_cached_tokens:
            self._leases.announce(key, sequence.num_cached_tokens)
        return prefill_pb2.PrefillEvent(
            accepted=prefill_pb2.PrefillAccepted(num_cached_tokens=sequence.num_cached_tokens)
        )

    def grant(self, command: prefill_pb2.Grant) -> prefill_pb2.PrefillEvent | None:
        """Let one reader fetch, and no other any more: Granted.

        One that came before, or that a newer one overtook, is ignored: None. Raises
        InvalidRequestError (before Start, or a bad ticket), LeaseExpiredError.
        """
        self._expect(SessionEvent.GRANT, field="grant")
        if self._grant_id is not None and command.grant_id <= self._grant_id:
            return None
        assert self.sequence is not None
        self._leases.grant(self.sequence.key, command.ticket, command.reader_incarnation)
        self._grant_id = command.grant_id
        self._move(SessionEvent.GRANT)
        return prefill_pb2.PrefillEvent(granted=prefill_pb2.Granted(grant_id=command.grant_id))

    def step(
        self, update: SequenceUpdate, step_started_at: float
    ) -> prefill_pb2.PrefillEvent | None:
        """Book a step of this sequence: announce what is complete; FirstToken when sampled."""
        if self.sequence is None or update.sequence is not self.sequence:
            return None
        if not SESSION_TRANSITIONS.allows(self.phase, SessionEvent.STEP):
            return None  # closed while the step was made
        if self.times.first_step_at is None:  # what others computed while it waited is in its table
            self.times.first_step_at = step_started_at
            self._leases.rebase(self.sequence.key, self.sequence.block_table)
        self._leases.announce(self.sequence.key, update.num_computed_tokens)
        if update.token is None:
            return None
        self.times.sampled_at = self._clock()
        self._move(SessionEvent.SAMPLE)
        return prefill_pb2.PrefillEvent(first_token=self._first_token(update))

    def report(self, update: SequenceUpdate) -> prefill_pb2.PrefillEvent | None:
        """What a step of this sequence tells of its tokens, for before ``step`` is booked."""
        told, seq = update.report, self.sequence
        if told is None or update.sequence is not seq or self.phase is not LeasePhase.COMPUTING:
            return None
        if isinstance(told, PromptLogprobs):
            return prefill_pb2.PrefillEvent(prompt_logprobs=told.to_proto())
        sums = map(sum, zip(self._sums, told.values, strict=True)) if self._sums else told.values
        self._sums = list(sums)
        if update.token is None:
            return None
        is_mean = seq.report == PoolingReport(Pooling.MEAN)
        num_summed = self._num_tokens if is_mean else 1
        pooled = prefill_pb2.PooledStates(values=[each / num_summed for each in self._sums])
        return prefill_pb2.PrefillEvent(pooled=pooled)

    def close(self) -> None:
        """Refuse readers, then free the blocks. Idempotent."""
        is_first = SESSION_TRANSITIONS.allows(self.phase, SessionEvent.CLOSE)
        self._move(SessionEvent.CLOSE)
        if is_first and self.sequence is not None:
            self._leases.close(self.sequence.key)
            self._engine.release(self.sequence)

    def _first_token(self, update: SequenceUpdate) -> prefill_pb2.FirstToken:
        assert update.token is not None
        assert self.sequence is not None
        token = prefill_pb2.FirstToken(token_id=update.token.token_id, position=self._num_tokens)
        if self.sequence.sampling.return_margins:
            token.margin = update.token.margin
        if update.token.logprobs is not None:
            token.logprobs.CopyFrom(update.token.logprobs.to_proto())
        if update.finish_reason is not None:
            token.finish_reason = cast(common_pb2.FinishReason, int(update.finish_reason))
        return token

    def _expect(self, event: SessionEvent, *, field: str) -> None:
        if self.phase is LeasePhase.CLOSED:
            raise LeaseExpiredError("the lease has ended")
        if not SESSION_TRANSITIONS.allows(self.phase, event):
            raise InvalidRequestError(f"came while {self.phase.name}", field=field)

    def _move(self, event: SessionEvent) -> None:
        self.phase = SESSION_TRANSITIONS.after(self.phase, event) or self.phase
