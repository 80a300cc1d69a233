"""Completions, chats, responses: a body in, the generator's events out as JSON or as a stream."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    aclosing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from diptych.errors import DiptychError, InvalidRequestError, SlowClientError
from router.frontend.admission import Admission
from router.frontend.field_names import renamed
from router.frontend.generator import Generator
from router.frontend.http.answer_writer import Answered, AnswerWriters
from router.frontend.http.asked import Asked, Envelope
from router.frontend.http.body import parse
from router.frontend.http.choices_form import ChoicesWriters
from router.frontend.http.errors import RefusedError, reason_of
from router.frontend.http.event_stream import EventStream
from router.frontend.http.exchange import Exchange
from router.frontend.http.merged_events import MergedEvents, OfPrompt
from router.frontend.http.several_form import StreamedPrompts, WholePrompts
from router.frontend.outcome import NO_ROOM
from router.frontend.quotas import Admitted, Places
from router.frontend.told_logprobs import MAX_LOGPROBS
from router.generation.answer import GenerationEvent, Outlet, Summary
from router.generation.request import GenerationRequest, LogprobRoom, TokenPrompt

Read = Callable[[Mapping[str, object], Envelope], Asked]


class _Generate(Protocol):
    """``Generator.generate``, for one body's deadline and client."""

    def __call__(
        self,
        request: GenerationRequest,
        *,
        part: Admitted | None = None,
        outlet: Outlet | None = None,
        is_whole: bool = False,
    ) -> AsyncGenerator[GenerationEvent, None]: ...


