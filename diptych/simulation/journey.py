"""One request from its arrival to its end through one simulated router. Pure.

The states are the router's own. It waits, is placed, and asks for all that the placement names;
whoever refuses is not asked again until it had to wait. Simpler than the router's: on a refusal
all that was asked for is given back.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from diptych.errors import DeadlineUnreachableError, DiptychError
from diptych.request_class import RequestClass
from diptych.simulation.attempt import Attempt, Request
from diptych.simulation.outcome import Outcome
from diptych.simulation.router import SimulatedRouter
from diptych.timers import Timers
from router.placement.answer_length import AnswerLength
from router.placement.eligible import ordered
from router.placement.fair_queue import Turn
from router.placement.placement import DecodeOnly, Forecast, Paired, Placement
from router.placement.query import EndedRequest, Query
from router.placement.spare import BATCH_SPARE_ONLY_S, seen_by, will_yield
from router.placement.views import WorkerId
from router.request import worker_errors
from router.request.placing import ASK_AGAIN_S
from router.request.request_state import REQUEST_TRANSITIONS, RequestEvent, RequestState
from router.request.retry_state import RetryState

_TIMERS = Timers()
UNFINISHED = "UNFINISHED"  # why it failed: nobody waited for it any more
_NEVER = Outcome(None, None)


class Foretold(NamedTuple):
    """The time to a first token, from its placement on, s."""

    expected_s: float
    took_s: float

    @property
    def error_ratio(self) -> float:
        """Of what it took; inf where that was nothing, and nothing was not expected."""
        off_s = abs(self.expected_s - self.took_s)
        return off_s / self.took_s if self.took_s else math.inf if off_s else 0.0


class Journey:
    """Implements the waiting room's Waiter and the attempt's Owner."""

    def __init__(
        self, router: SimulatedRouter, request: Request, on_end: Callable[["Journey"], None]
    ) -> None:
        """``on_end`` is told once."""
        self.request = request  # without its prompt once it has ended
        self.num_prompt_tokens = len(request.prompt_ids)
        self.state = RequestState.NEW
        self.outcome = _NEVER
        self.failure = ""  # the reason, if it was refused
        self.charged_s = 0.0  # of engines, that its turn was expected to take
        self.first_token: Foretold | None = None  # as its placement foretold; None: nothing
        self._router = router
        self._agenda = router.agenda
        self._on_end = on_end
        self._retry = RetryState(_TIMERS, max_attempts=1)
        self._attempt: Attempt | None = None
        self._foretold: tuple[Forecast, float] | None = None  # and when it was placed
        self._first_s = 0.0
        self._was_placed = False  # then it is refused no more

    def arrive(self) -> None:
        """Ask for a place; whoever finds none is judged by what waits before it.

        And once more when its first token is due, however long it was not asked.
        """
        snapshot, room, turn = self._router.snapshot(), self._router.room, self._turn()
        has_room = room.has_slots and snapshot.has_room_for((turn.asked,))
        num_engines = len(snapshot.prefill) or len(snapshot.decode)
        if not has_room and self._is_lost(room.wait_s(turn, num_engines)):
            self._end(DeadlineUnreachableError.reason)
            return
        self._queue(front=False)
        within_s = self.request.objectives.ttft_s
        if within_s is not None:
            self._agenda.at(self.request.due_s + within_s, self._judge)

    def cut_off(self) -> None:
        """Nobody waits for it any more."""
        if self.state is not RequestState.DONE:
            self._end(UNFINISHED)

    # The waiting room

    def offer(self, *, room_made: bool) -> None:
        """See :class:`router.placement.waiting_room.Waiter`."""
        if not room_made and self._agenda.now_s < self._retry.not_before_s:
            return
        placement = self._place()
        if placement is not None:
            self._router.room.take(self)
            self._open(placement)
        elif self._is_lost(0.0):
            self._end(DeadlineUnreachableError.reason)
        elif self._router.policy.has_declined:
            self._router.room.hold(self)
            self._agenda.after(ASK_AGAIN_S, self._router.room.pump_soon)

    def turn_away(self, error: DiptychError) -> None:
        """See :class:`router.placement.waiting_room.Waiter`."""
        self._end(error.reason)

    # The attempt

    def refused(self, worker: WorkerId, error: DiptychError) -> None:
        """See :class:`diptych.simulation.attempt.Owner`."""
        self._retry.refuse(worker, error)
        self._close()
        placement = self._place()
        if placement is None:
            self._queue(front=True)
        else:
            self._open(placement)

    def settled(self) -> None:
        """See :class:`diptych.simulation.attempt.Owner`."""
        self._router.room.settled(self)

    def drew_first(self) -> None:
        """See :class:`diptych.simulation.attempt.Owner`."""
        self._retry.placed()
        self._first_s = self._agenda.now_s
        if self._foretold is not None:
            forecast, placed_s = self._foretold
            self.first_token = Foretold(forecast.chosen.ttft_s, self._agenda.now_s - placed_s)
            self._router.policy.came_true(forecast, self.first_token.took_s)

    def went_on(self) -> None:
        """See :class:`diptych.simulation.attempt.Owner`."""
        if self._foretold is not None:
            forecast, _ = self._foretold
            self._router.policy.went_on(forecast, self._agenda.now_s - self._first_s)

    def ended(self) -> None:
        """See :class:`diptych.simulation.attempt.Owner`."""
        request = self.request
        self.outcome = Outcome.between(
            request.due_s, self._first_s, self._agenda.now_s, request.num_output_tokens
        )
        if request.num_output_tokens > 1:
            self._router.lengths.learn(
                request.request_class,
                request.tenant,
                request.num_output_tokens,
                is_cut=request.is_cut_off,
            )
        if self._foretold is not None:
            forecast, _ = self._foretold
            self._router.policy.answered(forecast, request.num_output_tokens)
        self._end("")

    def _is_lost(self, wait_s: float) -> bool:
        """Whether it is refused, as its objectives are lost if it may be placed in ``wait_s``."""
        query = self._query()
        if not query.may_refuse:
            return False
        return self._router.policy.foresee(query, self._router.snapshot(), wait_s) is not None

    def _place(self) -> Placement | None:
        snapshot = self._router.snapshot()
        query = self._query()
        placement = self._router.policy.place(query, seen_by(query, snapshot))
        placement = ordered(placement, snapshot)
        if placement is not None and not self._was_placed:
            others_wait = self._router.room.has_others_than(self.request.request_class)
            yields = will_yield(query, others_wait=others_wait)
            self.request = self.request._replace(yields=yields)
            self._was_placed = True
        return placement

    def may_be_local(self) -> bool:
        """See :class:`router.placement.waiting_room.Waiter`."""
        return self._router.policy.may_be_local(self._query(), self._router.snapshot())

    def may_come(self) -> bool:
        """See :class:`router.placement.waiting_room.Waiter`."""
        return self._router.policy.may_come(self._query(), self._router.snapshot())

    def _query(self) -> Query:
        request, wanted = self.request, self.request.objectives
        if wanted.ttft_s is not None:
            left_s = request.due_s + wanted.ttft_s - self._agenda.now_s
            wanted = wanted._replace(ttft_s=left_s, whole_ttft_s=wanted.ttft_s)
        return Query(
            num_tokens=len(request.prompt_ids),
            num_max_tokens=len(request.prompt_ids) + request.num_output_tokens,
            num_output_tokens=self._answer().num_tokens,
            block_keys=request.block_keys,
            block_size=self._router.block_size,
            refused=frozenset(self._retry.refused),
            objectives=wanted,
            payer=request.payer,
            is_batch=request.request_class is RequestClass.BATCH,
            takes_spare_only=self._takes_spare_only(),
            may_refuse=request.may_refuse and not self._was_placed,
            now_s=self._agenda.now_s,
        )

    def _answer(self) -> AnswerLength:
        """As the router learned from others'."""
        request, lengths = self.request, self._router.lengths
        at_most = request.num_output_tokens
        return lengths.to_come(request.request_class, request.tenant, at_most)

    def _takes_spare_only(self) -> bool:
        """As the router's placing."""
        is_batch = self.request.request_class is RequestClass.BATCH
        until_s = self.request.due_s + BATCH_SPARE_ONLY_S
        return is_batch and not self._was_placed and self._agenda.now_s < until_s

    def _open(self, placement: Placement) -> None:
        self._move(RequestEvent.PLACE)
        self.request = self.request._replace(answer=self._answer())
        self._foretold = None
        if isinstance(placement, Paired | DecodeOnly) and placement.forecast is not None:
            self._foretold = placement.forecast, self._agenda.now_s
        self._attempt = Attempt(self._router, self.request, self)
        self._attempt.open(placement)

    def _queue(self, *, front: bool) -> None:
        self._retry.wait(self._agenda.now_s)
        self._move(RequestEvent.QUEUE)
        turn = self._turn()
        self.charged_s = turn.cost_s
        self._router.room.enter(self, front=front, turn=turn)
        self._tick_when_due()
        if self._takes_spare_only():
            due_s = self.request.due_s + BATCH_SPARE_ONLY_S
            self._agenda.at(due_s, self._router.room.pump_soon)

    def _turn(self) -> Turn:
        """It is charged what it will take; a router corrects that when an answer has ended."""
        request, rates = self.request, self._router.rates.of(self._router.snapshot())
        num_blocks = self._router.policy.cache.most_hit_blocks(request.block_keys)
        num_cached = num_blocks * self._router.block_size
        num_prompt, wanted = max(1, len(request.prompt_ids) - num_cached), request.objectives
        return Turn(
            request.request_class,
            request.tenant,
            rates.cost_s(num_prompt, request.num_output_tokens),
            None if wanted.ttft_s is None else request.due_s + wanted.ttft_s,
            prompt_s=rates.cost_s(num_prompt, 0),
            tpot_s=math.inf if wanted.tpot_s is None else wanted.tpot_s,
            may_be_local=self.may_be_local(),
        )

    def _tick_when_due(self) -> None:
        due_s = self._retry.due_s(self._agenda.now_s)
        if due_s is not None:
            self._agenda.at(due_s, self._tick)

    def _tick(self) -> None:
        now_s, until_s = self._agenda.now_s, self._retry.wait_until_s
        if self.state is not RequestState.QUEUED or until_s is None:
            return
        if now_s >= until_s:
            late = worker_errors.queue_timeout(self._router.room.ends_in_s())
            self._end((self._retry.refusal or late).reason)
        else:
            self._router.room.pump_soon()
            self._tick_when_due()

    def _judge(self) -> None:
        if self.state is not RequestState.QUEUED:
            return
        if self._is_lost(0.0):
            self._end(DeadlineUnreachableError.reason)
        elif self._agenda.now_s >= self._retry.not_before_s:
            self._router.room.pump_soon()

    def _close(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()

    def _end(self, failure: str) -> None:
        self._move(RequestEvent.END)
        self.failure = failure
        self._close()
        self._router.room.leave(self)
        self._router.policy.ended_as(self._seen())
        self._forget()
        self._on_end(self)

    def _forget(self) -> None:
        """What nobody asks for any more: of all requests of a long run it is most of the memory."""
        self.request = self.request._replace(prompt_ids=[], block_keys=())
        self._foretold = None

    def _seen(self) -> EndedRequest:
        request, outcome = self.request, self.outcome
        return EndedRequest(
            request.due_s,
            self._agenda.now_s,
            len(request.prompt_ids),
            request.objectives,
            outcome.ttft_s,
            outcome.tpot_s,
        )

    def _move(self, event: RequestEvent) -> None:
        self.state = REQUEST_TRANSITIONS.after(self.state, event) or self.state
