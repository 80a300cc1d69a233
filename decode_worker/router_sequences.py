"""One router's sequences on a decode worker: a pure state machine.

Commands, results of pulls and results of steps go in; what to send and which
pulls to run or stop comes out, in order. It calls the engine, which answers at
once, itself, because whether blocks can be had decides the answer.
No clock, no asyncio, no gRPC; called on the event loop by one DecodeStream.

Invariant: each id that Reserve named gets exactly one Ended, last; a sequence
without an entry here holds no block.
"""

import enum
import math
from collections.abc import Callable, Iterable, Set
from typing import Protocol

from decode_worker import actions
from decode_worker.actions import Action, PreparedPull, RunPull, SendTokens, StopPull
from decode_worker.held_sequence import HeldEvent, HeldSequence, Phase
from decode_worker.outbox import NewToken
from decode_worker.worker_limits import WorkerLimits
from diptych.block_hash import prompt_digest
from diptych.engine.scheduling.sequence import Sequence, SequenceKey
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import BlocksComingError, DiptychError, InvalidRequestError
from diptych.finish_reason import FinishReason
from diptych.v1 import common_pb2, decode_pb2
from kvtransfer.reader.pull_machine import PullRequest


class Fallback(enum.StrEnum):
    """Why this worker computed KV that it did not pull."""

    LOCAL = "local"  # placed here alone
    RECOMPUTE = "recompute"  # after a hand-off that failed


class DecodeEngine(Protocol):
    """The part of diptych.engine.protocol.Engine that a router's sequences need."""

    def reserve(self, seq: Sequence) -> None: ...
    def mark_proven(self, seq: Sequence) -> None: ...
    def start(self, seq: Sequence, emitted: list[int], compute_missing: bool) -> None: ...
    def release(self, seq: Sequence) -> None: ...


class SequenceObserver(Protocol):
    """Told, after the fact, of what metrics and traces need."""

    def reserved(self, command: decode_pb2.Reserve, seq: Sequence) -> None: ...
    def bound(self, command: decode_pb2.Bind) -> None: ...
    def started(
        self, command: decode_pb2.Start, seq: Sequence, fallback: Fallback | None
    ) -> None: ...
    def ended(self, seq: Sequence, ended: decode_pb2.Ended) -> None: ...


