"""One request from admission to its end, over as many attempts as it takes. Pure.

A synchronous state machine: what happens goes in as :mod:`router.request.events`, what
to do comes out as :mod:`router.request.actions`, in order. It alone says which tokens
were emitted, and accepts a token only at the position it expects. No asyncio, no gRPC:
clock, ids and placement are passed in, and so are placements.
Owned by one :class:`router.request.session.Session` on the event loop.

Invariants: exactly one Finish or Fail (none after Cancelled), last; each lease and
reservation that was opened is closed by its worker or by us before that; output
positions have neither gaps nor repeats.
"""

from collections.abc import Sequence
from typing import Final

from diptych.errors import DeadlineExceededError, DiptychError, SlowClientError
from router.placement.placement import Placement
from router.request import actions, events
from router.request.actions import Action
from router.request.attempt import Attempt
from router.request.decode_reservation import ReservationState
from router.request.deps import RequestDeps
from router.request.emitted_tokens import EmittedTokens, RequestShape, TokenSink
from router.request.events import Event
from router.request.fail_over import FailOver, GiveUp, Met, Outcome
from router.request.placing import Placing
from router.request.prefill_lease import PrefillLeaseEvent
from router.request.prompt_told import PromptTold, ToldSink, Wanted
from router.request.request_state import REQUEST_TRANSITIONS, RequestEvent, RequestState
from router.request.retry_state import RetryState
from router.request.stall_watch import StallWatch

_UNTOLD: Final = "it did not tell a token's log probability"


