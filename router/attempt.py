"""One request from admission to its end, over as many attempts as it takes. Pure.

A synchronous state machine: what workers, timers and the client say goes in by
method calls, what to do comes out as :mod:`router.actions`, in order. It alone
says which tokens were emitted, and accepts a token only at the position it
expects. No asyncio, no gRPC: clock, ids and placement are passed in. Owned by one
:class:`router.session.Session` on the event loop.

Invariants: exactly one Finish or Fail (none after ``cancel``), last; each lease
and seat that was opened is closed by its worker or by us before that; output
positions have neither gaps nor repeats.

Messages carry the id of the half they are for; those for a half that is no longer
held are ignored.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych.errors import (
    BlocksExhaustedError,
    DeadlineExceededError,
    DiptychError,
    InvalidRequestError,
    LeaseExpiredError,
    NoWorkerError,
    TransferInterruptedError,
    WorkerDrainingError,
)
from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2, inference_pb2
from router import actions
from router.actions import Action, Retry
from router.exclusions import Exclusions
from router.halves import Lease, LeaseState, Seat, SeatState
from router.output import Output, RequestShape, TokenSink
from router.placement import Pair, Placement, Query, Why, WorkerId

KVPath = inference_pb2.KVPath
_REFUSALS = (BlocksExhaustedError.reason, WorkerDrainingError.reason)
_MAY_BIND_AGAIN = frozenset(
    {
        decode_pb2.PULL_FAILURE_UNSPECIFIED,
        decode_pb2.PULL_FAILURE_TRANSPORT,
        decode_pb2.PULL_FAILURE_TICKET_INVALID,
        decode_pb2.PULL_FAILURE_UNPROVEN,
    }
)


class RequestState(enum.Enum):
    """Where a request stands; the states of its halves refine PLACED."""

    NEW = enum.auto()
    QUEUED = enum.auto()  # nothing held, waits for a placement
    PLACED = enum.auto()  # at least one half opened
    DECODING = enum.auto()  # the seat runs
    DONE = enum.auto()  # nothing held, nothing to come


_NEXT: dict[RequestState, frozenset[RequestState]] = {
    RequestState.NEW: frozenset({RequestState.QUEUED, RequestState.DONE}),
    RequestState.QUEUED: frozenset({RequestState.PLACED, RequestState.DONE}),
    RequestState.PLACED: frozenset(
        {RequestState.PLACED, RequestState.QUEUED, RequestState.DECODING, RequestState.DONE}
    ),
    RequestState.DECODING: frozenset({RequestState.PLACED, RequestState.QUEUED, RequestState.DONE}),
    RequestState.DONE: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the machine calls: all of it pure or deterministic in tests."""

    clock: Callable[[], float]  # monotonic, s
    place: Callable[[Query], Placement | None]  # answers at once
    new_sequence_id: Callable[[], int]
    new_ticket: Callable[[], bytes]  # 16 random bytes
    timers: Timers
    max_attempts: int


