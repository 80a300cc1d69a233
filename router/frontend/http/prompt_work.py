"""``/v1/embeddings``, ``/score`` and ``/rerank``: vectors of texts, and how likely they are."""

import base64
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from diptych.errors import InvalidRequestError
from router.frontend.admission import Admission
from router.frontend.field_names import renamed
from router.frontend.http.asked import Envelope
from router.frontend.http.body import parse
from router.frontend.http.exchange import Exchange
from router.frontend.http.logprob_form import finite
from router.frontend.http.prompt_bodies import (
    Comparison,
    EmbeddingsAsked,
    Names,
    Ranking,
    read_embeddings,
    read_rerank,
    read_score,
)
from router.frontend.prompt_answers import PromptAnswers, PromptCall, Work
from router.frontend.turns import one_by_one
from router.frontend.validation import MOST_IDS
from router.generation.answer import Usage
from router.generation.prompt_work import EmbedRequest, ScoreRequest

Content = Mapping[str, object]
Vector = Sequence[float]


@dataclass(frozen=True, slots=True)
class PromptRoutes:
    """Answers bodies as OpenAI, vLLM and Jina write them. Event loop only."""

    admission: Admission
    prompts: PromptAnswers

    async def embeddings(self, exchange: Exchange, data: bytes) -> None:
        """A vector for each input. Raises DiptychError."""
        asked = read_embeddings(*self._read(exchange, data))
        with self._answering(exchange, asked.request, asked.names) as call:
            await exchange.send_json(await self._vectors(exchange, asked, call))

    async def score(self, exchange: Exchange, data: bytes) -> None:
        """Continuations' log probabilities, or how near texts are. Raises DiptychError."""
        asked = read_score(*self._read(exchange, data))
        if isinstance(asked, Comparison):
            await self._compare(exchange, asked)
            return
        with self._answering(exchange, asked.request, asked.names) as call:
            await exchange.send_json(await self._scores(exchange, call))

    async def rerank(self, exchange: Exchange, data: bytes) -> None:
        """Documents, the nearest to the query first. Raises DiptychError."""
        asked = read_rerank(*self._read(exchange, data))
        self._check_compares()
        with self._answering(exchange, asked.request, asked.names) as call:
            await exchange.send_json(await self._ranks(exchange, asked, call))

    async def _compare(self, exchange: Exchange, asked: Comparison) -> None:
        self._check_compares()
        with self._answering(exchange, asked.request, asked.names) as call:
            await exchange.send_json(await self._likenesses(exchange, asked, call))

    async def _vectors(
        self, exchange: Exchange, asked: EmbeddingsAsked, call: PromptCall[EmbedRequest]
    ) -> Content:
        made = await self.prompts.embed(call)
        written: Sequence[object] = made.vectors
        if asked.is_base64:
            written = await one_by_one(_base64, made.vectors)
        return {
            **self._head(exchange, "list"),
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(written)
            ],
            "usage": _counts(made.usage),
        }

    async def _scores(self, exchange: Exchange, call: PromptCall[ScoreRequest]) -> Content:
        made = await self.prompts.score(call)
        told = await one_by_one(lambda each: array("d", map(finite, each.logprobs)), made.scores)
        return {
            **self._head(exchange, "list"),
            "data": [
                {
                    "object": "score",
                    "index": index,
                    "score": sum(logprobs),
                    "logprobs": logprobs,
                    "is_greedy": each.is_greedy,
                }
                for index, (each, logprobs) in enumerate(zip(made.scores, told, strict=True))
            ],
            "usage": _counts(made.usage),
        }

    async def _ranks(
        self, exchange: Exchange, asked: Ranking, call: PromptCall[EmbedRequest]
    ) -> Content:
        made = await self.prompts.embed(call)
        query, *documents = made.vectors
        near = await one_by_one(lambda document: _dot(query, document), documents)
        order = sorted(range(len(near)), key=lambda index: -near[index])[: asked.top_n]
        return {
            "id": f"rerank-{exchange.request_id}",
            "model": self.admission.model.name,
            "usage": {"total_tokens": made.usage.num_prompt_tokens},
            "results": [
                {
                    "index": index,
                    "document": {"text": asked.documents[index]},
                    "relevance_score": near[index],
                }
                for index in order
            ],
        }

    async def _likenesses(
        self, exchange: Exchange, asked: Comparison, call: PromptCall[EmbedRequest]
    ) -> Content:
        made = await self.prompts.embed(call)
        vectors = made.vectors
        near = await one_by_one(lambda pair: _dot(vectors[pair[0]], vectors[pair[1]]), asked.pairs)
        return {
            **self._head(exchange, "list"),
            "data": [
                {"object": "score", "index": index, "score": score}
                for index, score in enumerate(near)
            ],
            "usage": _counts(made.usage),
        }

    def _check_compares(self) -> None:
        """Raises InvalidRequestError: what the model's vectors have in common means nothing."""
        model = self.admission.model
        if model.pooling is None:
            raise InvalidRequestError(
                f"{model.name!r} was not made to compare texts: it has no 1_Pooling", field="model"
            )

    def _read(self, exchange: Exchange, data: bytes) -> tuple[Mapping[str, object], Envelope]:
        max_len = self.admission.max_model_len
        envelope = Envelope(
            request_id=exchange.request_id, num_bytes=len(data), max_model_len=max_len
        )
        return parse(data, max_len, MOST_IDS), envelope

    @contextmanager
    def _answering(
        self, exchange: Exchange, request: Work, names: Names
    ) -> Iterator[PromptCall[Work]]:
        """Its place is kept until its client has the answer; refusals name fields as that does."""
        given = replace(request, tenant=exchange.tenant)
        deadline_s, metadata = exchange.read_deadline_s(), exchange.trace_metadata
        try:
            with self.prompts.answering(given, deadline_s, metadata) as call:
                yield call
        except InvalidRequestError as error:
            raise renamed(error, names) from None

    def _head(self, exchange: Exchange, kind: str) -> dict[str, object]:
        return {"id": exchange.request_id, "object": kind, "model": self.admission.model.name}


def _base64(vector: Vector) -> str:
    """Little-endian float32, as OpenAI's client reads it."""
    packed = array("f", vector)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


def _dot(one: Vector, other: Vector) -> float:
    """The cosine, of vectors of length 1."""
    return sum(a * b for a, b in zip(one, other, strict=True))


def _counts(usage: Usage) -> Mapping[str, object]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "total_tokens": usage.num_prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
