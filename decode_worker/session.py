"""One router's sequences on a decode worker: a pure state machine.

Commands, results of pulls and results of steps go in; what to send and which
pulls to run or stop comes out, in order. It drives the scheduler (synchronous
and pure as well) itself, because whether blocks can be had decides the answer.
No clock, no asyncio, no gRPC; called on the event loop by one DecodeStream.

Invariant: each id that Reserve named gets exactly one Ended, last; a sequence
without an entry here holds no block.
"""

import enum
import math
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from decode_worker import actions
from decode_worker.actions import Action, PreparedPull, RunPull, SendTokens, StopPull
from decode_worker.held_sequence import Entry, EntryEvent, Phase
from decode_worker.outbox import NewToken
from decode_worker.worker_limits import SessionRules
from diptych.block_hash import prompt_digest
from diptych.engine.scheduling.sequence import FinishReason, Sequence, SequenceKey
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import DiptychError, InvalidRequestError
from diptych.v1 import common_pb2, decode_pb2
from kvtransfer.reader.pull_machine import PullRequest


class Fallback(enum.StrEnum):
    """Why this worker computed KV that it did not pull."""

    LOCAL = "local"  # placed here alone
    RECOMPUTE = "recompute"  # after a hand-off that failed


class SequenceScheduler(Protocol):
    """The part of the scheduler that a session needs."""

    def reserve(self, seq: Sequence) -> None: ...
    def mark_proven(self, seq: Sequence) -> None: ...
    def start(self, seq: Sequence, emitted: list[int], compute_missing: bool) -> None: ...
    def release(self, seq: Sequence, unfinished_block_ids: Collection[int] = ()) -> None: ...


class SessionObserver(Protocol):
    """Told, after the fact, of what metrics and traces need."""

    def reserved(self, command: decode_pb2.Reserve, seq: Sequence) -> None: ...
    def started(self, seq: Sequence, fallback: Fallback | None) -> None: ...
    def ended(self, seq: Sequence, ended: decode_pb2.Ended) -> None: ...


