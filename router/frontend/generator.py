"""A request in, the events of its answer out: what every front end stands on."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from diptych.errors import (
    DeadlineExceededError,
    DiptychError,
    InvalidApiKeyError,
    InvalidRequestError,
    SlowClientError,
)
from diptych.telemetry import logs
from diptych.telemetry.tracing import Metadata, trace_id
from diptych.tenant import NOBODY, Tenant
from diptych.text.detokenizer import Detokenizer
from router.frontend.admission import Admission
from router.frontend.outcome import NO_ROOM, telling_outcome
from router.frontend.quotas import Admitted, Places, Quotas
from router.frontend.split_answers import split_of
from router.frontend.validation import recorded_id
from router.frontend.write_watch import WriteWatch
from router.generation.answer import GenerationEvent, Outlet, Started, Summary
from router.generation.request import ChatPrompt, GenerationRequest
from router.placement.views import WorkerId
from router.request.best_choices import BestChoices
from router.request.choices import Choices
from router.request.resolved import ResolvedRequest
from router.request.response_builder import ResponseBuilder
from router.request.services import Services
from router.request.session import Session
from router.telemetry import RequestObserver, Telemetry
from router.untaken import Taker, Untaken

_COMPLETION = "text_completion"  # as GenAI names it
# Ends of a request that its client brought about.
_CLIENTS_OWN = frozenset(
    {DeadlineExceededError.reason, SlowClientError.reason, InvalidRequestError.reason}
)


def _nothing() -> None:
    """For a front end that has no write to give up."""


class Generator:
    """Answers requests. Event loop only; each answer belongs to the task that iterates over it."""

    def __init__(
        self,
        admission: Admission,
        quotas: Quotas,
        services: Services,
        telemetry: Telemetry,
        untaken: Untaken,
    ) -> None:
        """``untaken`` bounds what waits for clients."""
        self._untaken = untaken
        self._admission = admission
        self._quotas = quotas
        self._services = services
        self._telemetry = telemetry

    async def generate(
        self,
        request: GenerationRequest,
        *,
        deadline_s: float | None = None,
        metadata: Metadata = (),
        give_up: Callable[[], None] = _nothing,
        part: Admitted | None = None,
        outlet: Outlet | None = None,
        is_whole: bool = False,
        taker: Taker | None = None,
        taken_s: Callable[[], float] = lambda: -math.inf,
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The answer, event by event; asking for the next says that the last was written.

        ``deadline_s`` is a moment of the monotonic clock. ``give_up`` is called when the
        answer fails while an event is being written: the caller stops writing and asks for
        the next event, which raises. Whoever stops early must ``aclose``: that frees
        everything at once. ``part``: what it may take of its tenant's quotas, where it was let
        in with others (``admit_all``). ``outlet`` is another way for deltas behind the first: those
        that come while the caller waits for an event may be written there, and are none then.
        ``is_whole``: all is written with the last event, and the caller minds how long that takes.
        ``taker`` counts what waits for the client; None: it is of this answer alone. ``taken_s``:
        see ``WriteWatch``.

        Raises:
            DiptychError: refused or failed.
        """
        request = request.rendered_at(int(time.time()))
        operation = "chat" if isinstance(request.prompt, ChatPrompt) else _COMPLETION
        observer = self._observe(request.request_id, operation, metadata, request.tenant)
        answer = _Answer(self._services, observer, give_up, outlet, taken_s, is_whole=is_whole)
        with (
            telling_outcome(answer.end, deadline_s, lambda: self._admission.is_cut_off),
            answer.within(self._quotas, request, part) as quota,
            answer.taken_by(taker or self._untaken.open()),
            self._admission.hold(request.tenant, request.num_bytes),
        ):
            logs.mark(answer.request_id, trace_id(answer.observer.context))
            is_part = part is not None
            resolved = await self._admission.admit(request, deadline_s, is_part=is_part)
            answer.check_taker()
            quota.reserve(resolved.num_tokens_at_most)
            build = partial(self._builder, request, resolved, answer.observer)
            session = answer.open(resolved, build, deadline_s)
            is_first = True
            while (event := await session.next_event()) is not None:
                if is_first:  # only now is it certain that there is an answer
                    is_first = False
                    answer.watch.begin()
                    digest = session.model_digest
                    yield self._started(answer.request_id, request, resolved, digest)
                answer.watch.begin()
                yield event
                answer.watch.end()
            if not is_whole:
                answer.watch.begin()
            yield Summary(session.usage, session.timing)
            answer.watch.end()
            await session.next_event()  # raises if the client did not take the last ones

    def take_places(self, tenant: Tenant, num_requests: int, at_most: int) -> Places:
        """See ``Quotas.take_places``. Raises QuotaExceededError."""
        return self._quotas.take_places(tenant, num_requests, at_most)

    def admit_all(self, tenant: Tenant, num_tokens: Sequence[int]) -> Sequence[Admitted]:
        """See ``Quotas.admit_all``. Raises QuotaExceededError."""
        return self._quotas.admit_all(tenant, num_tokens)

    def refused(
        self,
        reason: str,
        metadata: Metadata,
        *,
        request_id: str = "",
        operation: str = _COMPLETION,
        tenant: Tenant = NOBODY,
    ) -> None:
        """Leave the record of a request that its front end could not read.

        ``operation`` is as GenAI names it.
        """
        is_let_in = reason != InvalidApiKeyError.reason
        self._observe(request_id, operation, metadata, tenant, is_traced=is_let_in).ended(reason)

    def _observe(
        self,
        request_id: str,
        operation: str,
        metadata: Metadata,
        tenant: Tenant,
        *,
        is_traced: bool = True,
    ) -> RequestObserver:
        return RequestObserver(
            self._telemetry,
            recorded_id(request_id),
            operation=operation,
            metadata=metadata,
            tenant=tenant.name,
            is_traced=is_traced,
        )

    def _builder(
        self,
        request: GenerationRequest,
        resolved: ResolvedRequest,
        observer: RequestObserver,
        choice: int,
    ) -> ResponseBuilder:
        model = self._admission.model
        answer = f"{observer.request_id} {resolved.sampling.seed} {choice}"
        split = split_of(request, resolved, model, answer)
        shown = frozenset[int]() if split is None else model.shown_ids
        try:
            detokenizer = Detokenizer(
                model.tokenizer, resolved.stop, resolved.min_tokens_to_stop, shown
            )
        except ValueError as error:
            raise InvalidRequestError(str(error), field="sampling.stop") from None
        return ResponseBuilder(
            resolved.shape,
            detokenizer,
            received_s=observer.received_s,
            clock=time.monotonic,
            max_unsent=self._services.config.client_buffer_messages,
            num_resumed=len(resolved.emitted_token_ids),
            interval=self._services.config.stream_interval,
            includes_stop=resolved.includes_stop,
            split=split,
            on_emitted=observer.emitted,
        )

    def _started(
        self,
        request_id: str,
        request: GenerationRequest,
        resolved: ResolvedRequest,
        model_digest: str,
    ) -> Started:
        wanted = resolved.shape.prompt_ids if request.return_prompt_token_ids else ()
        model, seed = self._admission.model.name, resolved.sampling.seed
        now_unix_s = request.prompt.now_unix_s if isinstance(request.prompt, ChatPrompt) else 0
        return Started(request_id, model, seed, wanted, model_digest, now_unix_s)