class RouterSequences:
    """All sequences of one router's stream."""

    def __init__(
        self,
        owner: str,
        engine: DecodeEngine,
        limits: WorkerLimits,
        *,
        open_pull: Callable[[PullRequest], PreparedPull],
        unfinished_reads: Set[int],
        admit: Callable[[], None],
        observer: SequenceObserver,
    ) -> None:
        """``owner`` is the router's incarnation.

        ``unfinished_reads`` is a live view of the local blocks that posted reads
        may still write. ``admit`` raises while the worker takes nothing new.
        """
        self._owner = owner
        self._engine = engine
        self._limits = limits
        self._open_pull = open_pull
        self._unfinished_reads = unfinished_reads
        self._admit = admit
        self._observer = observer
        self._held: dict[int, HeldSequence] = {}
        # For blocks that come with a step's end; those that start are held, without any.
        self._asking: dict[int, decode_pb2.Reserve] = {}
        self._starting: dict[int, decode_pb2.Start] = {}

    def __len__(self) -> int:
        return len(self._held)

    def phase_of(self, sequence_id: int) -> Phase | None:
        """Where a sequence stands; None before Reserve and after Ended. For checks."""
        held = self._held.get(sequence_id)
        return None if held is None else held.phase

    def reserve(self, command: decode_pb2.Reserve) -> list[Action]:
        """Hold blocks for a new sequence: Reserved, or Ended with why not.

        Neither yet where others leave for it with the end of their step: ``step`` answers then.
        Raises InvalidRequestError, which breaks the stream: the id is in use.
        """
        sequence_id = command.sequence_id
        if sequence_id in self._held or sequence_id in self._asking:
            raise InvalidRequestError(f"{sequence_id} is in use", field="reserve.sequence_id")
        return self._ask(command)

    def _ask(self, command: decode_pb2.Reserve) -> list[Action]:
        sequence_id = command.sequence_id
        try:
            self._admit()
            self._limits.check_reserve(command.spec)
            sequence = self._reserve_blocks(sequence_id, command.spec, to_pull=command.to_pull)
        except BlocksComingError:
            self._asking[sequence_id] = command
            return []
        except DiptychError as error:
            return [actions.send_ended(sequence_id, error=error)]
        held = HeldSequence(command.spec, sequence)
        self._held[sequence_id] = held
        self._observer.reserved(command, sequence)
        if sequence.num_cached_tokens == sequence.num_tokens:
            self._prove(held)
        return [actions.send_reserved(sequence_id, sequence.num_cached_tokens)]

    def bind(self, command: decode_pb2.Bind) -> list[Action]:
        """Pull from the lease it names, and from no other any more."""
        sequence_id, bind_id = command.sequence_id, command.bind_id
        held = self._held.get(sequence_id)
        if held is None or held.phase is Phase.RUNNING:
            return []
        if held.bind_id is not None and bind_id <= held.bind_id:
            return []
        held.bind_id = bind_id
        if held.phase is Phase.PROVEN:  # nothing is missing
            return [actions.send_proven(sequence_id, bind_id, common_pb2.TransferStats())]
        first = held.sequence.num_cached_tokens
        if command.first_missing_token != first:
            error = InvalidRequestError(
                f"is {command.first_missing_token}, but Reserved said {first}",
                field="bind.first_missing_token",
            )
            return self._end(sequence_id, error=error)
        stopped = self._stop_pull(held)
        request = PullRequest(
            source_address=command.source_address,
            source_incarnation=command.source_incarnation,
            ticket=command.ticket,
            first_missing_token=first,
            num_tokens=held.sequence.num_tokens,
            prompt_digest=prompt_digest(held.sequence.token_ids, held.sequence.cache_salt),
            local_block_ids=tuple(held.sequence.block_table[first // self._limits.block_size :]),
        )
        held.pull = RunPull(sequence_id, bind_id, self._open_pull(request))
        held.move(HeldEvent.BIND)
        self._observer.bound(command)
        return [*stopped, held.pull]

    def start(self, command: decode_pb2.Start) -> list[Action]:
        """Let the sequence run after the tokens already emitted; see decode.proto.

        Where it has to have other blocks, for which others leave with the end of their step, it
        runs then.
        """
        sequence_id = command.sequence_id
        held = self._held.get(sequence_id)
        if held is None or held.phase is Phase.RUNNING:
            return []
        proven = held.phase is Phase.PROVEN
        try:
            self._limits.check_start(command, num_tokens=held.sequence.num_tokens, proven=proven)
        except DiptychError as error:
            return self._end(sequence_id, error=error)
        stopped = self._stop_pull(held)
        if command.emitted_token_ids:
            held.sequence.emitted(command.emitted_age_s)
        held.move(HeldEvent.START)
        return [*stopped, *self._run(held, command, proven=proven)]

    def _run(self, held: HeldSequence, command: decode_pb2.Start, *, proven: bool) -> list[Action]:
        fallback = None
        try:
            if not proven:
                self._leave_unfinished_reads(held)
                fallback = Fallback.LOCAL if held.bind_id is None else Fallback.RECOMPUTE
            emitted = list(command.emitted_token_ids)
            self._engine.start(held.sequence, emitted, command.compute_missing)
        except BlocksComingError:
            self._starting[command.sequence_id] = command
            return []
        except DiptychError as error:
            return self._end(command.sequence_id, error=error)
        self._observer.started(command, held.sequence, fallback)
        return []

    def release(self, sequence_id: int) -> list[Action]:
        """Free everything of the sequence. Idempotent."""
        if self._asking.pop(sequence_id, None) is not None:
            return [actions.send_ended(sequence_id)]
        return self._end(sequence_id) if sequence_id in self._held else []

    def release_all(self) -> list[Action]:
        """Free everything: the stream broke, or the worker stops."""
        released: list[Action] = [actions.send_ended(sequence_id) for sequence_id in self._asking]
        self._asking.clear()
        for sequence_id in list(self._held):
            released += self._end(sequence_id)
        return released

    def pull_proven(
        self, sequence_id: int, bind_id: int, stats: common_pb2.TransferStats
    ) -> list[Action]:
        """The pull of that Bind landed and was confirmed."""
        held = self._pulling(sequence_id, bind_id)
        if held is None:
            return []
        held.pull = None
        self._prove(held)
        return [actions.send_proven(sequence_id, bind_id, stats)]

    def pull_failed(
        self, sequence_id: int, bind_id: int, reason: decode_pb2.PullFailure, message: str
    ) -> list[Action]:
        """The pull of that Bind ended without proof; the reservation stands."""
        held = self._pulling(sequence_id, bind_id)
        if held is None:
            return []
        held.pull = None
        held.move(HeldEvent.PULL_FAILED)
        return [actions.send_pull_failed(sequence_id, bind_id, reason, message)]

    def step(self, updates: Iterable[SequenceUpdate]) -> list[Action]:
        """Book a step. ``updates`` may name other routers' sequences too."""
        tokens: list[NewToken] = []
        ended: list[Action] = []
        for update in updates:
            sequence_id = update.sequence.key.sequence_id
            held = self._held.get(sequence_id)
            if held is None or held.sequence is not update.sequence:
                continue
            held.book(update)
            if update.token is not None and update.position is not None:
                token_id, margin, logprobs = update.token
                known = None if math.isnan(margin) else margin
                tokens.append(NewToken(sequence_id, update.position, token_id, known, logprobs))
            if update.finish_reason is not None or update.error is not None:
                ended += self._end(
                    sequence_id, finish_reason=update.finish_reason, error=update.error
                )
        starting, self._starting = self._starting, {}
        for start in starting.values():
            ended += self._run(self._held[start.sequence_id], start, proven=False)
        asking, self._asking = self._asking, {}
        for command in asking.values():
            ended += self._ask(command)
        return [SendTokens(tuple(tokens)), *ended] if tokens else ended

    def _pulling(self, sequence_id: int, bind_id: int) -> HeldSequence | None:
        held = self._held.get(sequence_id)
        if held is None or held.pull is None or held.pull.bind_id != bind_id:
            return None
        return held

    def _reserve_blocks(
        self, sequence_id: int, spec: common_pb2.SequenceSpec, *, to_pull: bool
    ) -> Sequence:
        key = SequenceKey(self._owner, sequence_id)
        sequence = Sequence.from_spec(key, spec, prefill_only=False)
        sequence.to_pull = to_pull
        self._engine.reserve(sequence)
        return sequence

    def _prove(self, held: HeldSequence) -> None:
        self._engine.mark_proven(held.sequence)
        held.move(HeldEvent.PROVE)

    def _stop_pull(self, held: HeldSequence) -> list[Action]:
        held.move(HeldEvent.STOP_PULL)
        if held.pull is None:
            return []
        sequence_id, bind_id, pull = held.pull
        pull.abandon()
        held.pull = None
        return [StopPull(sequence_id, bind_id)]

    def _leave_unfinished_reads(self, held: HeldSequence) -> None:
        """Swap the reservation for a fresh one where late reads might spoil what is computed.

        Raises BlocksComingError, having given it back: swap it again then.
        """
        before = held.sequence
        if before.block_table and self._unfinished_reads.isdisjoint(before.block_table):
            return
        self._engine.release(before)
        held.sequence = self._reserve_blocks(before.key.sequence_id, held.spec, to_pull=False)
        held.sequence.due_s = before.due_s  # what the spec said was from then on
        held.sequence.emitted_s = before.emitted_s

    def _end(
        self,
        sequence_id: int,
        *,
        finish_reason: FinishReason | None = None,
        error: DiptychError | None = None,
    ) -> list[Action]:
        held = self._held.pop(sequence_id)
        self._starting.pop(sequence_id, None)
        stopped = self._stop_pull(held)
        self._engine.release(held.sequence)
        send = actions.send_ended(
            sequence_id,
            finish_reason=finish_reason,
            error=error,
            num_preemptions=held.sequence.num_preemptions,
            num_computed_tokens=held.num_computed_tokens,
            num_computed_prompt_tokens=held.num_computed_prompt_tokens,
        )
        self._observer.ended(held.sequence, send.event.ended)
        return [*stopped, send]
