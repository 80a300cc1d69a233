"""Completions and chats: a body in, the generator's events out as JSON or as a stream."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Final

from diptych.errors import DiptychError, InvalidRequestError, SlowClientError
from router.frontend.admission import Admission
from router.frontend.field_names import renamed
from router.frontend.generator import Generator
from router.frontend.http.answer_form import Form, Heading, StreamedAnswer, WholeAnswer
from router.frontend.http.asked import Asked, Envelope
from router.frontend.http.body import parse
from router.frontend.http.choices_form import StreamedChoices, WholeChoices
from router.frontend.http.errors import RefusedError, reason_of
from router.frontend.http.exchange import Exchange
from router.frontend.http.logprob_form import CompletionLogprobs, LogprobWriter
from router.frontend.http.prompt_form import PromptForm
from router.generation.answer import GenerationEvent

_QUIET_S: Final = 10.0  # proxies end what says nothing for long
_COMMENT: Final = b": the model is still at it\n\n"
Read = Callable[[Mapping[str, object], Envelope], Asked]


@dataclass(frozen=True, slots=True)
class GenerationAnswers:
    """Answers the requests of one route; ``read`` and ``form`` are what sets the two apart."""

    admission: Admission
    generator: Generator
    read: Read
    form: Form
    clock: Callable[[], float] = time.monotonic

    async def __call__(self, exchange: Exchange, data: bytes) -> None:
        """Answer one request. Raises DiptychError."""
        try:
            envelope = Envelope(
                request_id=exchange.request_id,
                num_bytes=len(data),
                max_model_len=self.admission.max_model_len,
            )
            asked = self.read(parse(data, envelope.max_model_len), envelope)
            deadline_s = exchange.read_deadline_s()
        except InvalidRequestError as error:
            self.refused(exchange, error)
            raise
        heading = Heading(
            form=self.form,
            request_id=exchange.request_id,
            model=self.admission.model.name,
            created_s=int(time.time()),
            stop_token_ids=frozenset(asked.request.sampling.stop_token_ids),
        )
        patience = asyncio.timeout(None)  # over all writes; ends when one is given up

        def give_up() -> None:
            if not patience.expired():
                patience.reschedule(asyncio.get_running_loop().time())

        events = self.generator.generate(
            replace(asked.request, tenant=exchange.tenant),
            deadline_s=deadline_s,
            metadata=exchange.trace_metadata,
            give_up=give_up,
        )
        async with aclosing(events):
            try:
                async with patience:
                    await self._send(exchange, asked, heading, events)
            except TimeoutError:  # a write was given up: the generator knows why, and counts it
                with suppress(SlowClientError):  # who takes nothing can be told nothing
                    async for _ in events:
                        pass
            except InvalidRequestError as error:
                raise renamed(error, asked.names) from None

    def refused(self, exchange: Exchange, error: DiptychError | RefusedError) -> None:
        """Leave the record of a request that could not be read."""
        self.generator.refused(
            reason_of(error),
            exchange.trace_metadata,
            request_id=exchange.request_id,
            operation=self.form.operation,
            tenant=exchange.tenant,
        )

    async def _send(
        self,
        exchange: Exchange,
        asked: Asked,
        heading: Heading,
        events: AsyncGenerator[GenerationEvent, None],
    ) -> None:
        num_choices = asked.request.sampling.n or 1
        if asked.is_stream:
            streams = [self._streamed(asked, heading, index) for index in range(num_choices)]
            stream = streams[0] if num_choices == 1 else StreamedChoices(streams)
            told_s = self.clock()
            async for event in events:
                piece = stream.send(event)
                if not piece and self.clock() - told_s > _QUIET_S:
                    piece = _COMMENT  # what comes is kept: a call is told whole
                if piece:
                    await exchange.send_piece(piece)
                    told_s = self.clock()
            await exchange.end_stream()
        else:
            parts = [self._whole(asked, heading, index) for index in range(num_choices)]
            whole = parts[0] if num_choices == 1 else WholeChoices(parts)
            async for event in events:
                whole.add(event)
            await exchange.send_json(whole.content())

    def _streamed(self, asked: Asked, heading: Heading, index: int) -> StreamedAnswer:
        logprobs, prompt = self._writers(asked, index)
        return StreamedAnswer(
            replace(heading, index=index),
            asked.includes_usage,
            asked.counts_along,
            logprobs,
            prompt,
            tells_timing=asked.tells_timing,
        )

    def _whole(self, asked: Asked, heading: Heading, index: int) -> WholeAnswer:
        logprobs, prompt = self._writers(asked, index)
        return WholeAnswer(
            replace(heading, index=index), logprobs, prompt, tells_timing=asked.tells_timing
        )

    def _writers(self, asked: Asked, index: int) -> tuple[LogprobWriter | None, PromptForm | None]:
        """Of one choice; the first one tells of the prompt."""
        logprobs = prompt = None
        if asked.request.sampling.logprobs is not None:
            logprobs = self.form.logprobs_of(self.admission.model.tokenizer.text)
        if asked.prompt is not None and index == 0:
            echoed = logprobs if isinstance(logprobs, CompletionLogprobs) else None
            prompt = PromptForm(asked.prompt, self.admission.model.tokenizer.text, echoed)
        return logprobs, prompt
