"""The public Inference service: admit, hand to a session, answer."""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import grpc

from diptych.errors import (
    DeadlineExceededError,
    DiptychError,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    QueueFullError,
    WorkerDrainingError,
)
from diptych.rpc.server import Context
from diptych.telemetry.logs import request_ids
from diptych.telemetry.tracing import Tracing, trace_id
from diptych.text.detokenizer import Detokenizer
from diptych.text.tokenizer import Tokenizer
from diptych.v1 import inference_pb2, inference_pb2_grpc
from router.frontend import validation
from router.frontend.validation import ResolvedRequest
from router.request.dispatch import Services
from router.request.response_builder import Answer
from router.request.session import Session
from router.telemetry import RequestObserver, RouterMetrics

_INLINE_TEXT_CHARACTERS = 4096  # longer prompts are tokenised in a thread
_MAX_TOKENIZING = 2  # at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The router's only model."""

    name: str
    tokenizer: Tokenizer


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Inference: one handler task per request. Refuses new requests once ``drain`` was called."""

    def __init__(
        self, model: ServedModel, services: Services, metrics: RouterMetrics, trace: Tracing
    ) -> None:
        self._model = model
        self._services = services
        self._metrics = metrics
        self._trace = trace
        self._tokenizing = asyncio.Semaphore(_MAX_TOKENIZING)
        self._is_draining = False
        self._num_open = 0
        self._num_unfound = 0
        self._num_untokenized = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def drain(self) -> None:
        """Take nothing new."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    @property
    def num_open(self) -> int:
        """Requests that are not answered yet."""
        return self._num_open

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """See inference.proto."""
        tokenizer = self._model.tokenizer
        model = inference_pb2.Model(
            name=self._model.name,
            max_model_len=self._max_model_len(),
            has_chat_template=tokenizer.chat_template is not None,
            vocab_size=tokenizer.vocab_size,
            ready=self._services.cluster.is_ready and not self._is_draining,
        )
        return inference_pb2.ListModelsResponse(models=[model])

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """See inference.proto."""
        received_s = time.monotonic()
        remaining_s = context.time_remaining()
        deadline_s = None if remaining_s is None else received_s + remaining_s
        self._num_open += 1
        self._idle.clear()
        try:
            await self._generate(request, context, received_s, deadline_s)
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()
        return
        yield  # a generator without items: the stream is written with context.write

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: Context,
        received_s: float,
        deadline_s: float | None,
    ) -> None:
        request_id = request.request_id or uuid.uuid4().hex
        kind = request.WhichOneof("prompt")
        observer = RequestObserver(
            self._metrics,
            self._trace,
            request_id if len(request_id) <= validation.MAX_REQUEST_ID_CHARACTERS else "invalid",
            operation="chat" if kind == "chat" else "text_completion",
            model=self._model.name,
            metadata=tuple(context.invocation_metadata() or ()),
            received_s=received_s,
        )
        outcome, session, answer = "INTERNAL", None, None
        try:
            with request_ids(request_id, trace_id(observer.context)):
                resolved = await self._admit(request, deadline_s)
                observer.resolved(resolved.sampling, len(resolved.shape.prompt_ids))
                answer = self._answer(request_id, resolved, received_s)
                session = Session(
                    request_id, resolved, answer, observer, self._services, deadline_s=deadline_s
                )
                write = partial(_write, context)
                await write(await session.run(write))
            outcome = "ok"
        except asyncio.CancelledError:
            is_late = deadline_s is not None and time.monotonic() >= deadline_s - 0.001
            outcome = DeadlineExceededError.reason if is_late else "cancelled"
            raise
        except DiptychError as error:
            outcome = error.reason
            raise
        finally:
            observer.ended(
                outcome,
                None if answer is None else answer.moments,
                None if session is None else session.usage,
                None if session is None else session.timing,
                finish_reason=0 if session is None else session.finish_reason,
            )

    async def _admit(
        self, request: inference_pb2.GenerateRequest, deadline_s: float | None
    ) -> ResolvedRequest:
        """Everything that can be checked before a worker is asked."""
        if self._is_draining:
            raise WorkerDrainingError("the router shuts down", retry_after_s=1.0)
        if request.model not in ("", self._model.name):
            raise ModelNotFoundError(
                f"no model {request.model[:128]!r} here; there is {self._model.name!r}"
            )
        tokenizer = self._model.tokenizer
        validation.check(request, tokenizer.vocab_size)
        max_model_len = self._max_model_len()
        prompt_ids = await self._tokenize(request, max_model_len)
        resolved = self._resolve(request, prompt_ids, max_model_len)
        if self._services.cluster.max_model_len is None:
            await self._wait_found(deadline_s)
            resolved = self._resolve(request, prompt_ids, self._max_model_len())
        return resolved

    async def _tokenize(
        self, request: inference_pb2.GenerateRequest, max_model_len: int
    ) -> list[int]:
        tokenizer = self._model.tokenizer
        if request.ByteSize() <= _INLINE_TEXT_CHARACTERS or request.HasField("tokens"):
            return validation.tokenize(request, tokenizer, max_model_len)
        max_queue = self._services.config.max_queue
        if self._num_untokenized >= max_queue + _MAX_TOKENIZING:
            raise QueueFullError(
                f"{self._num_untokenized} long prompts wait to be tokenised", retry_after_s=1.0
            )
        self._num_untokenized += 1
        try:
            async with self._tokenizing:
                return await asyncio.to_thread(
                    validation.tokenize, request, tokenizer, max_model_len
                )
        finally:
            self._num_untokenized -= 1

    def _resolve(
        self, request: inference_pb2.GenerateRequest, prompt_ids: list[int], max_model_len: int
    ) -> ResolvedRequest:
        return validation.resolve(
            request,
            prompt_ids,
            eos_token_ids=self._model.tokenizer.eos_token_ids,
            max_model_len=max_model_len,
            drawn_seed=secrets.randbits(63),
        )

    async def _wait_found(self, deadline_s: float | None) -> None:
        """No worker was ever heard of: wait for the first, within bounds."""
        config = self._services.config
        if self._num_unfound >= config.max_queue:
            raise QueueFullError(f"{self._num_unfound} requests wait already", retry_after_s=1.0)
        now, patience_s = time.monotonic(), config.timers.no_worker_s
        left_s = patience_s if deadline_s is None else deadline_s - now
        self._num_unfound += 1
        try:
            async with asyncio.timeout(min(patience_s, left_s)):
                await self._services.cluster.wait_found()
        except TimeoutError:
            if left_s < patience_s:
                raise DeadlineExceededError("the request's deadline passed") from None
            raise NoWorkerError("no worker was found", retry_after_s=1.0) from None
        finally:
            self._num_unfound -= 1

    def _answer(self, request_id: str, resolved: ResolvedRequest, received_s: float) -> Answer:
        try:
            detokenizer = Detokenizer(
                self._model.tokenizer, resolved.stop, resolved.shape.min_tokens
            )
        except ValueError as error:
            raise InvalidRequestError(str(error), field="sampling.stop") from None
        return Answer(
            request_id,
            resolved.shape,
            detokenizer,
            received_s=received_s,
            clock=time.monotonic,
            max_unsent=self._services.config.client_buffer_messages,
        )

    def _max_model_len(self) -> int:
        """The model's context, or less where the workers have less."""
        model_len = self._model.tokenizer.max_model_len
        workers_len = self._services.cluster.max_model_len
        return model_len if workers_len is None else min(model_len, workers_len)


async def _write(context: Context, response: inference_pb2.GenerateResponse) -> None:
    try:
        await context.write(response)
    except grpc.aio.BaseError:  # the call is over: the client is gone
        raise asyncio.CancelledError from None
