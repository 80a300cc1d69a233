"""Several answers to one prompt, as one: the prompt is prefilled and handed over once."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from diptych.finish_reason import FinishReason
from diptych.token_logprobs import PromptLogprobs
from router.generation.answer import ChoiceFinished, Delta, Timing, Usage
from router.placement.views import WorkerId
from router.request.session import Session

# Makes the session of that choice, beside a worker that has the prompt, of the weights with that
# digest (empty: any), which calls back when it has output, or may have.
MakeSession = Callable[[int, WorkerId | None, str, Callable[[], None]], Session]


class Choices:
    """Sessions of one request, taken as if they were one. Owned by the task that takes them.

    The first choice is prefilled and handed over as any request. As soon as it runs the others
    begin beside it, where the prompt's whole blocks are: they share those, and compute the few
    tokens behind them. From then on all are of the weights that the first is of. One that
    fails ends all.
    """

    def __init__(self, num_choices: int, make: MakeSession) -> None:
        self._num_choices = num_choices
        self._make = make
        self._sessions = [make(0, None, "", self._wake)]
        self._next = 0  # whose turn it is
        self._num_finished = 0
        self._waiter: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Ask for workers."""
        self._sessions[0].start()

    async def next_event(self) -> PromptLogprobs | Delta | ChoiceFinished | None:
        """As :meth:`router.request.session.Session.next_event`, of all choices in turn."""
        while True:
            self._begin_others()
            for _ in self._sessions:
                index, self._next = self._next, (self._next + 1) % len(self._sessions)
                event = self._sessions[index].poll()
                if isinstance(event, PromptLogprobs):
                    self._next = index  # all of the prompt comes before the first token
                if isinstance(event, ChoiceFinished):
                    self._num_finished += 1
                if isinstance(event, ChoiceFinished | Delta):
                    return event._replace(choice=index)
                if event is not None:
                    return event
            if self._num_finished == self._num_choices:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def close(self) -> None:
        """Free everything of all choices at once. Idempotent."""
        for session in self._sessions:
            session.close()

    def give_up(self, why: str) -> None:
        """The client takes nothing: free everything of all choices."""
        for session in self._sessions:
            session.give_up(why)

    @property
    def model_digest(self) -> str:
        """Of the weights that all choices are of; empty: unknown."""
        return self._sessions[0].model_digest

    @property
    def usage(self) -> Usage:
        """The prompt's tokens once, and the output's of all choices."""
        num_output = sum(session.usage.num_output_tokens for session in self._sessions)
        return replace(self._sessions[0].usage, num_output_tokens=num_output)

    @property
    def timing(self) -> Timing:
        """Of the first choice."""
        return self._sessions[0].timing

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first choice."""
        return self._sessions[0].finish_reason

    def _begin_others(self) -> None:
        first = self._sessions[0]
        if len(self._sessions) == self._num_choices or not first.is_under_way:
            return
        beside, model_digest = first.decode_worker, first.keep_model()
        for index in range(1, self._num_choices):
            self._sessions.append(self._make(index, beside, model_digest, self._wake))
            self._sessions[index].start(front=True)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: who waited was cancelled
            waiter.set_result(None)
