"""Calling a router from Python. Needs the base install only.

    async with DiptychClient("127.0.0.1:8000") as client:
        async for chunk in client.generate("The capital of France is", max_tokens=8):
            print(chunk.text, end="")

Errors are :class:`diptych.errors.DiptychError` of the class whose reason the
router gave. Leaving the loop early, or cancelling the task, cancels the request.
:class:`BlockingClient` is the same for code without an event loop.
"""

import asyncio
import enum
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import grpc

from diptych.rpc.channel import open_channel
from diptych.rpc.status import from_rpc_error
from diptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

_LIST_TIMEOUT_S = 10.0


class FinishReason(enum.IntEnum):
    """Why an answer ended."""

    STOP = common_pb2.FINISH_REASON_STOP
    LENGTH = common_pb2.FINISH_REASON_LENGTH


class ChatMessage(NamedTuple):
    """One turn of a conversation."""

    role: str  # system, user, assistant, or what the model's template knows
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of an answer; ``finish_reason``, ``usage`` and ``timing`` are in the last one only."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    position: int  # in the output, of token_ids[0]
    margins: tuple[float, ...] = ()  # if return_margins
    finish_reason: FinishReason | None = None
    stop_match: str = ""
    usage: inference_pb2.Usage | None = None
    timing: inference_pb2.Timing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """How to sample; None leaves it to the router. As ``SamplingParams`` in common.proto."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int = 0
    top_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    return_margins: bool = False

    def to_proto(self) -> common_pb2.SamplingParams:
        """As it goes over the wire."""
        return common_pb2.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            return_margins=self.return_margins,
        )


def build_request(
    prompt: str | None = None,
    *,
    messages: Sequence[ChatMessage | tuple[str, str]] | None = None,
    token_ids: Sequence[int] | None = None,
    options: GenerateOptions | None = None,
    model: str = "",
    request_id: str = "",
    cache_salt: str = "",
) -> inference_pb2.GenerateRequest:
    """Make a request from exactly one of ``prompt``, ``messages`` and ``token_ids``."""
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise ValueError("give exactly one of prompt, messages and token_ids")
    request = inference_pb2.GenerateRequest(
        model=model,
        sampling=(options or GenerateOptions()).to_proto(),
        request_id=request_id,
        cache_salt=cache_salt,
    )
    if prompt is not None:
        request.text = prompt
    elif messages is not None:
        request.chat.SetInParent()
        for role, content in messages:
            request.chat.messages.add(role=role, content=content)
    elif token_ids is not None:
        request.tokens.ids.extend(token_ids)
        request.tokens.SetInParent()
    return request


class DiptychClient:
    """One connection to one router. Used from one event loop; an async context manager."""

    def __init__(self, address: str) -> None:
        """``address`` is host:port. Connects when first used."""
        self._channel = open_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; requests under way are cancelled."""
        await self._channel.close(None)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage | tuple[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        return_margins: bool = False,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the continuation of one prompt, chat or token list.

        ``timeout_s`` is the request's deadline; ``metadata`` may carry a W3C trace
        context. Raises DiptychError.
        """
        options = GenerateOptions(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            return_margins=return_margins,
        )
        request = build_request(
            prompt,
            messages=messages,
            token_ids=token_ids,
            options=options,
            model=model,
            request_id=request_id,
            cache_salt=cache_salt,
        )
        async with aclosing(self.stream(request, timeout_s, metadata)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def stream(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the answer to a request that was built elsewhere. Raises DiptychError."""
        call = self._stub.Generate(request, timeout=timeout_s, metadata=tuple(metadata))
        try:
            async for response in call:
                yield _chunk(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def models(self, timeout_s: float = _LIST_TIMEOUT_S) -> list[inference_pb2.Model]:
        """Which models the router serves. Raises DiptychError."""
        try:
            response = await self._stub.ListModels(
                inference_pb2.ListModelsRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return list(response.models)


class BlockingClient:
    """DiptychClient for code without an event loop. A context manager; not for use in one."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._runner = asyncio.Runner()
        self._client: DiptychClient | None = None

    def __enter__(self) -> Self:
        self._runner.__enter__()
        self._client = self._runner.run(_open(self._address))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client is not None:
            self._runner.run(self._client.close())
        self._runner.__exit__(kind, error, trace)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage | tuple[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        options: GenerateOptions | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[Chunk]:
        """Stream an answer, see :meth:`DiptychClient.generate`. Raises DiptychError."""
        assert self._client is not None, "use it as a context manager"
        request = build_request(prompt, messages=messages, token_ids=token_ids, options=options)
        chunks = self._client.stream(request, timeout_s)
        try:
            while (chunk := self._runner.run(_next(chunks))) is not None:
                yield chunk
        finally:
            self._runner.run(_close(chunks))

    def models(self) -> list[inference_pb2.Model]:
        """Which models the router serves. Raises DiptychError."""
        assert self._client is not None, "use it as a context manager"
        return self._runner.run(self._client.models())


async def _open(address: str) -> DiptychClient:
    return DiptychClient(address)


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(chunks, None)


async def _close(chunks: AsyncGenerator[Chunk, None]) -> None:
    await chunks.aclose()


def _chunk(response: inference_pb2.GenerateResponse) -> Chunk:
    last = response.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
    return Chunk(
        request_id=response.request_id,
        text=response.text,
        token_ids=tuple(response.token_ids),
        position=response.position,
        margins=tuple(response.margins),
        finish_reason=FinishReason(response.finish_reason) if last else None,
        stop_match=response.stop_match,
        usage=response.usage if last else None,
        timing=response.timing if last else None,
    )