class _Answer:
    """What one answer needs from its begin to its end; owned by ``Generator.generate``."""

    def __init__(
        self,
        services: Services,
        observer: RequestObserver,
        give_up: Callable[[], None],
        outlet: Outlet | None = None,
        taken_s: Callable[[], float] = lambda: -math.inf,
        *,
        is_whole: bool = False,
    ) -> None:
        """``is_whole``: all that is told is taken at once, so that none of it waits."""
        self.observer = observer
        patience_s = services.config.timers.client_write_s
        self.watch = WriteWatch(patience_s, self._on_stuck, taken_s)
        self._stuck = f"the client did not take a response for {patience_s:g} s"
        self._services = services
        self._give_up = give_up
        self._outlet = outlet
        self._is_whole = is_whole
        self._taker: Taker | None = None
        self._session: Session | Choices | None = None
        self._builder: ResponseBuilder | None = None

    @property
    def request_id(self) -> str:
        """The client's, or the one that was made."""
        return self.observer.request_id

    def open(
        self,
        resolved: ResolvedRequest,
        build: Callable[[int], ResponseBuilder],
        deadline_s: float | None,
    ) -> Session | Choices:
        """Ask for workers. Raises InvalidRequestError: the resumed output had ended before."""
        num_prompt = len(resolved.shape.prompt_ids)
        self.observer.resolved(resolved.sampling, num_prompt, resolved.claim)
        builder = build(0)

        def make(
            index: int, beside: WorkerId | None, model_digest: str, on_output: Callable[[], None]
        ) -> Session:
            return Session(
                self.request_id,
                resolved.choice(index, model_digest),
                builder if index == 0 else build(index),
                self.observer,
                self._services,
                deadline_s=deadline_s,
                on_failed=self._on_failed,
                on_output=on_output,
                beside=beside,
                outlet=self._outlet,  # several choices are polled: none of them writes there
                taker=self._taker,
            )

        session: Session | Choices
        if resolved.num_choices == 1:
            session = make(0, None, "", _nothing)
        elif resolved.chooses:
            session = BestChoices(
                resolved.num_choices,
                make,
                num_best=resolved.num_best,
                tells_logprobs=resolved.tells_logprobs,
                taker=None if self._is_whole else self._taker,
            )
        else:
            session = Choices(resolved.num_choices, make)
        builder.check_resumed()
        self._session, self._builder = session, builder
        session.start()
        return session

    @contextmanager
    def within(
        self, quotas: Quotas, request: GenerationRequest, part: Admitted | None
    ) -> Iterator[Admitted]:
        """Count it as its tenant's; what it did not use of it is given back at the end.

        All of it where there was no room for it, and it has no token. Raises QuotaExceededError.
        """
        admitted = part or quotas.admit(request.tenant, request.num_tokens_at_least)
        is_ours = has_no_room = False
        try:
            yield admitted
        except Exception as error:
            reason = error.reason if isinstance(error, DiptychError) else None
            is_ours, has_no_room = reason not in _CLIENTS_OWN, reason in NO_ROOM
            raise
        finally:
            num_used = self._num_used(is_ours=is_ours)
            if has_no_room and not num_used:
                admitted.withdraw()
            else:
                has_answer = self._session is not None and self._session.usage.num_new_tokens > 0
                admitted.leave(num_used, has_answer=has_answer)

    @contextmanager
    def taken_by(self, taker: Taker) -> Iterator[None]:
        """It ends where too much waits for clients, and of this one in the block."""
        self._taker, taker.request_id = taker, self.request_id
        loop = asyncio.get_running_loop()

        def end(why: str) -> None:
            loop.call_soon(self._cut_off, why)  # it may be in the middle of something

        with taker.ending_by(end):
            yield

    def check_taker(self) -> None:
        """Raise SlowClientError where it was cut off while there was no session to end."""
        if self._taker is not None and self._taker.was_cut:
            raise SlowClientError("too much waited for the client, of all who wait the slowest")

    def _cut_off(self, why: str) -> None:
        if self._session is not None:
            self._session.give_up(why)

    def _num_used(self, *, is_ours: bool) -> int:
        """Tokens that count; none where it failed, and not by the client, before there was a new
        one.
        """
        if self._session is None or self._builder is None:
            return 0
        usage, is_placed = self._session.usage, self._builder.moments.placed_s is not None
        if not is_placed or (is_ours and not usage.num_new_tokens):
            return 0
        return usage.num_prompt_tokens + usage.num_output_tokens

    def end(self, outcome: str) -> None:
        """Free everything and leave a record of how it ended."""
        self.watch.close()
        session, builder = self._session, self._builder
        self._session = None  # several choices know this answer: else only the collector frees it
        if session is None or builder is None:
            self.observer.ended(outcome)
            return
        session.close()
        usage = session.usage
        self.observer.ended(
            outcome,
            builder.moments,
            usage,
            session.timing,
            finish_reason=session.finish_reason,
            num_other_tokens=usage.num_output_tokens - builder.num_output_tokens,
        )

    def _on_stuck(self) -> None:
        if self._session is not None:
            self._session.give_up(self._stuck)

    def _on_failed(self) -> None:
        if self.watch.is_writing:
            self._give_up()
