"""The asynchronous client."""

from collections.abc import AsyncGenerator, Awaitable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message

from diptych.client.chunk import Chunk, ChunkReader
from diptych.client.request import ChatMessage, build_request, build_tokenize_request
from diptych.errors import ConfigurationError
from diptych.rpc.channel import open_channel
from diptych.rpc.status import from_rpc_error
from diptych.sampling_params import NOTHING_SAID, SamplingOptions
from diptych.v1 import inference_pb2, inference_pb2_grpc

_SHORT_TIMEOUT_S = 10.0

_Response = TypeVar("_Response", bound=Message)


class DiptychClient:
    """One connection to one router. Used from one event loop; an async context manager."""

    def __init__(self, address: str, *, api_key: str = "", tls: bool | Path = False) -> None:
        """``address`` is host:port. Connects when first used.

        ``api_key`` is for routers that ask for one. ``tls`` is for those that speak TLS: True
        believes the system's authorities, a path those in that PEM file, which is read now.
        Raises ConfigurationError: it cannot be, or the key is none.
        """
        if not (api_key.isascii() and api_key.isprintable()):
            raise ConfigurationError("the API key is not in one line of ASCII characters")
        lock = None if tls is False else (_credentials(tls), "")
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel = open_channel(address, lock=lock)
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

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage | tuple[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        options: SamplingOptions = NOTHING_SAID,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the continuation of one prompt, chat or token list.

        ``timeout_s`` is the request's deadline. What else a request may have:
        :func:`build_request` and :meth:`stream`. Raises DiptychError.
        """
        request = build_request(prompt, messages=messages, token_ids=token_ids, options=options)
        return self.stream(request, timeout_s)

    async def stream(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the answer to a request that was built elsewhere.

        ``metadata`` may carry a W3C trace context. Raises DiptychError.
        """
        metadata = (*metadata, *self._metadata)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        reader = ChunkReader()
        try:
            async for response in call:
                chunk = reader.read(response)
                if chunk is not None:
                    yield chunk
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def models(self, timeout_s: float = _SHORT_TIMEOUT_S) -> list[inference_pb2.Model]:
        """Which models the router serves. Raises DiptychError."""
        request = inference_pb2.ListModelsRequest()
        return list(
            (
                await _answer(
                    self._stub.ListModels(request, timeout=timeout_s, metadata=self._metadata)
                )
            ).models
        )

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[ChatMessage | tuple[str, str]] | None = None,
        timeout_s: float = _SHORT_TIMEOUT_S,
    ) -> list[int]:
        """The token ids that ``generate`` would make of a text or a chat. Raises DiptychError."""
        request = build_tokenize_request(text, messages=messages)
        return list(
            (
                await _answer(
                    self._stub.Tokenize(request, timeout=timeout_s, metadata=self._metadata)
                )
            ).token_ids
        )

    async def detokenize(
        self, token_ids: Sequence[int], timeout_s: float = _SHORT_TIMEOUT_S
    ) -> str:
        """What token ids say, without special tokens. Raises DiptychError."""
        request = inference_pb2.DetokenizeRequest(token_ids=token_ids)
        return (
            await _answer(
                self._stub.Detokenize(request, timeout=timeout_s, metadata=self._metadata)
            )
        ).text


def _credentials(tls: Path | bool) -> grpc.ChannelCredentials:
    if isinstance(tls, bool):
        return grpc.ssl_channel_credentials()
    try:
        return grpc.ssl_channel_credentials(tls.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"{tls}: {error.strerror}") from None


async def _answer(call: Awaitable[_Response]) -> _Response:
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
