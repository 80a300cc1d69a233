"""The public Inference service: a thin translation between gRPC and the generator."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from diptych.errors import InvalidApiKeyError, InvalidRequestError
from diptych.rpc.server import Context
from diptych.telemetry.tracing import Metadata
from diptych.tenant import NOBODY, Tenant
from diptych.v1 import inference_pb2
from router.frontend import prompt_messages, public_messages
from router.frontend.admission import Admission
from router.frontend.callers.callers import Callers, authorization
from router.frontend.cluster_message import write_report
from router.frontend.cluster_view import ClusterView
from router.frontend.field_names import renamed
from router.frontend.generator import Generator
from router.frontend.grpc_call import Call, hand_over, read_message
from router.frontend.handed_over import HandedOver
from router.frontend.prompt_answers import PromptAnswers
from router.generation.cluster_report import ClusterReport
from router.generation.request import GenerationRequest, Prompt, TokenPrompt

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_DETOKENIZE_NAMES = {"tokens.ids": "token_ids", "tokens": "token_ids"}
# For a response on its way once its answer has failed: where one is broken off gRPC sends no
# status, and its client waits for that until its own deadline.
_LAST_WRITE_S: Final = 1.0

M = TypeVar("M", bound=Message)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


class InferenceServicer:
    """Inference: one handler task per request."""

    def __init__(
        self,
        admission: Admission,
        generator: Generator,
        prompts: PromptAnswers,
        callers: Callers,
        view: ClusterView,
        *,
        max_request_bytes: int,
        handed: HandedOver,
    ) -> None:
        """Requests over ``max_request_bytes`` are refused without being parsed.

        ``handed`` bounds answers that wait in gRPC.
        """
        self._handed = handed
        self._admission = admission
        self._generator = generator
        self._prompts = prompts
        self._callers = callers
        self._view = view
        self._report: ClusterReport | None = None  # that was written last
        self._written = inference_pb2.DescribeClusterResponse()
        self._max_request_bytes = max_request_bytes

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve the methods.

        They get their requests as bytes, so that an oversized one costs nothing.
        """
        unary = {
            "ListModels": self.ListModels,
            "Tokenize": self.Tokenize,
            "Detokenize": self.Detokenize,
            "Embed": self.Embed,
            "Score": self.Score,
            "DescribeCluster": self.DescribeCluster,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(method, response_serializer=_serialize)
            for name, method in unary.items()
        }
        handlers["Generate"] = grpc.unary_stream_rpc_method_handler(
            self.Generate, response_serializer=inference_pb2.GenerateResponse.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def ListModels(
        self, request: bytes, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """See inference.proto; so the next ones."""
        await self._tenant(context)
        model = self._admission.model
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(
                    name=model.name,
                    max_model_len=self._admission.max_model_len,
                    has_chat_template=model.tokenizer.chat_template is not None,
                    vocab_size=model.tokenizer.vocab_size,
                    ready=self._admission.is_ready,
                )
            ]
        )

    async def Tokenize(self, request: bytes, context: Context) -> inference_pb2.TokenizeResponse:
        tenant, call = await self._tenant(context), Call.of(context)
        message = self._decode(inference_pb2.TokenizeRequest, request)
        prompt = public_messages.read_prompt(message)
        self._handed.admit(tenant.name)
        with self._admission.hold(tenant, len(request)):
            token_ids = await self._tokenize(
                prompt, message.model, tenant, len(request), call.deadline_s
            )
        made = inference_pb2.TokenizeResponse(token_ids=token_ids)
        return hand_over(made, context, tenant, self._handed)

    async def Detokenize(
        self, request: bytes, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        tenant, call = await self._tenant(context), Call.of(context)
        message = self._decode(inference_pb2.DetokenizeRequest, request)
        prompt = TokenPrompt(message.token_ids)
        self._handed.admit(tenant.name)
        with self._admission.hold(tenant, len(request)):
            try:
                token_ids = await self._tokenize(
                    prompt, message.model, tenant, len(request), call.deadline_s
                )
            except InvalidRequestError as error:
                raise renamed(error, _DETOKENIZE_NAMES) from None
            text = await self._admission.decode(
                token_ids,
                skip_special=not message.keep_special_tokens,
                tenant=tenant,
                deadline_s=call.deadline_s,
            )
        made = inference_pb2.DetokenizeResponse(text=text)
        return hand_over(made, context, tenant, self._handed)

    async def Embed(self, request: bytes, context: Context) -> inference_pb2.EmbedResponse:
        tenant, call = await self._tenant(context), Call.of(context)
        message = self._decode(inference_pb2.EmbedRequest, request)
        asked = prompt_messages.read_embed(message, len(request), tenant)
        most = prompt_messages.MAX_NUMBERS
        with self._prompts.answering(
            asked, call.deadline_s, call.metadata, max_numbers=most
        ) as answering:
            self._handed.admit(tenant.name)  # here a refusal leaves its record
            made = await self._prompts.embed(answering)
        written = prompt_messages.write_embeddings(made)
        return hand_over(written, context, tenant, self._handed)

    async def Score(self, request: bytes, context: Context) -> inference_pb2.ScoreResponse:
        tenant, call = await self._tenant(context), Call.of(context)
        message = self._decode(inference_pb2.ScoreRequest, request)
        asked = prompt_messages.read_score(message, len(request), tenant)
        with self._prompts.answering(asked, call.deadline_s, call.metadata) as answering:
            self._handed.admit(tenant.name)
            made = await self._prompts.score(answering)
        written = prompt_messages.write_scores(made)
        return hand_over(written, context, tenant, self._handed)

    async def DescribeCluster(
        self, request: bytes, context: Context
    ) -> inference_pb2.DescribeClusterResponse:
        await self._tenant(context)
        report = self._view.report()
        if report is not self._report:
            self._report, self._written = report, write_report(report)
        return self._written

    async def Generate(
        self, request: bytes, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        deadline_s, metadata = Call.of(context)
        tenant = NOBODY
        try:
            tenant = await self._tenant(context)
            read = replace(self._read(request), tenant=tenant)
        except (InvalidApiKeyError, InvalidRequestError) as error:
            self._generator.refused(error.reason, metadata, tenant=tenant)
            raise
        await self._answer(read, deadline_s, metadata, context)
        return
        yield  # a generator without items: the stream is written with context.write

    async def _answer(
        self,
        request: GenerationRequest,
        deadline_s: float | None,
        metadata: Metadata,
        context: Context,
    ) -> None:
        patience = asyncio.timeout(None)  # over all writes; ends when one is given up

        def give_up() -> None:
            if not patience.expired():
                patience.reschedule(asyncio.get_running_loop().time() + _LAST_WRITE_S)

        events = self._generator.generate(
            request,
            deadline_s=deadline_s,
            metadata=metadata,
            give_up=give_up,
        )
        async with aclosing(events):
            try:
                async with patience:
                    async for event in events:
                        await context.write(public_messages.write_event(event))
            except TimeoutError:
                async for _ in events:  # at most what it held already; then it raises what it was
                    pass
            except grpc.aio.BaseError:  # the call is over: the client is gone
                raise asyncio.CancelledError from None

    async def _tenant(self, context: Context) -> Tenant:
        """Whose call it is. Raises InvalidApiKeyError."""
        given = authorization(tuple(context.invocation_metadata() or ()))
        return await self._callers.tenant(given)

    async def _tokenize(
        self, prompt: Prompt, model: str, tenant: Tenant, num_bytes: int, deadline_s: float | None
    ) -> list[int]:
        request = GenerationRequest(prompt=prompt, model=model, tenant=tenant, num_bytes=num_bytes)
        return await self._admission.tokenize(request, deadline_s)

    def _read(self, data: bytes) -> GenerationRequest:
        message = self._decode(inference_pb2.GenerateRequest, data)
        return public_messages.read_request(message, len(data))

    def _decode(self, message_type: type[M], data: bytes) -> M:
        return read_message(message_type, data, self._max_request_bytes)
