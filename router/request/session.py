"""One request on workers: runs its state machine and hands out what it emits.

Thin shell: everything that happens becomes one event for the machine, whose actions
are executed at once, without awaiting. Only whoever takes the output waits, so a slow
client delays nobody else.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from dataclasses import replace

from diptych.errors import (
    DeadlineExceededError,
    DiptychError,
    InvalidRequestError,
    LogitsError,
    NoWorkerError,
    SlowClientError,
)
from diptych.finish_reason import FinishReason
from diptych.token_logprobs import PromptLogprobs
from diptych.v1 import decode_pb2, prefill_pb2
from router.generation.answer import ChoiceFinished, Delta, Outlet, Timing, Usage
from router.placement.spare import BATCH_SPARE_ONLY_S
from router.placement.views import WorkerId
from router.request import actions, events, worker_messages
from router.request.actions import Action
from router.request.deps import RequestDeps
from router.request.dispatch import Dispatch
from router.request.events import Event
from router.request.machine import RequestMachine
from router.request.observer import Observer
from router.request.request_state import RequestState
from router.request.resolved import ResolvedRequest
from router.request.response_builder import ResponseBuilder
from router.request.services import Services
from router.request.terms import Terms
from router.untaken import Taker

logger = logging.getLogger(__name__)

# Wherever a request had been placed, it would have ended so: of placement that says nothing.
_NOT_BY_PLACEMENT = (DeadlineExceededError, InvalidRequestError, LogitsError, SlowClientError)


class Session:
    """Drives one request from its placement on. Owned by the task that takes its output.

    ``start``, then ``next_event`` until it has none, then ``close``. All other methods
    are synchronous and called on the event loop, also while the client takes its time.

    It and what it owns have slots, as each token looks at all of it: that is memory of many
    sessions in turn, little of which is in a cache (1.6 of 14 µs).
    """

    __slots__ = (
        "_answer",
        "_bug",
        "_config",
        "_dispatch",
        "_error",
        "_finish_reason",
        "_finished",
        "_is_ended",
        "_is_first",
        "_loop",
        "_machine",
        "_num_counted",
        "_num_taken",
        "_observer",
        "_on_failed",
        "_on_output",
        "_outlet",
        "_request",
        "_request_id",
        "_services",
        "_taker",
        "_terms",
        "_timer",
        "_timer_at_s",
        "_waiter",
    )

    def __init__(
        self,
        request_id: str,
        request: ResolvedRequest,
        answer: ResponseBuilder,
        observer: Observer,
        services: Services,
        *,
        deadline_s: float | None,
        on_failed: Callable[[], None],
        on_output: Callable[[], None] = lambda: None,
        beside: WorkerId | None = None,
        outlet: Outlet | None = None,
        taker: Taker | None = None,
    ) -> None:
        """``on_failed`` is called when there will be no more output, ``next_event`` says why.

        ``on_output`` is called when ``poll`` may have more than before, or it runs. ``beside``: a
        decode worker that has the prompt, on which it is placed if that is possible. ``outlet``:
        where deltas behind the first may be written while ``next_event`` waits, which does not
        have them then. ``taker`` counts what waits for the client, where that is much.
        """
        self._request_id = request_id
        self._request = request
        self._answer = answer
        self._observer = observer
        self._services = services
        self._config = services.config
        self._loop = asyncio.get_running_loop()
        self._terms = Terms(request, services)
        self._dispatch = Dispatch(request_id, request, self._terms, services, observer, beside)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s: float | None = None
        self._waiter: asyncio.Future[None] | None = None  # of who asked for more output
        self._on_failed = on_failed
        self._on_output = on_output
        self._outlet = outlet
        self._taker = taker
        self._num_counted = 0  # bytes of it
        self._num_taken: int | None = None  # tokens of the delta that is being written
        self._finish_reason: FinishReason | None = None
        self._is_ended = False  # the rest of the text was taken
        self._is_first = True  # of the choices of its request
        self._finished: ChoiceFinished | None = None  # yet to be taken after it
        self._error: DiptychError | None = None
        self._bug: Exception | None = None
        deps = RequestDeps(
            clock=self._loop.time,
            place=self._dispatch.place,
            foresee=self._dispatch.foresee if self._config.refuses_unreachable else None,
            has_workers=lambda: services.cluster.is_ready,
            may_come=self._dispatch.may_come,
            queue_ends_in_s=services.room.ends_in_s,
            new_sequence_id=lambda: next(services.sequence_ids),
            new_ticket=lambda: secrets.token_bytes(16),
            timers=self._config.timers,
            max_attempts=self._config.max_attempts,
            draw=random.random,
            block_size=services.cluster.block_size,
            allow_recompute=self._config.allow_recompute,
            model_digest=lambda: services.cluster.model_digest,
            spare_only_s=BATCH_SPARE_ONLY_S if request.claim.is_batch else 0.0,
        )
        self._machine = RequestMachine(
            request.shape,
            deps,
            answer.sink,
            deadline_s=deadline_s,
            resumed=request.emitted_token_ids,
            model_digest=request.model_digest,
            prompt_sink=answer.prompt_sink,
            first_token_due_s=request.claim.first_token_due_s,
        )

    def start(self, *, front: bool = False) -> None:
        """Ask for workers; ``front``: another choice has some, so it is never turned away.

        Nor is it a request to placement, which foretells nothing of it: the first token that
        was wanted by then was the other choice's.
        """
        self._is_first = not front
        self._handle(events.Begin(front))

    def keep_model(self) -> str:
        """See :meth:`router.request.placing.Placing.keep_model`."""
        return self._machine.keep_model()

    async def next_event(self) -> PromptLogprobs | Delta | ChoiceFinished | None:
        """Wait for more output; asking for it says that what came before was written.

        What is told of the prompt comes before the first token, and with it. None after the
        ChoiceFinished. Raises DiptychError.
        """
        while (event := self.poll()) is None and self._finish_reason is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        return event

    def poll(self) -> PromptLogprobs | Delta | ChoiceFinished | None:
        """As ``next_event``, without waiting: None, too, while there is no more yet."""
        self._book_written()
        if num_waited := self._num_counted:
            self._uncount()
        if self._bug is not None:
            raise self._bug
        if self._error is not None:
            raise self._error
        if not self._answer.is_due and self._finish_reason is None:
            return None
        told = self._answer.take_prompt()
        if told is not None:
            if self._taker is not None:
                self._count(self._answer.num_unsent_bytes)
            return told
        delta = self._answer.take()
        if delta is not None:
            if num_waited:
                self._count(num_waited)  # until it is written, by the next call
            self._num_taken = len(delta.token_ids)
            return delta
        assert self._finish_reason is not None, "nothing is due"
        return self._next_of_end(self._finish_reason)

    def close(self) -> None:
        """Free everything at once, however far it came. Idempotent."""
        self._handle(events.Cancelled())
        if self._timer is not None:
            self._timer.cancel()
        self._uncount()
        self._leave()
        # What leads back here, as an error's traceback does: else only the collector frees it all.
        self._on_failed = self._on_output = lambda: None
        self._error = self._bug = None

    def give_up(self, why: str) -> None:
        """The client takes nothing: free everything; ``next_event`` raises SlowClientError."""
        self._handle(events.ClientTooSlow(why))
        if self._error is None:  # the output was whole, but did not reach the client
            self._error = SlowClientError(why)
            self._on_failed()

    @property
    def usage(self) -> Usage:
        """The tokens that the request has used up to now."""
        return Usage(
            num_prompt_tokens=len(self._request.shape.prompt_ids),
            num_output_tokens=self._answer.num_output_tokens,
            num_cached_tokens=self._machine.attempt.num_cached_tokens or 0,
            num_resumed_tokens=len(self._request.emitted_token_ids),
        )

    @property
    def timing(self) -> Timing:
        """What the request has waited for up to now, and how its KV came."""
        machine, attempt = self._machine, self._machine.attempt
        told = attempt.transfer
        return replace(
            self._answer.timing(),
            kv_path=attempt.kv_path,
            num_attempts=machine.num_attempts,
            num_preemptions=machine.num_preemptions,
            num_computed_prompt_tokens=machine.num_computed_prompt_tokens,
            prefill_worker=attempt.prefill_worker,
            decode_worker=attempt.decode_worker,
            transfer=None if told is None else worker_messages.transfer(told),
        )

    @property
    def finish_reason(self) -> FinishReason | None:
        """None unless it finished."""
        return self._finish_reason

    @property
    def is_under_way(self) -> bool:
        """Whether its prompt is where it is needed."""
        return self._machine.state is RequestState.DECODING or self._finish_reason is not None

    @property
    def decode_worker(self) -> WorkerId | None:
        """The one that has its blocks now; None: none has."""
        held = self._machine.attempt.reservation
        return None if held is None else held.worker

    # What the queue says

    def offer(self, *, room_made: bool) -> None:
        """See :class:`router.placement.waiting_room.Waiter`."""
        self._handle(events.Offered(room_made))
        if self._dispatch.is_held:
            self._services.room.hold(self)

    def may_be_local(self) -> bool:
        """See :class:`router.placement.waiting_room.Waiter`."""
        return self._dispatch.may_be_local()

    def may_come(self) -> bool:
        """See :class:`router.placement.waiting_room.Waiter`."""
        return self._dispatch.may_come()

    def turn_away(self, error: DiptychError) -> None:
        """See :class:`router.placement.waiting_room.Waiter`."""
        self._handle(events.TurnedAway(error))

    # What the workers say

    def on_prefill_event(self, sequence_id: int, event: prefill_pb2.PrefillEvent) -> None:
        """See :class:`router.cluster.prefill_link.LeaseListener`."""
        self._handle(worker_messages.prefill_event(sequence_id, event))

    def on_lease_ended(self, sequence_id: int, error: DiptychError) -> None:
        """See :class:`router.cluster.prefill_link.LeaseListener`."""
        self._handle(events.LeaseEnded(sequence_id, error))

    def on_tokens(self, tokens: decode_pb2.SequenceTokens) -> None:
        """See :class:`router.cluster.decode_link.ReservationListener`."""
        self._handle(worker_messages.tokens(tokens))

    def on_decode_event(self, event: decode_pb2.DecodeEvent) -> None:
        """See :class:`router.cluster.decode_link.ReservationListener`."""
        self._handle(worker_messages.decode_event(event))

    def on_reservation_lost(self, sequence_id: int, message: str) -> None:
        """See :class:`router.cluster.decode_link.ReservationListener`."""
        self._handle(events.ReservationLost(sequence_id, message))

    # Shell of the machine

    def _handle(self, event: Event | None) -> None:
        """Let the machine handle one event and do what it says; a bug ends this request only.

        None is nothing of interest. Whatever does not end in an action costs little:
        almost all events are tokens, which only fill the answer.
        """
        if event is None or self._bug is not None:
            return
        try:
            self._drive(event)
            if self._answer.is_behind:
                self._on_behind()
            if self._machine.wake_at_s is not self._timer_at_s:
                self._arm_timer()
            while self._answer.is_due:
                if not self._write_at_once():
                    self._wake()
                    break
        except Exception as bug:  # noqa: BLE001 - the boundary between requests
            self._crash(bug)

    def _on_behind(self) -> None:
        answer = self._answer
        if answer.is_overfull:
            unread = self._config.client_buffer_messages
            self._drive(events.ClientTooSlow(f"the client left {unread} responses unread"))
        elif self._finish_reason is None and self._error is None:
            self._count(answer.tell_behind())

    def _count(self, num_bytes: int) -> None:
        """So many wait for the client; those that were counted before are among them."""
        if self._taker is not None and num_bytes > self._num_counted:
            more, self._num_counted = num_bytes - self._num_counted, num_bytes
            self._taker.wait(more)

    def _uncount(self) -> None:
        if self._taker is not None and self._num_counted:
            num_bytes, self._num_counted = self._num_counted, 0
            self._taker.take(num_bytes)

    def _drive(self, event: Event) -> None:
        """Hand the machine the event; then those that its actions cause at once."""
        if not isinstance(event, events.Tokens) or self._dispatch.awaits_tokens:
            self._dispatch.heard(event)
        wanted = self._machine.handle(event)
        if not wanted:
            return
        caused = []
        for action in wanted:
            failed = self._execute(action)
            if failed is not None:
                caused.append(failed)
        for failed in caused:
            self._drive(failed)

    def _crash(self, bug: Exception) -> None:
        if self._bug is None:
            logger.error("request crashed", exc_info=bug, extra={"request": self._request_id})
            self._bug = bug
        self._dispatch.close_all()
        self._leave()
        self._on_failed()
        self._wake()

    def _execute(self, action: Action) -> Event | None:
        """Do it; the event, if it could not be done because somebody is gone."""
        match action:
            case actions.OpenLease():
                self._answer.placed()
                emitted, untold = self._machine.emitted, self._machine.untold
                if not self._dispatch.open_lease(action, emitted, self, untold):
                    return events.LeaseEnded(action.sequence_id, NoWorkerError("it is gone"))
            case actions.Grant():
                self._dispatch.grant(action)
            case actions.CloseLease():
                self._dispatch.close_lease(action.sequence_id)
            case actions.Reserve():
                self._answer.placed()
                if not self._dispatch.reserve(action, self._machine.emitted, self):
                    return events.ReservationLost(action.sequence_id, "it is gone")
            case actions.Bind():
                self._dispatch.bind(action)
            case actions.Start():
                self._dispatch.start(action)
                self._on_output()
            case actions.Release():
                self._dispatch.release(action.sequence_id)
            case actions.RunLocally():
                if not self._dispatch.is_beside(self.decode_worker, action.why):
                    self._observer.ran_locally(action.why)
            case actions.Retried():
                self._observer.retried(action.retry, action.cause, self._answer.moments.awaited)
            case actions.Enqueue():
                turn = self._dispatch.turn()
                self._dispatch.waits(turn)
                self._services.room.enter(self, front=action.front, turn=turn)
            case actions.Dequeue():
                room = self._services.room
                (room.take if action.is_placed else room.stop_waiting)(self)
                if action.is_placed:
                    self._terms.charged()
            case actions.Settled():
                self._services.room.settled(self)
            case actions.Pump():
                self._services.room.pump_soon()
            case actions.Finish():
                self._finish_reason = FinishReason(action.reason)
                self._terms.finished(self.usage, self._finish_reason)
                if self._is_first:
                    at = self._answer.moments
                    self._terms.ended(self.usage, at.first_token_s, at.last_token_s or 0.0)
                self._end()
            case actions.Fail():
                self._error = action.error
                if self._is_first and not isinstance(action.error, _NOT_BY_PLACEMENT):
                    self._terms.ended(self.usage)
                self._observer.failed(action.error)
                self._on_failed()
                self._end()
        return None

    def _leave(self) -> None:
        """Idempotent: what it took counts as it is the first time."""
        was_taken = self._machine.attempt.num_cached_tokens is not None
        self._services.room.leave(self, self._terms.left(self.usage, was_taken=was_taken))

    def _end(self) -> None:
        self._leave()
        self._wake()

    def _arm_timer(self) -> None:
        wake_at_s = self._machine.wake_at_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at_s = wake_at_s
        if wake_at_s is not None:
            self._timer = self._loop.call_at(wake_at_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at_s = None
        self._handle(events.Tick())

    @property
    def model_digest(self) -> str:
        """Of the weights that the output is of; empty: unknown."""
        return self._machine.model_digest

    # Output

    def _wake(self) -> None:
        """Whoever waits for output looks again; an asyncio.Event does more for each token."""
        self._on_output()
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: who waited was cancelled
            waiter.set_result(None)

    def _write_at_once(self) -> bool:
        """Write what is due past the task that takes the output and waits; False: it is to wake."""
        outlet, waiter = self._outlet, self._waiter
        if outlet is None or waiter is None or waiter.done():
            return False
        if self._answer.moments.first_written_s is None or not outlet.is_open:
            return False
        delta = self._answer.take()
        assert delta is not None, "nothing is due"
        outlet.write(delta)
        self._num_taken = len(delta.token_ids)
        self._book_written()
        return True

    def _book_written(self) -> None:
        num_tokens, self._num_taken = self._num_taken, None
        if num_tokens is not None:
            self._observer.written(num_tokens, self._answer.written(num_tokens))

    def _next_of_end(self, reason: FinishReason) -> Delta | ChoiceFinished | None:
        if self._is_ended:
            finished, self._finished = self._finished, None
            return finished
        self._is_ended = True
        rest, finished = self._answer.finish(reason)
        self._finish_reason = finished.reason
        if rest is None:
            return finished
        self._finished = finished
        return rest