@dataclass(frozen=True, slots=True)
class GenerationAnswers:
    """Answers the requests of one route; ``read`` and ``writers`` are what sets it apart."""

    admission: Admission
    generator: Generator
    read: Read
    writers: AnswerWriters
    clock: Callable[[], float] = time.monotonic
    most_ids: int = 0
    """Of tokens, in all prompts of a body, where it may have several."""

    async def __call__(self, exchange: Exchange, data: bytes) -> None:
        """Answer one request. Raises DiptychError."""
        try:
            envelope = Envelope(
                request_id=exchange.request_id,
                num_bytes=len(data),
                max_model_len=self.admission.max_model_len,
            )
            content = parse(data, envelope.max_model_len, self.most_ids)
            asked = self.read(content, envelope)
            deadline_s = exchange.read_deadline_s()
        except InvalidRequestError as error:
            self.refused(exchange, error)
            raise
        answered = Answered(
            request_id=exchange.request_id,
            model=self.admission.model.name,
            created_s=int(time.time()),
            text=self.admission.model.tokenizer.text,
            recommended=self.admission.model.recommended,
        )
        patience = asyncio.timeout(None)  # over all writes; ends when one is given up

        def give_up() -> None:
            with suppress(RuntimeError):  # nothing is written any more
                if not patience.expired():
                    patience.reschedule(asyncio.get_running_loop().time())

        generate = partial(
            self.generator.generate,
            deadline_s=deadline_s,
            metadata=exchange.trace_metadata,
            give_up=give_up,
            taker=exchange.taker,
            taken_s=lambda: exchange.taken_s,
        )
        if asked.others:
            await self._answer_several(exchange, asked, answered, generate, deadline_s, patience)
            return
        stream = EventStream[GenerationEvent](exchange, self.clock)
        room = self._logprob_room(asked)
        request = replace(asked.request, tenant=exchange.tenant, logprob_room=room)
        may_say_much = self.writers.repeats_all and request.sampling.logprobs is not None
        outlet = (
            None if may_say_much else stream
        )  # past the task all of an event is written at once
        events = generate(request, outlet=outlet, is_whole=not asked.is_stream)
        async with aclosing(events):
            try:
                async with patience:
                    await self._send(exchange, asked, answered, events, stream)
            except TimeoutError:  # a write was given up: the generator knows why, and counts it
                with _untold_if_slow(exchange):
                    async for _ in events:
                        pass
            except InvalidRequestError as error:
                raise renamed(error, asked.names) from None

    async def _answer_several(
        self,
        exchange: Exchange,
        asked: Asked,
        answered: Answered,
        generate: _Generate,
        deadline_s: float | None,
        patience: asyncio.Timeout,
    ) -> None:
        """Each prompt is a request of its own; one that fails ends all. Raises DiptychError."""
        failure: DiptychError | None = None
        with self._let_in(exchange, asked, deadline_s) as places, ExitStack() as held:
            checked = await self._checked(exchange, asked, deadline_s)
            parts = held.enter_context(self._admitted(exchange, checked))
            admitted = tuple(parts)
            merged = MergedEvents(len(checked))
            answers = (
                (index, _renaming(generate(request, part=parts.popleft()), names))
                for index, (request, names, _) in enumerate(checked)
            )

            async def follow() -> None:
                await merged.follow(answers)
                if places.num > 1:  # one is kept until the client has the answer
                    places.leave_one()

            async with asyncio.TaskGroup() as tasks:
                following = [
                    tasks.create_task(follow(), name=f"prompts-{index}")
                    for index in range(places.num)
                ]
                try:
                    await self._tell_several(exchange, asked, answered, merged, patience)
                except DiptychError as error:
                    failure = error
                finally:
                    for each in following:
                        each.cancel()
        if failure is not None:
            if failure.reason in NO_ROOM:  # nor do those count that were cut off for it
                for part in admitted:
                    part.uncount()
            raise failure

    async def _tell_several(
        self,
        exchange: Exchange,
        asked: Asked,
        answered: Answered,
        merged: MergedEvents,
        patience: asyncio.Timeout,
    ) -> None:
        try:
            async with patience:
                await self._send_several(exchange, asked, answered, merged)
        except TimeoutError:  # as with one prompt: one of the answers knows why
            with _untold_if_slow(exchange):
                await merged.give_up()

    @contextmanager
    def _let_in(
        self, exchange: Exchange, asked: Asked, deadline_s: float | None
    ) -> Iterator[Places]:
        """All prompts of a body as one, with all its bytes: what follows is no reason to refuse it.

        Gives the places on which they take turns. Raises DiptychError.
        """
        num_prompts = 1 + len(asked.others)
        num_at_once = min(num_prompts, self.admission.num_at_once)
        with ExitStack() as held:
            try:
                num_bytes = asked.request.num_bytes
                held.enter_context(self.admission.hold(exchange.tenant, num_bytes))
                self.admission.check_open(deadline_s)
                places = self.generator.take_places(exchange.tenant, num_prompts, num_at_once)
            except DiptychError as error:
                self.refused(exchange, error)
                raise
            held.callback(places.leave)
            yield places

    @contextmanager
    def _admitted(
        self, exchange: Exchange, checked: "Sequence[_Checked]"
    ) -> Iterator[deque[Admitted]]:
        """Of all prompts, in their order; who begins one takes it. Raises QuotaExceededError."""
        try:
            sizes = [each.num_tokens for each in checked]
            parts = deque(self.generator.admit_all(exchange.tenant, sizes))
        except DiptychError as error:
            self.refused(exchange, error)
            raise
        try:
            yield parts
        finally:
            for part in parts:
                part.withdraw()

    async def _checked(
        self, exchange: Exchange, asked: Asked, deadline_s: float | None
    ) -> "Sequence[_Checked]":
        """Those of all prompts, tokenised, before any costs a worker something."""
        checked, room = [], self._logprob_room(asked)
        for each in (asked, *asked.others):
            request = replace(each.request, tenant=exchange.tenant, logprob_room=room)
            await asyncio.sleep(0)  # there may be many, and others are served meanwhile
            try:
                resolved = await self.admission.check(request, deadline_s)
            except DiptychError as error:
                self.refused(exchange, error)
                if isinstance(error, InvalidRequestError):
                    raise renamed(error, each.names) from None
                raise
            room = room._replace(num=room.num - resolved.num_logprobs)  # for those behind it
            prompt = TokenPrompt(resolved.shape.prompt_ids)
            request = replace(request, prompt=prompt, num_bytes=0)
            checked.append(_Checked(request, each.names, resolved.num_tokens_at_most))
        return checked

    def _logprob_room(self, asked: Asked) -> LogprobRoom:
        """For those of all prompts and choices together."""
        return LogprobRoom(MAX_LOGPROBS, asked.is_stream and not self.writers.repeats_all)

    def refused(self, exchange: Exchange, error: DiptychError | RefusedError) -> None:
        """Leave the record of a request that could not be read."""
        self.generator.refused(
            reason_of(error),
            exchange.trace_metadata,
            request_id=exchange.request_id,
            operation=self.writers.operation,
            tenant=exchange.tenant,
        )

    async def _send(
        self,
        exchange: Exchange,
        asked: Asked,
        answered: Answered,
        events: AsyncGenerator[GenerationEvent, None],
        stream: EventStream[GenerationEvent],
    ) -> None:
        event = await anext(events, None)  # until it is admitted nothing is made for its choices
        if asked.is_stream:
            writer = self.writers.stream(asked, answered)
            exchange.write_failure = writer.fail
            await stream.send(writer, event, events)
        else:
            try:
                await exchange.send_json(await self._whole(asked, answered, event, events))
            except SlowClientError as error:
                with suppress(StopAsyncIteration):  # it had ended, and said so itself
                    await events.athrow(error)
                raise
            await anext(events, None)

    async def _whole(
        self,
        asked: Asked,
        answered: Answered,
        event: GenerationEvent | None,
        events: AsyncGenerator[GenerationEvent, None],
    ) -> Mapping[str, object]:
        """All of an answer, which is not asked yet for what follows its last event."""
        whole = self.writers.whole(asked, answered)
        while event is not None:
            whole.add(event)
            if isinstance(event, Summary):
                break
            event = await anext(events, None)
        return whole.content()

    async def _send_several(
        self, exchange: Exchange, asked: Asked, answered: Answered, merged: MergedEvents
    ) -> None:
        assert isinstance(self.writers, ChoicesWriters), "only these bodies have several prompts"
        async with aclosing(merged.events()) as events:
            event = await anext(events, None)
            if asked.is_stream:
                writer = StreamedPrompts.of(self.writers, asked, answered)
                exchange.write_failure = writer.fail
                stream = EventStream[OfPrompt](exchange, self.clock)
                await stream.send(writer, event, events)
            else:
                whole = WholePrompts.of(self.writers, asked, answered)
                while event is not None:
                    whole.add(event)
                    event = await anext(events, None)
                await exchange.send_json(whole.content())


class _Checked(NamedTuple):
    """One of several prompts."""

    request: GenerationRequest
    names: Mapping[str, str]
    """Of what is wrong with it, as its client knows it."""
    num_tokens: int
    """With its answer, at most."""


def _untold_if_slow(exchange: Exchange) -> AbstractContextManager[None]:
    """Who takes nothing can be told nothing; who was sent nothing yet may take it."""
    return suppress(SlowClientError) if exchange.has_begun else nullcontext()


async def _renaming(
    events: AsyncGenerator[GenerationEvent, None], names: Mapping[str, str]
) -> AsyncGenerator[GenerationEvent, None]:
    """The same; what is wrong with the request is told under its client's names."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except InvalidRequestError as error:
            raise renamed(error, names) from None
