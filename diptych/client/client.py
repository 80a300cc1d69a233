"""The asynchronous client."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from diptych.client.answer_reader import AnswerReader
from diptych.client.chunk import Chunk
from diptych.client.credentials import lock_of, metadata_of
from diptych.client.prompts import ContinuationScore, read_scores, read_vectors
from diptych.client.request import ChatMessage, build_request, build_tokenize_request
from diptych.client.retries import Retries
from diptych.client.routers import Router, Routers
from diptych.errors import DiptychError
from diptych.rpc.status import from_rpc_error
from diptych.sampling_params import NOTHING_SAID, SamplingOptions
from diptych.service_level import NO_LEVEL, ServiceLevel
from diptych.v1 import inference_pb2

DEFAULT_RETRIES = 5
SHORT_TIMEOUT_S = 10.0

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)
_Method: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]"
OnRetry: TypeAlias = Callable[[DiptychError, float], None]


class DiptychClient:
    """Calls one router, or any of several. Used from one event loop; an async context manager.

    What may heal is tried again, on the next router if there is one; an answer that broke off
    goes on where it was, exactly.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: bool | Path = False,
        server_name: str = "",
        retries: int = DEFAULT_RETRIES,
        on_retry: OnRetry | None = None,
    ) -> None:
        """``address`` is host:port, or several with commas. Connects when first used.

        ``retries`` bounds the tries in a row that bring nothing new; 0: none are made.
        ``api_key`` is for routers that ask for one. ``tls`` is for those that speak TLS: True
        believes the system's authorities, a path those in that PEM file, which is read now;
        their certificate has to be of ``server_name``, unset: of the address's host.
        ``on_retry`` is told of what failed and brought nothing, and in how many seconds it is
        asked again.
        Raises ConfigurationError: it cannot be, or the key is none.
        """
        self._metadata = metadata_of(api_key)
        self._retries = retries
        self._on_retry = on_retry
        self._routers = Routers(address, lock_of(tls, server_name))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def router(self) -> str:
        """The address that calls go to now: of several, the one that did not fail last."""
        return self._routers.address

    async def close(self) -> None:
        """Close the connections; requests under way are cancelled."""
        await self._routers.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage | tuple[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        options: SamplingOptions = NOTHING_SAID,
        level: ServiceLevel = NO_LEVEL,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the continuation of one prompt, chat or token list.

        ``timeout_s`` is the request's deadline, ``level`` how urgent it is, and what it wants
        of its service. What else a request may have:
        :func:`build_request` and :meth:`stream`. Raises DiptychError.
        """
        request = build_request(
            prompt, messages=messages, token_ids=token_ids, options=options, level=level
        )
        return self.stream(request, timeout_s)

    async def stream(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the answer to a request that was built elsewhere.

        ``metadata`` may carry a W3C trace context. Raises DiptychError; BrokenStreamError is
        one, of a router that did not keep to the contract.
        """
        metadata = (*metadata, *self._metadata)
        retries, answer = Retries(self._retries, timeout_s), AnswerReader(request)
        while True:
            router, num_before = self._routers.asked, answer.num_tokens
            call = router.Generate(answer.next_request(), timeout=retries.left_s, metadata=metadata)
            try:
                async for response in call:
                    chunk = answer.read(response)
                    if chunk is not None:
                        yield chunk
                answer.check_whole()
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
            else:
                return
            finally:
                call.cancel()
            if answer.is_whole:
                return
            if not answer.can_go_on:
                raise failure
            goes_on = answer.num_tokens > num_before
            if goes_on:
                retries.renew()
            await self._recover(router, failure, retries, is_quiet=goes_on)

    async def models(self, timeout_s: float = SHORT_TIMEOUT_S) -> list[inference_pb2.Model]:
        """Which models the router serves. Raises DiptychError."""
        request = inference_pb2.ListModelsRequest()
        response = await self._ask(lambda router: router.ListModels, request, timeout_s)
        return list(response.models)

    async def cluster(
        self, timeout_s: float = SHORT_TIMEOUT_S
    ) -> inference_pb2.DescribeClusterResponse:
        """How the pools are now. Raises DiptychError: NotServedError where it is not told."""
        request = inference_pb2.DescribeClusterRequest()
        return await self._ask(lambda router: router.DescribeCluster, request, timeout_s)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[ChatMessage | tuple[str, str]] | None = None,
        timeout_s: float = SHORT_TIMEOUT_S,
    ) -> list[int]:
        """The token ids that ``generate`` would make of a text or a chat. Raises DiptychError."""
        request = build_tokenize_request(text, messages=messages)
        response = await self._ask(lambda router: router.Tokenize, request, timeout_s)
        return list(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        timeout_s: float = SHORT_TIMEOUT_S,
        *,
        keep_special_tokens: bool = False,
    ) -> str:
        """What token ids say. Raises DiptychError."""
        request = inference_pb2.DetokenizeRequest(
            token_ids=token_ids, keep_special_tokens=keep_special_tokens
        )
        response = await self._ask(lambda router: router.Detokenize, request, timeout_s)
        return response.text

    async def score(
        self, request: inference_pb2.ScoreRequest, timeout_s: float | None = None
    ) -> list[ContinuationScore]:
        """How likely continuations are: :func:`build_score_request`. Raises DiptychError."""
        response = await self._ask(lambda router: router.Score, request, timeout_s)
        return read_scores(response)

    async def embed(
        self, request: inference_pb2.EmbedRequest, timeout_s: float | None = None
    ) -> list[tuple[float, ...]]:
        """Vectors of texts: :func:`build_embed_request`. Raises DiptychError."""
        response = await self._ask(lambda router: router.Embed, request, timeout_s)
        return read_vectors(response)

    async def _ask(
        self,
        method: "Callable[[Router], _Method[_Request, _Response]]",
        request: _Request,
        timeout_s: float | None,
    ) -> _Response:
        retries = Retries(self._retries, timeout_s)
        while True:
            router = self._routers.asked
            call = method(router)
            try:
                return await call(request, timeout=retries.left_s, metadata=self._metadata)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
            await self._recover(router, failure, retries)

    async def _recover(
        self,
        failed: Router,
        failure: DiptychError,
        retries: Retries,
        *,
        is_quiet: bool = False,
    ) -> None:
        """Wait for the next try, on the next router. Raises ``failure``: there is none."""
        pause_s = retries.pause_s(failure)
        if pause_s is None:
            raise failure
        self._routers.leave(failed)
        if self._on_retry is not None and not is_quiet:
            self._on_retry(failure, pause_s)
        await asyncio.sleep(pause_s)
