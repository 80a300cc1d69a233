"""The client for code without an event loop."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from diptych.client.chunk import Chunk
from diptych.client.client import DEFAULT_RETRIES, SHORT_TIMEOUT_S, DiptychClient, OnRetry
from diptych.client.own_loop import OwnLoop
from diptych.client.prompts import ContinuationScore
from diptych.client.request import ChatMessage, build_request
from diptych.sampling_params import NOTHING_SAID, SamplingOptions
from diptych.service_level import NO_LEVEL, ServiceLevel
from diptych.v1 import inference_pb2


class BlockingClient(OwnLoop[DiptychClient]):
    """DiptychClient for code without an event loop. A context manager; not for use in one."""

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
        """As DiptychClient."""
        super().__init__(
            partial(
                DiptychClient,
                address,
                api_key=api_key,
                tls=tls,
                server_name=server_name,
                retries=retries,
                on_retry=on_retry,
            )
        )

    @property
    def router(self) -> str:
        """The address that calls go to now, see :attr:`DiptychClient.router`."""
        return self._client.router

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
        request = build_request(
            prompt, messages=messages, token_ids=token_ids, options=options, level=level
        )
        return self.stream(request, timeout_s)

    def stream(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Iterator[Chunk]:
        """Stream the answer to a request that was built elsewhere, as :func:`build_request` does.

        Raises DiptychError; see :meth:`DiptychClient.stream`.
        """
        return self._each(self._client.stream(request, timeout_s, metadata))

    def models(self, timeout_s: float = SHORT_TIMEOUT_S) -> list[inference_pb2.Model]:
        """Which models the router serves. Raises DiptychError."""
        return self._ask(self._client.models(timeout_s))

    def cluster(self, timeout_s: float = SHORT_TIMEOUT_S) -> inference_pb2.DescribeClusterResponse:
        """How the pools are now, see :meth:`DiptychClient.cluster`."""
        return self._ask(self._client.cluster(timeout_s))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[ChatMessage | tuple[str, str]] | None = None,
        timeout_s: float = SHORT_TIMEOUT_S,
    ) -> list[int]:
        """Token ids of a text or a chat, see :meth:`DiptychClient.tokenize`."""
        return self._ask(self._client.tokenize(text, messages=messages, timeout_s=timeout_s))

    def detokenize(
        self,
        token_ids: Sequence[int],
        timeout_s: float = SHORT_TIMEOUT_S,
        *,
        keep_special_tokens: bool = False,
    ) -> str:
        """What token ids say, see :meth:`DiptychClient.detokenize`."""
        return self._ask(
            self._client.detokenize(token_ids, timeout_s, keep_special_tokens=keep_special_tokens)
        )

    def score(
        self, request: inference_pb2.ScoreRequest, timeout_s: float | None = None
    ) -> list[ContinuationScore]:
        """How likely continuations are, see :meth:`DiptychClient.score`."""
        return self._ask(self._client.score(request, timeout_s))

    def embed(
        self, request: inference_pb2.EmbedRequest, timeout_s: float | None = None
    ) -> list[tuple[float, ...]]:
        """Vectors of texts, see :meth:`DiptychClient.embed`."""
        return self._ask(self._client.embed(request, timeout_s))
