"""The asynchronous client."""

from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self

import grpc

from diptych.client.chunk import Chunk, ChunkReader
from diptych.client.request import ChatMessage, build_request
from diptych.rpc.channel import open_channel
from diptych.rpc.status import from_rpc_error
from diptych.sampling_params import NOTHING_SAID, SamplingOptions
from diptych.v1 import inference_pb2, inference_pb2_grpc

_LIST_TIMEOUT_S = 10.0


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
        call = self._stub.Generate(request, timeout=timeout_s, metadata=tuple(metadata))
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

    async def models(self, timeout_s: float = _LIST_TIMEOUT_S) -> list[inference_pb2.Model]:
        """Which models the router serves. Raises DiptychError."""
        try:
            response = await self._stub.ListModels(
                inference_pb2.ListModelsRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return list(response.models)