class Session:
    """All sequences of one router's stream."""

    def __init__(
        self,
        owner: str,
        scheduler: SequenceScheduler,
        rules: SessionRules,
        *,
        open_pull: Callable[[PullRequest], PreparedPull],
        unfinished_reads: Collection[int],
        admit: Callable[[], None],
        observer: SessionObserver,
    ) -> None:
        """``owner`` is the router's incarnation.

        ``unfinished_reads`` is a live view of the local blocks that posted reads
        may still write. ``admit`` raises while the worker takes nothing new.
        """
        self._owner = owner
        self._scheduler = scheduler
        self._rules = rules
        self._open_pull = open_pull
        self._unfinished_reads = unfinished_reads
        self._admit = admit
        self._observer = observer
        self._entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def phase_of(self, sequence_id: int) -> Phase | None:
        """Where a sequence stands; None before Reserve and after Ended."""
        entry = self._entries.get(sequence_id)
        return None if entry is None else entry.phase

    def reserve(self, command: decode_pb2.Reserve) -> list[Action]:
        """Hold blocks for a new sequence: Reserved, or Ended with why not.

        Raises InvalidRequestError, which breaks the stream: the id is in use.
        """
        sequence_id = command.sequence_id
        if sequence_id in self._entries:
            raise InvalidRequestError(f"{sequence_id} is in use", field="reserve.sequence_id")
        try:
            self._admit()
            self._rules.check_reserve(command.spec)
            sequence = self._reserve_blocks(sequence_id, command.spec)
        except DiptychError as error:
            return [actions.send_ended(sequence_id, error=error)]
        entry = Entry(command.spec, sequence)
        self._entries[sequence_id] = entry
        self._observer.reserved(command, sequence)
        if sequence.num_cached_tokens == sequence.num_tokens:
            self._prove(entry)
        return [actions.send_reserved(sequence_id, sequence.num_cached_tokens)]

    def bind(self, command: decode_pb2.Bind) -> list[Action]:
        """Pull from the lease it names, and from no other any more."""
        sequence_id, bind_id = command.sequence_id, command.bind_id
        entry = self._entries.get(sequence_id)
        if entry is None or entry.phase is Phase.RUNNING:
            return []
        if entry.bind_id is not None and bind_id <= entry.bind_id:
            return []
        entry.bind_id = bind_id
        if entry.phase is Phase.PROVEN:  # nothing is missing
            return [actions.send_proven(sequence_id, bind_id, common_pb2.TransferStats())]
        first = entry.sequence.num_cached_tokens
        if command.first_missing_token != first:
            error = InvalidRequestError(
                f"is {command.first_missing_token}, but Reserved said {first}",
                field="bind.first_missing_token",
            )
            return self._end(sequence_id, error=error)
        stopped = self._stop_pull(entry)
        request = PullRequest(
            source_address=command.source_address,
            source_incarnation=command.source_incarnation,
            ticket=command.ticket,
            first_missing_token=first,
            num_tokens=entry.sequence.num_tokens,
            prompt_digest=prompt_digest(entry.sequence.token_ids, entry.sequence.cache_salt),
            local_block_ids=tuple(entry.sequence.block_table[first // self._rules.block_size :]),
        )
        entry.pull = RunPull(sequence_id, bind_id, self._open_pull(request))
        entry.move(EntryEvent.BIND)
        return [*stopped, entry.pull]

    def start(self, command: decode_pb2.Start) -> list[Action]:
        """Let the sequence run after the tokens already emitted; see decode.proto."""
        sequence_id = command.sequence_id
        entry = self._entries.get(sequence_id)
        if entry is None or entry.phase is Phase.RUNNING:
            return []
        proven = entry.phase is Phase.PROVEN
        stopped: list[Action] = []
        try:
            self._rules.check_start(command, num_tokens=entry.sequence.num_tokens, proven=proven)
            stopped = self._stop_pull(entry)
            if not proven:
                self._leave_unfinished_reads(entry)
            self._scheduler.start(
                entry.sequence, list(command.emitted_token_ids), command.compute_missing
            )
        except DiptychError as error:
            return [*stopped, *self._end(sequence_id, error=error)]
        entry.move(EntryEvent.START)
        fallback = None
        if not proven:
            fallback = Fallback.LOCAL if entry.bind_id is None else Fallback.RECOMPUTE
        self._observer.started(entry.sequence, fallback)
        return stopped

    def release(self, sequence_id: int) -> list[Action]:
        """Free everything of the sequence. Idempotent."""
        return self._end(sequence_id) if sequence_id in self._entries else []

    def release_all(self, error: DiptychError | None = None) -> list[Action]:
        """Free everything: the stream broke, or the worker stops."""
        released: list[Action] = []
        for sequence_id in list(self._entries):
            released += self._end(sequence_id, error=error)
        return released

    def pull_proven(
        self, sequence_id: int, bind_id: int, stats: common_pb2.TransferStats
    ) -> list[Action]:
        """The pull of that Bind landed and was confirmed."""
        entry = self._pulling(sequence_id, bind_id)
        if entry is None:
            return []
        entry.pull = None
        self._prove(entry)
        return [actions.send_proven(sequence_id, bind_id, stats)]

    def pull_failed(
        self, sequence_id: int, bind_id: int, reason: decode_pb2.PullFailure, message: str
    ) -> list[Action]:
        """The pull of that Bind ended without proof; the reservation stands."""
        entry = self._pulling(sequence_id, bind_id)
        if entry is None:
            return []
        entry.pull = None
        entry.move(EntryEvent.PULL_FAILED)
        return [actions.send_pull_failed(sequence_id, bind_id, reason, message)]

    def step(self, updates: Iterable[SequenceUpdate]) -> list[Action]:
        """Book a step. ``updates`` may name sequences of other sessions too."""
        tokens: list[NewToken] = []
        ended: list[Action] = []
        for update in updates:
            sequence_id = update.sequence.key.sequence_id
            entry = self._entries.get(sequence_id)
            if entry is None or entry.sequence is not update.sequence:
                continue
            entry.book(update)
            if update.token is not None and update.position is not None:
                token_id, margin = update.token
                known = None if math.isnan(margin) else margin
                tokens.append(NewToken(sequence_id, update.position, token_id, known))
            if update.finish_reason is not None or update.error is not None:
                ended += self._end(
                    sequence_id, finish_reason=update.finish_reason, error=update.error
                )
        return [SendTokens(tuple(tokens)), *ended] if tokens else ended

    def _pulling(self, sequence_id: int, bind_id: int) -> Entry | None:
        entry = self._entries.get(sequence_id)
        if entry is None or entry.pull is None or entry.pull.bind_id != bind_id:
            return None
        return entry

    def _reserve_blocks(self, sequence_id: int, spec: common_pb2.SequenceSpec) -> Sequence:
        key = SequenceKey(self._owner, sequence_id)
        sequence = Sequence.from_spec(key, spec, prefill_only=False)
        self._scheduler.reserve(sequence)
        return sequence

    def _prove(self, entry: Entry) -> None:
        self._scheduler.mark_proven(entry.sequence)
        entry.move(EntryEvent.PROVE)

    def _stop_pull(self, entry: Entry) -> list[Action]:
        entry.move(EntryEvent.STOP_PULL)
        if entry.pull is None:
            return []
        sequence_id, bind_id, pull = entry.pull
        pull.abandon()
        entry.pull = None
        return [StopPull(sequence_id, bind_id)]

    def _leave_unfinished_reads(self, entry: Entry) -> None:
        """Swap the reservation for a fresh one where late reads might spoil what is computed."""
        unfinished = self._unfinished_in(entry.sequence)
        if unfinished:
            self._scheduler.release(entry.sequence, unfinished)
            entry.sequence = self._reserve_blocks(entry.sequence.key.sequence_id, entry.spec)

    def _unfinished_in(self, sequence: Sequence) -> list[int]:
        return [block for block in sequence.block_table if block in self._unfinished_reads]

    def _end(
        self,
        sequence_id: int,
        *,
        finish_reason: FinishReason | None = None,
        error: DiptychError | None = None,
    ) -> list[Action]:
        entry = self._entries.pop(sequence_id)
        stopped = self._stop_pull(entry)
        self._scheduler.release(entry.sequence, self._unfinished_in(entry.sequence))
        send = actions.send_ended(
            sequence_id,
            finish_reason=finish_reason,
            error=error,
            num_preemptions=entry.sequence.num_preemptions,
            num_computed_tokens=entry.num_computed_tokens,
        )
        self._observer.ended(entry.sequence, send.event.ended)
        return [*stopped, send]