class RequestMachine:
    """See the module's text. ``handle`` is its only input."""

    __slots__ = (
        "_actions",
        "_deadline_s",
        "_deps",
        "_ended_due_s",
        "_fail_over",
        "_is_in_front",
        "_output",
        "_placing",
        "_retry",
        "_stall_watch",
        "_told",
        "attempt",
        "num_computed_prompt_tokens",
        "num_preemptions",
        "state",
        "wake_at_s",
    )

    def __init__(
        self,
        shape: RequestShape,
        deps: RequestDeps,
        sink: TokenSink,
        *,
        deadline_s: float | None = None,
        resumed: Sequence[int] = (),
        prompt_sink: ToldSink = lambda part: None,
        first_token_due_s: float | None = None,
        model_digest: str = "",
    ) -> None:
        """``sink`` gets the tokens as they are emitted; ``deadline_s`` is a moment of the clock,
        and so is ``first_token_due_s``, by which the first token is wanted.

        ``prompt_sink`` gets what was wanted of the prompt's own tokens, all of it before these.

        ``resumed`` are output tokens that the client has already: they go through
        ``sink`` at once and are forced inputs from the first attempt on; ``model_digest`` is of
        the weights that made them, or tokens of other choices, if that is known.
        """
        self.state = RequestState.NEW
        self.wake_at_s: float | None = None  # when a Tick is due next; None: never
        self.num_preemptions = 0
        self.num_computed_prompt_tokens: int | None = None  # by decode workers; None: none told
        self._deps = deps
        self._deadline_s = deadline_s
        self._actions: list[Action] = []
        self._output = EmittedTokens(shape, sink)
        self._output.accept(len(shape.prompt_ids), resumed, ())
        self._ended_due_s: float | None = None  # of the worker's last word, once all tokens came
        self._is_in_front = False  # it was queued so, and what it asks for is not granted yet
        self._stall_watch = StallWatch(deps.timers.sequence_progress_s)
        self._retry = RetryState(deps.timers, deps.max_attempts, deps.draw)
        self._told = PromptTold(shape.told, prompt_sink)
        self._placing = Placing(
            deps, self._retry, self._output, self._told, first_token_due_s, model_digest
        )
        # What is held now; read only, for others.
        do = self._actions.append  # a method of ours would lead back to whom it is given
        self.attempt = Attempt(len(shape.prompt_ids), deps, do)
        self._fail_over = FailOver(deps, self.attempt, self._retry, self._placing, self.emitted, do)

    @property
    def num_attempts(self) -> int:
        """The first, and those that replaced failed ones."""
        return self._retry.num_attempts

    @property
    def emitted(self) -> Sequence[int]:
        """The output tokens so far; grows with them."""
        return self._output.token_ids

    @property
    def model_digest(self) -> str:
        """Of the weights that the output is of; empty: unknown."""
        return self._placing.model_digest

    def keep_model(self) -> str:
        """See :meth:`router.request.placing.Placing.keep_model`."""
        return self._placing.keep_model()

    @property
    def untold(self) -> Wanted | None:
        """What is still wanted of the prompt; None: nothing."""
        return self._told.missing

    def handle(self, event: Event) -> Sequence[Action]:
        """What to do now that ``event`` has happened, in order."""
        is_done = self.state is RequestState.DONE
        if is_done or (isinstance(event, events.Tokens) and self._took_next(event)):
            return ()
        self._handle(event)
        if self.attempt.is_settled:
            self._retry.placed()
            self._placing.settled()
            if self._is_in_front:
                self._is_in_front = False
                self._actions.append(actions.Settled())
        self.wake_at_s = self._next_wake_s()
        taken = self._actions.copy()
        self._actions.clear()
        return taken

    def _took_next(self, event: events.Tokens) -> bool:
        """The short way of almost all events: tokens are emitted and nothing follows from it."""
        held = self.attempt.reservation
        return (
            held is not None
            and held.sequence_id == event.sequence_id
            and held.state is ReservationState.RUNNING
            and self._output.is_told(len(event.token_ids), event.logprobs)
            and self._output.accept(event.position, event.token_ids, event.margins, event.logprobs)
            and not self._output.complete_reason
        )

    def _handle(self, event: Event) -> None:
        match event:
            case events.Begin():
                self._begin(front=event.front)
            case events.Offered():
                self._on_offered(event)
            case events.TurnedAway():
                self._fail(event.error)
            case events.Tick():
                self._on_tick(self._deps.clock())
            case events.Cancelled():
                self._close_all()
            case events.ClientTooSlow():
                self._fail(SlowClientError(event.why))
            case events.Accepted():
                self.attempt.accepted(event)
            case events.FirstToken():
                self._on_first_token(event)
            case events.PromptTold():
                self._on_prompt_told(event)
            case events.Granted():
                self.attempt.granted(event)
            case events.LeaseEnded():
                self._follow(self._fail_over.lease_ended(event))
            case events.Reserved():
                self._on_reserved(event)
            case events.Proven():
                if self.attempt.proven(event):
                    self._start_proven()
            case events.PullFailed():
                self._follow(self._fail_over.pull_failed(event))
            case events.Tokens():
                self._on_tokens(event)
            case events.Ended() | events.ReservationLost():
                self._on_reservation_over(event)

    def _begin(self, *, front: bool) -> None:
        whole = self._output.complete_reason  # what is resumed may lack nothing
        if front:
            self._placing.keep()
        error = None if whole else self._placing.error_before_asking(is_new=True)
        if whole:
            self._finish(whole)
        elif error is not None:
            self._fail(error)
        else:
            self._queue(front=front)

    # The queue and the clock

    def _on_offered(self, event: events.Offered) -> None:
        if self.state is RequestState.QUEUED:
            placement = self._placing.when_offered(room_made=event.room_made)
            if isinstance(placement, DiptychError):
                self._fail(placement)
            elif placement is not None:
                self._actions.append(actions.Dequeue(is_placed=True))
                self._open(placement)

    def _on_tick(self, now: float) -> None:
        is_late = self._deadline_s is not None and now >= self._deadline_s
        if self._ended_due_s is not None and (is_late or now >= self._ended_due_s):
            self._finish(self._output.complete_reason)
        elif is_late:
            self._fail(DeadlineExceededError("the request's deadline passed"))
        elif self.state is RequestState.QUEUED:
            error = self._placing.error_while_waiting(now)
            if error is not None:
                self._fail(error)
            elif now >= self._retry.not_before_s:
                self._actions.append(actions.Pump())
        elif self._stall_watch.due_s is not None and now >= self._stall_watch.due_s:
            if self._stall_watch.is_stuck(len(self.emitted), now):
                self._on_stall()
        else:
            self._follow(self._fail_over.lease_silent(now))
            self._follow(self._fail_over.reservation_silent(now))
            self._follow(self._fail_over.grant_silent(now))

    def _on_stall(self) -> None:
        """No token came within its bound. Prompts take what they take, behind others, too."""
        held = self.attempt.reservation
        if (
            held is not None
            and held.state is ReservationState.RUNNING
            and (self._deps.sits_out or held.is_computing(len(self.emitted)))
        ):
            self._watch_stall()
        else:
            self._follow(self._fail_over.reservation_broken("the sequence got no token"))

    def _next_wake_s(self) -> float | None:
        if self.state is RequestState.DONE:
            return None
        is_queued = self.state is RequestState.QUEUED
        moments = (
            self._deadline_s,
            self._ended_due_s,
            self._stall_watch.due_s,
            self.attempt.due_s,
            self._retry.due_s(self._deps.clock()) if is_queued else None,
            self._placing.judge_at_s if is_queued else None,
            self._placing.ask_again_at_s if is_queued else None,
        )
        return min((moment for moment in moments if moment is not None), default=None)

    # What workers say

    def _on_prompt_told(self, event: events.PromptTold) -> None:
        lease = self.attempt.lease_of(event.sequence_id)
        if lease is not None and not self._told.accept(event.part):
            self._follow(
                self._fail_over.lease_broken("what it told of the prompt is not what comes next")
            )

    def _on_first_token(self, event: events.FirstToken) -> None:
        lease = self.attempt.lease_of(event.sequence_id)
        if lease is None or not lease.move(PrefillLeaseEvent.FIRST_TOKEN):
            return
        if self._told.missing is not None:
            self._follow(self._fail_over.lease_broken("it did not tell all of the prompt"))
            return
        margins = () if event.margin is None else (event.margin,)
        logprobs = () if event.logprobs is None else (event.logprobs,)
        if not self._output.is_told(1, logprobs):
            self._follow(self._fail_over.lease_broken(_UNTOLD))
        elif not self._output.accept(event.position, (event.token_id,), margins, logprobs):
            self._follow(self._fail_over.lease_broken("it skipped a token"))
        elif self._output.complete_reason or event.finish_reason:
            self._finish(self._output.complete_reason or event.finish_reason)
        elif self.attempt.reservation is None:
            self._follow(self._fail_over.lease_broken("it did not end what it had alone"))
        else:
            self.attempt.emitted()
            self._watch_stall()
            self._start_proven()

    def _on_reserved(self, event: events.Reserved) -> None:
        held = self.attempt.reserved(event)
        if held is None:
            return
        if held.lacks_more_than_assumed:
            self._follow(self._fail_over.less_cached(held))
            return
        if held.local is None:
            self.attempt.grant_if_held()
            self._start_proven()
        elif self.attempt.compute_on_reservation(held.local, self.emitted):
            self._runs()

    def _on_tokens(self, event: events.Tokens) -> None:
        """What follows from tokens that were not simply the next of several."""
        held = self.attempt.reservation_of(event.sequence_id)
        if held is None or held.state is not ReservationState.RUNNING:
            return
        if not self._output.is_told(len(event.token_ids), event.logprobs):
            self._follow(self._fail_over.reservation_broken(_UNTOLD))
        elif self._output.is_ahead(event.position):
            self._follow(self._fail_over.reservation_broken("it skipped a token"))
        elif self._output.stop_matched:
            self._finish(self._output.complete_reason)
        else:  # complete: its Ended comes next
            self._ended_due_s = self._deps.clock() + self._deps.timers.accept_s

    def _on_reservation_over(self, event: events.Ended | events.ReservationLost) -> None:
        held = self.attempt.reservation_of(event.sequence_id)
        if held is None:
            return
        reason = self._output.complete_reason
        if isinstance(event, events.Ended):
            self.num_preemptions += event.num_preemptions
            if event.num_computed_prompt_tokens is not None:
                before = self.num_computed_prompt_tokens or 0
                self.num_computed_prompt_tokens = before + event.num_computed_prompt_tokens
            if held.state is ReservationState.RUNNING:
                reason = reason or event.finish_reason
        if reason:
            self.attempt.drop_reservation()
            self._finish(reason)
        else:
            self._follow(self._fail_over.reservation_over(event))

    def _start_proven(self) -> None:
        if self.attempt.start_if_proven(self.emitted):
            self._runs()

    def _runs(self) -> None:
        self._move(RequestEvent.DECODE)
        self._watch_stall()

    def _watch_stall(self) -> None:
        """The next token is to come, from whoever decodes, within its bound from now on."""
        self._stall_watch.begin(len(self.emitted), self._deps.clock())

    # Placing

    def _open(self, placement: Placement) -> None:
        """Open a whole new placement; nothing is held."""
        self._move(RequestEvent.PLACE)
        self._fail_over.placed(placement)
        self.attempt.open(placement, len(self.emitted))

    def _queue(self, *, front: bool) -> None:
        """Wait for a placement; nothing is held."""
        self._retry.wait(self._deps.clock())
        self._is_in_front |= front
        self._move(RequestEvent.QUEUE)
        self._actions.append(actions.Enqueue(front))

    def _follow(self, outcome: Met | None) -> None:
        """Do what meeting a failure left to do."""
        match outcome:
            case None:
                pass
            case Outcome.GOES_ON:
                if self._stall_watch.due_s is not None:
                    self._watch_stall()
            case Outcome.RUNS:
                self._runs()
            case Outcome.START_OVER:
                self._start_over()
            case GiveUp():
                self._fail(outcome.error)

    def _start_over(self) -> None:
        self.attempt.close()
        self._stall_watch.end()
        error = self._placing.error_before_asking(is_new=False)
        if error is not None:
            self._fail(error)
            return
        placement = self._placing.ask()
        if placement is None:
            self._queue(front=True)
        else:
            self._open(placement)

    # Endings

    def _finish(self, reason: int) -> None:
        self._close_all()
        self._actions.append(actions.Finish(reason))

    def _fail(self, error: DiptychError) -> None:
        self._close_all()
        self._actions.append(actions.Fail(error))

    def _close_all(self) -> None:
        if self.state is RequestState.QUEUED:
            self._actions.append(actions.Dequeue(is_placed=False))
        self.attempt.close()
        self._move(RequestEvent.END)

    def _move(self, event: RequestEvent) -> None:
        self.state = REQUEST_TRANSITIONS.after(self.state, event) or self.state