class RequestMachine:
    """See the module's text. Each method returns what to do now, in order."""

    def __init__(
        self,
        shape: RequestShape,
        around: Surroundings,
        sink: TokenSink,
        *,
        deadline_s: float | None = None,
    ) -> None:
        """``sink`` gets the tokens as they are emitted; ``deadline_s`` is a moment of the clock."""
        self.state = RequestState.NEW
        self.num_attempts = 1
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None  # of the prompt, on the worker that computed it
        self.transfer: common_pb2.TransferStats | None = None
        self.kv_path: int = KVPath.KV_PATH_UNSPECIFIED
        self.prefill_worker = ""
        self.decode_worker = ""
        self._shape = shape
        self._around = around
        self._timers = around.timers
        self._deadline_s = deadline_s
        self._output = Output(shape, sink)
        self._exclusions = Exclusions(around.timers)
        self._lease: Lease | None = None
        self._seat: Seat | None = None
        self._base = 0  # output tokens that the halves' specs contain
        self._retrying: DiptychError | None = None  # a new attempt is due because of this
        self._ended_due_s: float | None = None
        self._actions: list[Action] = []

    # The client and the clock

    def begin(self) -> list[Action]:
        """Ask for the first placement."""
        self._queue(front=False)
        return self._take()

    def try_place(self) -> list[Action]:
        """The queue offers its turn; the state tells whether it was taken."""
        if (
            self.state is RequestState.QUEUED
            and self._around.clock() >= self._exclusions.not_before_s
        ):
            placement = self._ask()
            if placement is not None:
                self._open(placement)
        return self._take()

    def tick(self) -> list[Action]:
        """``wake_at_s`` has come (or not yet: then nothing happens)."""
        now = self._around.clock()
        if self.state is RequestState.DONE:
            return []
        if self._deadline_s is not None and now >= self._deadline_s:
            self._fail(DeadlineExceededError("the request's deadline passed"))
        elif self.state is RequestState.QUEUED:
            self._tick_queued(now)
        elif self._ended_due_s is not None and now >= self._ended_due_s:
            self._finish_if_complete()
        else:
            self._tick_halves(now)
        return self._take()

    @property
    def wake_at_s(self) -> float | None:
        """When ``tick`` is due next."""
        if self.state is RequestState.DONE:
            return None
        moments = [self._deadline_s, self._ended_due_s]
        if self.state is RequestState.QUEUED:
            moments.append(self._exclusions.wait_until_s)
            if self._exclusions.not_before_s > self._around.clock():
                moments.append(self._exclusions.not_before_s)
        if self._lease is not None and self._lease.state is LeaseState.OPENING:
            moments.append(self._lease.due_s)
        if self._seat is not None and self._seat.state is SeatState.RESERVING:
            moments.append(self._seat.due_s)
        return min((moment for moment in moments if moment is not None), default=None)

    @property
    def emitted(self) -> Sequence[int]:
        """The output tokens so far."""
        return self._output.token_ids

    def cancel(self) -> list[Action]:
        """The client is gone: free everything, answer nothing."""
        if self.state is not RequestState.DONE:
            self._close_all()
        return self._take()

    def fail(self, error: DiptychError) -> list[Action]:
        """Give up for a reason outside of this machine."""
        if self.state is not RequestState.DONE:
            self._fail(error)
        return self._take()

    # The prefill worker

    def accepted(self, sequence_id: int, num_cached_tokens: int) -> list[Action]:
        """The lease holds its blocks."""
        lease = self._lease_of(sequence_id)
        if lease is not None and lease.state is LeaseState.OPENING:
            lease.move(LeaseState.HELD)
            self._book_cached(num_cached_tokens)
            self._settle()
            self._grant()
        return self._take()

    def first_token(
        self, sequence_id: int, token_id: int, position: int, margin: float | None, reason: int
    ) -> list[Action]:
        """The prefill worker sampled; ``reason`` is its FinishReason (0: goes on)."""
        lease = self._lease_of(sequence_id)
        if lease is None or lease.state is not LeaseState.HELD:
            return []
        lease.move(LeaseState.SAMPLED)
        broken = None
        if not self._output.accept(position, (token_id,), () if margin is None else (margin,)):
            broken = "skipped a token"
        elif self._output.complete_reason or reason:
            self._finish(self._output.complete_reason or reason)
        elif self._seat is None:
            broken = "did not end a sequence that it had alone"
        else:
            self._start_proven()
        if broken is not None:
            self._close_lease()
            error = NoWorkerError(f"prefill worker {lease.worker.address} {broken}")
            self._without_lease(error, blame=lease.worker)
        return self._take()

    def granted(self, sequence_id: int, grant_id: int) -> list[Action]:
        """The ticket is valid: the reader may pull."""
        lease, seat = self._lease_of(sequence_id), self._seat
        if lease is None or seat is None or lease.grant_id != grant_id:
            return []
        if seat.state is SeatState.GRANTING:
            seat.move(SeatState.PULLING)
            seat.bind_id += 1
            self._do(
                actions.Bind(
                    seat.sequence_id,
                    seat.bind_id,
                    lease.worker,
                    lease.ticket,
                    seat.num_cached_tokens,
                )
            )
        return self._take()

    def lease_ended(self, sequence_id: int, error: DiptychError) -> list[Action]:
        """The lease's stream ended, or its worker is lost; nothing of it is held."""
        lease = self._lease_of(sequence_id)
        if lease is None:
            return []
        if isinstance(error, InvalidRequestError):
            self._drop_lease()
            self._fail(error)
        elif lease.state is LeaseState.OPENING and error.reason in _REFUSALS:
            self._lease_refused(error)
        else:
            self._drop_lease()
            blame = None if error.reason == LeaseExpiredError.reason else lease.worker
            self._without_lease(_lost("prefill", lease.worker, error), blame=blame)
        return self._take()

    # The decode worker

    def reserved(self, sequence_id: int, num_cached_tokens: int) -> list[Action]:
        """The seat holds its blocks and already has this many tokens' KV."""
        seat = self._seat_of(sequence_id)
        if seat is None or seat.state is not SeatState.RESERVING:
            return []
        seat.num_cached_tokens = num_cached_tokens
        whole = num_cached_tokens >= len(self._shape.prompt_ids) + self._base
        seat.move(SeatState.PROVEN if whole else SeatState.RESERVED)
        self._settle()
        if seat.compute:
            self._book_cached(num_cached_tokens)
            self._start(compute=True)
        else:
            self._grant()
            self._start_proven()
        return self._take()

    def proven(
        self, sequence_id: int, bind_id: int, stats: common_pb2.TransferStats
    ) -> list[Action]:
        """The pull of that Bind landed whole and was confirmed."""
        seat = self._seat_of(sequence_id)
        if seat is not None and seat.state is SeatState.PULLING and seat.bind_id == bind_id:
            seat.move(SeatState.PROVEN)
            seat.stats = stats
            self._start_proven()
        return self._take()

    def pull_failed(
        self, sequence_id: int, bind_id: int, reason: int, message: str
    ) -> list[Action]:
        """The pull of that Bind ended without proof; the reservation stands."""
        seat, lease = self._seat_of(sequence_id), self._lease
        if seat is None or seat.state is not SeatState.PULLING or seat.bind_id != bind_id:
            return []
        assert lease is not None, "a pull without a lease"
        seat.move(SeatState.RESERVED)
        cause = decode_pb2.PullFailure.Name(reason).removeprefix("PULL_FAILURE_").lower()
        error = TransferInterruptedError(f"the hand-off failed ({cause}): {message}", cause=cause)
        source_lost = reason == decode_pb2.PULL_FAILURE_SOURCE_LOST
        if reason in _MAY_BIND_AGAIN and not seat.was_rebound:
            if self._spend_attempt(error):
                seat.was_rebound = True
                self._do(actions.Retried(Retry.REBIND, error))
                self._grant()
            return self._take()
        self._exclusions.failed_pairs.add(Pair(lease.worker.incarnation, seat.worker.incarnation))
        if not source_lost:
            other = self._ask(on_prefill=lease.worker)
            if other is not None and other.decode is not None:
                if self._spend_attempt(error):
                    self._close_seat()
                    self._do(actions.Retried(Retry.REBIND, error))
                    self._reserve(other.decode)
                return self._take()
        self._close_lease()
        self._without_lease(error, blame=lease.worker if source_lost else None)
        return self._take()

    def tokens(
        self, sequence_id: int, position: int, token_ids: Sequence[int], margins: Sequence[float]
    ) -> list[Action]:
        """New tokens of the seat; ``position`` counts from the prompt's start."""
        seat = self._seat_of(sequence_id)
        if seat is None or seat.state is not SeatState.RUNNING:
            return []
        if not self._output.accept(position, token_ids, margins):
            self._close_seat()
            error = NoWorkerError(f"decode worker {seat.worker.address} skipped a token")
            self._seat_failed(seat, error)
        elif self._output.stop_matched:
            self._finish_if_complete()
        elif self._output.complete_reason:  # its Ended comes next
            self._ended_due_s = self._around.clock() + self._timers.accept_s
        return self._take()

    def ended(self, message: decode_pb2.Ended) -> list[Action]:
        """The worker's last word on the seat: it finished, failed or refused."""
        seat = self._seat_of(message.sequence_id)
        if seat is None:
            return []
        self.num_preemptions += message.num_preemptions
        failure = message.failure if message.HasField("failure") else None
        if seat.state is SeatState.RUNNING and message.finish_reason:
            self._drop_seat()
            self._finish(self._output.complete_reason or message.finish_reason)
        elif failure is not None and failure.reason == InvalidRequestError.reason:
            self._drop_seat()
            field, _, rest = failure.message.partition(": ")
            self._fail(InvalidRequestError(rest or failure.message, field=field))
        elif (
            failure is not None
            and failure.reason in _REFUSALS
            and seat.state is SeatState.RESERVING
        ):
            self._drop_seat()
            self._seat_refused(seat, _refusal(failure))
        else:
            self._drop_seat()
            said = "ended for no reason" if failure is None else failure.message
            self._seat_failed(seat, NoWorkerError(f"decode worker {seat.worker.address}: {said}"))
        return self._take()

    def seat_lost(self, sequence_id: int, message: str) -> list[Action]:
        """The stream to the decode worker broke; nothing of it is held."""
        seat = self._seat_of(sequence_id)
        if seat is not None:
            self._drop_seat()
            self._seat_failed(seat, _lost("decode", seat.worker, NoWorkerError(message)))
        return self._take()

    # Placing

    def _ask(
        self, on_prefill: WorkerId | None = None, on_decode: WorkerId | None = None
    ) -> Placement | None:
        query = Query(
            num_tokens=self._output.num_sequence_tokens,
            num_max_tokens=len(self._shape.prompt_ids) + self._shape.max_tokens,
            failed=frozenset(self._exclusions.failed),
            failed_pairs=frozenset(self._exclusions.failed_pairs),
            refused=frozenset(self._exclusions.refused),
            on_prefill=on_prefill,
            on_decode=on_decode,
        )
        return self._around.place(query)

    def _open(self, placement: Placement) -> None:
        """Open a whole new placement; nothing is held."""
        self._move(RequestState.PLACED)
        self._base = len(self._output.token_ids)
        if self._retrying is not None:
            again = Retry.RECOMPUTE if placement.local else Retry.PREFILL_AGAIN
            self._do(actions.Retried(again, self._retrying))
            self._retrying = None
        self.prefill_worker = self.decode_worker = ""
        self.transfer = None
        if placement.prefill is not None:
            self._open_lease(placement.prefill)
        if placement.decode is not None:
            self._reserve(placement.decode, compute=placement.prefill is None)
        if placement.local is not None:
            self.kv_path = _local_path(placement.local)
        elif placement.decode is None:
            self.kv_path = KVPath.KV_PATH_PREFILL_ONLY
        else:
            self.kv_path = KVPath.KV_PATH_DISAGGREGATED

    def _open_lease(self, worker: WorkerId) -> None:
        due_s = self._around.clock() + self._timers.accept_s
        self._lease = Lease(worker, self._around.new_sequence_id(), due_s)
        self.prefill_worker = worker.address
        self._do(actions.OpenLease(worker, self._lease.sequence_id, self._base))

    def _reserve(self, worker: WorkerId, *, compute: bool = False) -> None:
        due_s = self._around.clock() + self._timers.accept_s
        self._seat = Seat(worker, self._around.new_sequence_id(), due_s, compute)
        self.decode_worker = worker.address
        self._do(actions.Reserve(worker, self._seat.sequence_id, self._base))

    def _queue(self, *, front: bool) -> None:
        """Wait for a placement; nothing is held."""
        self._exclusions.wait(self._around.clock())
        self._move(RequestState.QUEUED)
        self._do(actions.Enqueue(front))

    def _open_or_queue(self) -> None:
        self._close_halves()
        placement = self._ask()
        if placement is None:
            self._queue(front=True)
        else:
            self._open(placement)

    def _settle(self) -> None:
        opening = self._lease is not None and self._lease.state is LeaseState.OPENING
        reserving = self._seat is not None and self._seat.state is SeatState.RESERVING
        if not opening and not reserving:
            self._exclusions.placed()

    # The hand-off

    def _grant(self) -> None:
        lease, seat = self._lease, self._seat
        if lease is None or lease.state is LeaseState.OPENING:
            return
        if seat is None or seat.state is not SeatState.RESERVED:
            return
        seat.move(SeatState.GRANTING)
        lease.grant_id += 1
        lease.ticket = self._around.new_ticket()
        self._do(actions.Grant(lease.sequence_id, lease.grant_id, lease.ticket, seat.worker))

    def _start_proven(self) -> None:
        """Start what is proven, once the lease's token is known; the lease has done its work."""
        lease, seat = self._lease, self._seat
        if lease is None or lease.state is not LeaseState.SAMPLED:
            return
        if seat is None or seat.state is not SeatState.PROVEN:
            return
        self.transfer = seat.stats
        self._start(compute=False)
        self._close_lease()

    def _start(self, *, compute: bool) -> None:
        seat = self._seat
        assert seat is not None
        seat.move(SeatState.RUNNING)
        self._move(RequestState.DECODING)
        emitted = tuple(self._output.token_ids[self._base :])
        self._do(actions.Start(seat.sequence_id, emitted, compute))

    def _compute_on_seat(self, why: Why) -> None:
        """The seat computes itself what it lacks."""
        seat = self._seat
        assert seat is not None
        self.kv_path = _local_path(why)
        self.prefill_worker = ""
        if seat.state is SeatState.RESERVING:
            seat.compute = True
        else:
            self._start(compute=True)

    # Refusals and failures

    def _lease_refused(self, error: DiptychError) -> None:
        assert self._lease is not None
        self._exclusions.refuse(self._lease.worker, error)
        self._drop_lease()
        seat = self._seat
        if seat is not None:
            other = self._ask(on_decode=seat.worker)
            if other is not None and other.prefill is not None:
                self._open_lease(other.prefill)
                return
            if other is not None and other.local is not None:
                self._compute_on_seat(other.local)
                return
        self._open_or_queue()

    def _seat_refused(self, seat: Seat, error: DiptychError) -> None:
        self._exclusions.refuse(seat.worker, error)
        lease = self._lease
        if lease is not None:
            other = self._ask(on_prefill=lease.worker)
            if other is not None and other.decode is not None:
                self._reserve(other.decode)
                return
        self._open_or_queue()

    def _without_lease(self, error: DiptychError, *, blame: WorkerId | None) -> None:
        """The lease is gone before the seat could run: prefill elsewhere, else compute here."""
        if blame is not None:
            self._exclusions.failed.add(blame.incarnation)
        if self._finish_if_complete() or not self._spend_attempt(error):
            return
        seat = self._seat
        if seat is None:
            self._retrying = error
            self._open_or_queue()
            return
        if seat.state is SeatState.PROVEN:  # only the token is missing, not the KV
            self._do(actions.Retried(Retry.RECOMPUTE, error))
            self.transfer = seat.stats
            self._compute_on_seat(Why.RECOMPUTE)
            return
        elsewhere = self._ask()
        if elsewhere is None or elsewhere.prefill is None:
            here = self._ask(on_decode=seat.worker)
            if here is not None and here.prefill is None:
                self._do(actions.Retried(Retry.RECOMPUTE, error))
                self._compute_on_seat(Why.RECOMPUTE)
                return
        self._retrying = error
        self._open_or_queue()

    def _seat_failed(self, seat: Seat, error: DiptychError) -> None:
        """The seat is gone: another one on the same lease, else from the start."""
        self._exclusions.failed.add(seat.worker.incarnation)
        if self._finish_if_complete() or not self._spend_attempt(error):
            return
        lease = self._lease
        if lease is not None:
            other = self._ask(on_prefill=lease.worker)
            if other is not None and other.decode is not None:
                self._do(actions.Retried(Retry.REBIND, error))
                self._reserve(other.decode)
                return
        self._retrying = error
        self._open_or_queue()

    def _spend_attempt(self, error: DiptychError) -> bool:
        """Count a fail-over; False if that was one too many and the request failed."""
        if self.num_attempts >= self._around.max_attempts:
            self._fail(error)
            return False
        self.num_attempts += 1
        return True

    def _tick_queued(self, now: float) -> None:
        wait_until_s = self._exclusions.wait_until_s
        if wait_until_s is not None and now >= wait_until_s:
            refusal = self._exclusions.refusal
            self._fail(refusal or NoWorkerError("no worker can take the request now"))
        elif now >= self._exclusions.not_before_s:
            self._do(actions.Pump())

    def _tick_halves(self, now: float) -> None:
        lease = self._lease
        if lease is not None and lease.state is LeaseState.OPENING and now >= lease.due_s:
            error = NoWorkerError(f"prefill worker {lease.worker.address} did not answer in time")
            self._do(actions.CloseLease(lease.sequence_id))
            self._lease_refused(error)
        seat = self._seat
        if seat is not None and seat.state is SeatState.RESERVING and now >= seat.due_s:
            error = NoWorkerError(f"decode worker {seat.worker.address} did not answer in time")
            self._close_seat()
            self._seat_refused(seat, error)

    # Endings

    def _finish_if_complete(self) -> bool:
        reason = self._output.complete_reason
        if reason:
            self._finish(reason)
        return bool(reason)

    def _finish(self, reason: int) -> None:
        self._close_all()
        self._do(actions.Finish(reason))

    def _fail(self, error: DiptychError) -> None:
        self._close_all()
        self._do(actions.Fail(error))

    def _close_all(self) -> None:
        if self.state is RequestState.QUEUED:
            self._do(actions.Dequeue())
        self._close_halves()
        self._move(RequestState.DONE)

    def _close_halves(self) -> None:
        self._close_seat()
        self._close_lease()

    def _close_lease(self) -> None:
        if self._lease is not None:
            self._do(actions.CloseLease(self._lease.sequence_id))
            self._drop_lease()

    def _close_seat(self) -> None:
        if self._seat is not None:
            self._do(actions.Release(self._seat.sequence_id))
            self._drop_seat()

    def _drop_lease(self) -> None:
        """Forget the lease: its worker has, or was told to."""
        if self._lease is not None:
            self._lease.move(LeaseState.CLOSED)
            self._lease = None

    def _drop_seat(self) -> None:
        """Forget the seat: its worker has, or was told to."""
        if self._seat is not None:
            self._seat.move(SeatState.CLOSED)
            self._seat = None

    # Small change

    def _lease_of(self, sequence_id: int) -> Lease | None:
        lease = self._lease
        return lease if lease is not None and lease.sequence_id == sequence_id else None

    def _seat_of(self, sequence_id: int) -> Seat | None:
        seat = self._seat
        return seat if seat is not None and seat.sequence_id == sequence_id else None

    def _book_cached(self, num_tokens: int) -> None:
        num_tokens = min(num_tokens, len(self._shape.prompt_ids))
        known = self.num_cached_tokens
        self.num_cached_tokens = num_tokens if known is None else min(known, num_tokens)

    def _move(self, state: RequestState) -> None:
        assert state in _NEXT[self.state], f"{self.state} -> {state}"
        self.state = state

    def _do(self, action: Action) -> None:
        self._actions.append(action)

    def _take(self) -> list[Action]:
        taken, self._actions = self._actions, []
        return taken


def _local_path(why: Why) -> int:
    return KVPath.KV_PATH_RECOMPUTED if why is Why.RECOMPUTE else KVPath.KV_PATH_LOCAL


def _lost(role: str, worker: WorkerId, error: DiptychError) -> DiptychError:
    return NoWorkerError(f"{role} worker {worker.address} was lost: {error.message}")


def _refusal(failure: common_pb2.Failure) -> DiptychError:
    retry_after_s = failure.retry_after_s if failure.HasField("retry_after_s") else None
    if failure.reason == BlocksExhaustedError.reason:
        return BlocksExhaustedError(failure.message, retry_after_s=retry_after_s)
    return WorkerDrainingError(failure.message, retry_after_s=retry_after_s)
