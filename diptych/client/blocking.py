"""The client for code without an event loop."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from diptych.client.chunk import Chunk
from diptych.client.client import DEFAULT_RETRIES, DiptychClient
from diptych.client.prompts import ContinuationScore
from diptych.client.request import ChatMessage, build_request
from diptych.sampling_params import NOTHING_SAID, SamplingOptions
from diptych.service_level import NO_LEVEL, ServiceLevel
from diptych.v1 import inference_pb2


class BlockingClient:
    """DiptychClient for code without an event loop. A context manager; not for use in one."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: bool | Path = False,
        retries: int = DEFAULT_RETRIES,
    ) -> None:
        """As DiptychClient."""
        self._open = partial(_open, address, api_key, tls, retries)
        self._runner = asyncio.Runner()
        self._client: DiptychClient | None = None

    def __enter__(self) -> Self:
        self._runner.__enter__()
        self._client = self._runner.run(self._open())
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
        options: SamplingOptions = NOTHING_SAID,
        level: ServiceLevel = NO_LEVEL,
        timeout_s: float | None = None,
    ) -> Iterator[Chunk]:
        """Stream an answer, see :meth:`DiptychClient.generate`. Raises DiptychError."""
        assert self._client is not None, "use it as a context manager"
        request = build_request(
            prompt, messages=messages, token_ids=token_ids, options=options, level=level
        )
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

    def cluster(self) -> inference_pb2.DescribeClusterResponse:
        """How the pools are now, see :meth:`DiptychClient.cluster`."""
        assert self._client is not None, "use it as a context manager"
        return self._runner.run(self._client.cluster())

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[ChatMessage | tuple[str, str]] | None = None,
    ) -> list[int]:
        """Token ids of a text or a chat, see :meth:`DiptychClient.tokenize`."""
        assert self._client is not None, "use it as a context manager"
        return self._runner.run(self._client.tokenize(text, messages=messages))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """What token ids say, see :meth:`DiptychClient.detokenize`."""
        assert self._client is not None, "use it as a context manager"
        return self._runner.run(self._client.detokenize(token_ids))

    def score(self, request: inference_pb2.ScoreRequest) -> list[ContinuationScore]:
        """How likely continuations are, see :meth:`DiptychClient.score`."""
        assert self._client is not None, "use it as a context manager"
        return self._runner.run(self._client.score(request))

    def embed(self, request: inference_pb2.EmbedRequest) -> list[tuple[float, ...]]:
        """Vectors of texts, see :meth:`DiptychClient.embed`."""
        assert self._client is not None, "use it as a context manager"
        return self._runner.run(self._client.embed(request))


async def _open(address: str, api_key: str, tls: bool | Path, retries: int) -> DiptychClient:
    return DiptychClient(address, api_key=api_key, tls=tls, retries=retries)


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(chunks, None)


async def _close(chunks: AsyncGenerator[Chunk, None]) -> None:
    await chunks.aclose()
