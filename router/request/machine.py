"""One request from admission to its end, over as many attempts as it takes. Pure.

A synchronous state machine: what happens goes in as :mod:`router.request.events`, what
to do comes out as :mod:`router.request.actions`, in order. It alone says which tokens
were emitted, and accepts a token only at the position it expects. No asyncio, no gRPC:
clock, ids and placement are passed in, and placement is asked in one place (``_ask``).
Owned by one :class:`router.request.session.Session` on the event loop.

Invariants: exactly one Finish or Fail (none after ``cancel``), last; each lease
and seat that was opened is closed by its worker or by us before that; output
positions have neither gaps nor repeats.

Messages carry the id of the half they are for; those for a half that is no longer
held are ignored.
"""

import enum
from collections.abc import Sequence

from diptych.errors import (
    DeadlineExceededError,
    DiptychError,
    InvalidRequestError,
    LeaseExpiredError,
    LogitsError,
)
from diptych.transitions import Transitions
from diptych.v1 import decode_pb2
from router.placement.types import DecodeOnly, Pair, Paired, Placement, Query, Why, WorkerId
from router.request import actions, events
from router.request import failures as faults
from router.request.actions import Action, Retry
from router.request.attempt import Attempt
from router.request.deps import Surroundings
from router.request.emitted_tokens import Output, RequestShape, TokenSink
from router.request.events import Event
from router.request.halves import LeaseEvent, LeaseState, Seat, SeatEvent, SeatState
from router.request.retry_state import Exclusions


class RequestState(enum.Enum):
    """Where a request stands; the states of its halves refine PLACED."""

    NEW = enum.auto()
    QUEUED = enum.auto()  # nothing held, waits for a placement
    PLACED = enum.auto()  # at least one half opened
    DECODING = enum.auto()  # the seat runs
    DONE = enum.auto()  # nothing held, nothing to come


class RequestEvent(enum.Enum):
    """What moves it."""

    QUEUE = enum.auto()
    PLACE = enum.auto()  # open a whole placement
    DECODE = enum.auto()  # the seat was started
    END = enum.auto()


REQUEST_TRANSITIONS = Transitions(
    {
        RequestState.NEW: {
            RequestEvent.QUEUE: RequestState.QUEUED,
            RequestEvent.END: RequestState.DONE,
        },
        RequestState.QUEUED: {
            RequestEvent.PLACE: RequestState.PLACED,
            RequestEvent.END: RequestState.DONE,
        },
        RequestState.PLACED: {
            RequestEvent.QUEUE: RequestState.QUEUED,
            RequestEvent.PLACE: RequestState.PLACED,
            RequestEvent.DECODE: RequestState.DECODING,
            RequestEvent.END: RequestState.DONE,
        },
        RequestState.DECODING: {
            RequestEvent.QUEUE: RequestState.QUEUED,
            RequestEvent.PLACE: RequestState.PLACED,
            RequestEvent.END: RequestState.DONE,
        },
    },
)


class RequestMachine:
    """See the module's text. ``handle`` is its only input."""

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
        self._shape = shape
        self._around = around
        self._timers = around.timers
        self._deadline_s = deadline_s
        self._output = Output(shape, sink)
        self._exclusions = Exclusions(around.timers)
        self._retrying: DiptychError | None = None  # a new attempt is due because of this
        self._ended_due_s: float | None = None
        self._actions: list[Action] = []
        self.attempt = Attempt(len(shape.prompt_ids), around, self._do)
        """What is held now; read only, for others."""

    def handle(self, event: Event) -> Sequence[Action]:
        """What to do now that ``event`` has happened, in order."""
        if isinstance(event, events.Tokens):  # the many; everything else is rare
            self._on_tokens(event)
        elif self.state is not RequestState.DONE:
            self._handle(event)
        if not self._actions:
            return ()
        taken, self._actions = self._actions, []
        return taken

    @property
    def wake_at_s(self) -> float | None:
        """When a Tick is due next."""
        if self.state is RequestState.DONE:
            return None
        moments = [self._deadline_s, self._ended_due_s, *self.attempt.due_s]
        if self.state is RequestState.QUEUED:
            moments.append(self._exclusions.wait_until_s)
            if self._exclusions.not_before_s > self._around.clock():
                moments.append(self._exclusions.not_before_s)
        return min((moment for moment in moments if moment is not None), default=None)

    @property
    def emitted(self) -> Sequence[int]:
        """The output tokens so far."""
        return self._output.token_ids

    def _handle(self, event: Event) -> None:
        match event:
            case events.Begin():
                self._queue(front=False)
            case events.Offered():
                self._on_offered(event)
            case events.TurnedAway():
                self._fail(event.error)
            case events.Tick():
                self._on_tick()
            case events.Cancelled():
                self._close_all()
            case events.ClientTooSlow():
                self._fail(faults.client_too_slow(event.max_unread))
            case events.Accepted():
                self._on_accepted(event)
            case events.FirstToken():
                self._on_first_token(event)
            case events.Granted():
                if self.attempt.lease_of(event.sequence_id) is not None:
                    self.attempt.bind(event.grant_id)
            case events.LeaseEnded():
                self._on_lease_ended(event)
            case events.Reserved():
                self._on_reserved(event)
            case events.Proven():
                self._on_proven(event)
            case events.PullFailed():
                self._on_pull_failed(event)
            case events.Tokens():
                self._on_tokens(event)
            case events.Ended():
                self._on_ended(event)
            case events.ReservationLost():
                self._on_reservation_lost(event)

    # The queue and the clock

    def _on_offered(self, event: events.Offered) -> None:
        due = event.room_made or self._around.clock() >= self._exclusions.not_before_s
        if self.state is RequestState.QUEUED and due:
            placement = self._ask()
            if placement is not None:
                self._do(actions.Dequeue(is_placed=True))
                self._open(placement)

    def _on_tick(self) -> None:
        now = self._around.clock()
        if self._deadline_s is not None and now >= self._deadline_s:
            self._fail(DeadlineExceededError("the request's deadline passed"))
        elif self.state is RequestState.QUEUED:
            self._tick_queued(now)
        elif self._ended_due_s is not None and now >= self._ended_due_s:
            self._finish_if_complete()
        else:
            self._tick_halves(now)

    # The prefill worker

    def _on_accepted(self, event: events.Accepted) -> None:
        lease = self.attempt.lease_of(event.sequence_id)
        if lease is not None and lease.move(LeaseEvent.ACCEPTED):
            self._book_cached(event.num_cached_tokens)
            self._settle()
            self.attempt.grant_if_held()

    def _on_first_token(self, event: events.FirstToken) -> None:
        lease = self.attempt.lease_of(event.sequence_id)
        if lease is None or not lease.move(LeaseEvent.FIRST_TOKEN):
            return
        broken = None
        margins = () if event.margin is None else (event.margin,)
        if not self._output.accept(event.position, (event.token_id,), margins):
            broken = "it skipped a token"
        elif self._output.complete_reason or event.finish_reason:
            self._finish(self._output.complete_reason or event.finish_reason)
        elif self.attempt.seat is None:
            broken = "it did not end a sequence that it had alone"
        else:
            self._start_proven()
        if broken is not None:
            self.attempt.close_lease()
            self._without_lease(faults.lost("prefill", lease.worker, broken), blame=lease.worker)

    def _on_lease_ended(self, event: events.LeaseEnded) -> None:
        lease, error = self.attempt.lease_of(event.sequence_id), event.error
        if lease is None:
            return
        if isinstance(error, InvalidRequestError | LogitsError):
            self.attempt.drop_lease()
            self._fail(error)
        elif lease.state is LeaseState.OPENING and faults.is_refusal(error):
            self._lease_refused(error)
        else:
            self.attempt.drop_lease()
            blame = None if error.reason == LeaseExpiredError.reason else lease.worker
            gone = faults.lost("prefill", lease.worker, error.message)
            self._without_lease(gone, blame=blame, is_counted=self.attempt.is_rebinding)

    # The decode worker

    def _on_reserved(self, event: events.Reserved) -> None:
        seat = self.attempt.seat_of(event.sequence_id)
        if seat is None or not self.attempt.reserved(event.num_cached_tokens):
            return
        self._settle()
        if seat.compute:
            self._book_cached(event.num_cached_tokens)
            self.attempt.start_computing(self.emitted)
            self._move(RequestEvent.DECODE)
        else:
            self.attempt.grant_if_held()
            self._start_proven()

    def _on_proven(self, event: events.Proven) -> None:
        seat = self.attempt.seat_of(event.sequence_id)
        if seat is not None and seat.bind_id == event.bind_id and seat.move(SeatEvent.PROVEN):
            seat.stats = event.stats
            self._start_proven()

    def _on_pull_failed(self, event: events.PullFailed) -> None:
        seat, lease = self.attempt.seat_of(event.sequence_id), self.attempt.lease
        if seat is None or seat.bind_id != event.bind_id or not seat.move(SeatEvent.PULL_FAILED):
            return
        assert lease is not None, "a pull without a lease"
        error = faults.pull_failed(event.reason, event.message)
        source_lost = event.reason == decode_pb2.PULL_FAILURE_SOURCE_LOST
        if faults.may_bind_again(event.reason) and not seat.was_rebound:
            if self._spend_attempt(error):
                seat.was_rebound = True
                self._do(actions.Retried(Retry.REBIND, error))
                self.attempt.grant_if_held()
            return
        self._exclusions.failed_pairs.add(Pair(lease.worker.incarnation, seat.worker.incarnation))
        if not source_lost:
            other = self._ask(on_prefill=lease.worker)
            if isinstance(other, Paired):
                if self._spend_attempt(error):
                    self.attempt.close_seat()
                    self._do(actions.Retried(Retry.REBIND, error))
                    self.attempt.reserve(other.decode)
                return
        self.attempt.close_lease()
        self._without_lease(error, blame=lease.worker if source_lost else None)

    def _on_tokens(self, event: events.Tokens) -> None:
        seat = self.attempt.seat_of(event.sequence_id)
        if seat is None or seat.state is not SeatState.RUNNING:
            return
        if not self._output.accept(event.position, event.token_ids, event.margins):
            self.attempt.close_seat()
            self._seat_failed(seat, faults.lost("decode", seat.worker, "it skipped a token"))
        elif self._output.stop_matched:
            self._finish_if_complete()
        elif self._output.complete_reason:  # its Ended comes next
            self._ended_due_s = self._around.clock() + self._timers.accept_s

    def _on_ended(self, event: events.Ended) -> None:
        seat = self.attempt.seat_of(event.sequence_id)
        if seat is None:
            return
        self.num_preemptions += event.num_preemptions
        state = seat.state
        self.attempt.drop_seat()
        if state is SeatState.RUNNING and event.finish_reason:
            self._finish(self._output.complete_reason or event.finish_reason)
            return
        error = faults.ended(event.error)
        if isinstance(error, InvalidRequestError | LogitsError):
            self._fail(error)
        elif state is SeatState.RESERVING and faults.is_refusal(error):
            self._seat_refused(seat, error)
        else:
            self._seat_failed(seat, faults.lost("decode", seat.worker, error.message))

    def _on_reservation_lost(self, event: events.ReservationLost) -> None:
        seat = self.attempt.seat_of(event.sequence_id)
        if seat is not None:
            self.attempt.drop_seat()
            self._seat_failed(seat, faults.lost("decode", seat.worker, event.message))

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
        self._move(RequestEvent.PLACE)
        if self._retrying is not None:
            is_local = isinstance(placement, DecodeOnly)
            again = Retry.RECOMPUTE if is_local else Retry.PREFILL_AGAIN
            self._do(actions.Retried(again, self._retrying))
            self._retrying = None
        self.attempt.open(placement, len(self.emitted))

    def _queue(self, *, front: bool) -> None:
        """Wait for a placement; nothing is held."""
        self._exclusions.wait(self._around.clock())
        self._move(RequestEvent.QUEUE)
        self._do(actions.Enqueue(front))

    def _open_or_queue(self) -> None:
        self.attempt.close()
        placement = self._ask()
        if placement is None:
            self._queue(front=True)
        else:
            self._open(placement)

    def _settle(self) -> None:
        if self.attempt.is_settled:
            self._exclusions.placed()

    def _start_proven(self) -> None:
        if self.attempt.start_if_proven(self.emitted):
            self._move(RequestEvent.DECODE)

    def _compute_on_seat(self, why: Why) -> None:
        if self.attempt.compute_on_seat(why, self.emitted):
            self._move(RequestEvent.DECODE)

    # Refusals and failures

    def _lease_refused(self, error: DiptychError) -> None:
        assert self.attempt.lease is not None
        self._exclusions.refuse(self.attempt.lease.worker, error)
        self.attempt.drop_lease()
        seat = self.attempt.seat
        if seat is not None:
            other = self._ask(on_decode=seat.worker)
            if isinstance(other, Paired):
                self.attempt.open_lease(other.prefill)
                return
            if isinstance(other, DecodeOnly):
                self._compute_on_seat(other.why)
                return
        self._open_or_queue()

    def _seat_refused(self, seat: Seat, error: DiptychError) -> None:
        self._exclusions.refuse(seat.worker, error)
        lease = self.attempt.lease
        if lease is not None:
            other = self._ask(on_prefill=lease.worker)
            if isinstance(other, Paired):
                self.attempt.reserve(other.decode)
                return
        self._open_or_queue()

    def _without_lease(
        self, error: DiptychError, *, blame: WorkerId | None, is_counted: bool = False
    ) -> None:
        """The lease is gone before the seat could run: prefill elsewhere, else compute here.

        ``is_counted``: its reader noticed first, and an attempt was spent on that.
        """
        if blame is not None:
            self._exclusions.failed.add(blame.incarnation)
        if self._finish_if_complete() or not (is_counted or self._spend_attempt(error)):
            return
        seat = self.attempt.seat
        if seat is None:
            self._retrying = error
            self._open_or_queue()
            return
        if seat.state is SeatState.PROVEN and self._around.allow_recompute:
            # Only the token is missing, not the KV.
            self._do(actions.Retried(Retry.RECOMPUTE, error))
            self._compute_on_seat(Why.RECOMPUTE)
            return
        elsewhere = self._ask()
        if elsewhere is None or isinstance(elsewhere, DecodeOnly):
            here = self._ask(on_decode=seat.worker)
            if isinstance(here, DecodeOnly):
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
        lease = self.attempt.lease
        if lease is not None:
            other = self._ask(on_prefill=lease.worker)
            if isinstance(other, Paired):
                self._do(actions.Retried(Retry.REBIND, error))
                self.attempt.reserve(other.decode)
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
            self._fail(refusal or faults.no_worker())
        elif now >= self._exclusions.not_before_s:
            self._do(actions.Pump())

    def _tick_halves(self, now: float) -> None:
        lease = self.attempt.lease
        if lease is not None and lease.state is LeaseState.OPENING and now >= lease.due_s:
            self._do(actions.CloseLease(lease.sequence_id))
            self._lease_refused(faults.no_answer("prefill", lease.worker))
        seat = self.attempt.seat
        if seat is not None and seat.state is SeatState.RESERVING and now >= seat.due_s:
            self.attempt.close_seat()
            self._seat_refused(seat, faults.no_answer("decode", seat.worker))

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
            self._do(actions.Dequeue(is_placed=False))
        self.attempt.close()
        self._move(RequestEvent.END)

    # Small change

    def _book_cached(self, num_tokens: int) -> None:
        num_tokens = min(num_tokens, len(self._shape.prompt_ids))
        known = self.num_cached_tokens
        self.num_cached_tokens = num_tokens if known is None else min(known, num_tokens)

    def _move(self, event: RequestEvent) -> None:
        self.state = REQUEST_TRANSITIONS.after(self.state, event) or self.state

    def _do(self, action: Action) -> None:
        self._actions.append(action)
