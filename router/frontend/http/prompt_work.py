"""``/v1/embeddings``, ``/score`` and ``/rerank``: vectors of texts, and how likely they are."""

import base64
import sys
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from diptych.errors import InvalidRequestError
from router.frontend.admission import Admission
from router.frontend.field_names import renamed
from router.frontend.http.asked import Envelope
from router.frontend.http.body import parse
from router.frontend.http.exchange import Exchange
from router.frontend.http.logprob_form import finite
from router.frontend.http.prompt_bodies import (
    SCORE_NAMES,
    Comparison,
    Names,
    read_embeddings,
    read_rerank,
    read_score,
)
from router.frontend.prompt_answers import PromptAnswers
from router.frontend.turns import one_by_one
from router.generation.answer import Usage
from router.generation.prompt_work import Embeddings, EmbedRequest, ScoreRequest

A = TypeVar("A")
Vector = Sequence[float]


@dataclass(frozen=True, slots=True)
class PromptRoutes:
    """Answers bodies as OpenAI, vLLM and Jina write them. Event loop only."""

    admission: Admission
    prompts: PromptAnswers

    async def embeddings(self, exchange: Exchange, data: bytes) -> None:
        """A vector for each input. Raises DiptychError."""
        asked = read_embeddings(*self._read(exchange, data))
        made = await self._embed(exchange, asked.request, asked.names)
        written: Sequence[object] = made.vectors
        if asked.is_base64:
            written = await one_by_one(_base64, made.vectors)
        await exchange.send_json(
            {
                **self._head(exchange, "list"),
                "data": [
                    {"object": "embedding", "index": index, "embedding": vector}
                    for index, vector in enumerate(written)
                ],
                "usage": _counts(made.usage),
            }
        )

    async def score(self, exchange: Exchange, data: bytes) -> None:
        """Continuations' log probabilities, or how near texts are. Raises DiptychError."""
        asked = read_score(*self._read(exchange, data))
        if isinstance(asked, Comparison):
            await self._compare(exchange, asked)
            return
        given: ScoreRequest = replace(asked, tenant=exchange.tenant)
        deadline_s, metadata = exchange.read_deadline_s(), exchange.trace_metadata
        made = await _named(lambda: self.prompts.score(given, deadline_s, metadata), SCORE_NAMES)
        told = [tuple(map(finite, each.logprobs)) for each in made.scores]
        await exchange.send_json(
            {
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
        )

    async def rerank(self, exchange: Exchange, data: bytes) -> None:
        """Documents, the nearest to the query first. Raises DiptychError."""
        asked = read_rerank(*self._read(exchange, data))
        self._check_compares()
        made = await self._embed(exchange, asked.request, asked.names)
        query, *documents = made.vectors
        near = await one_by_one(lambda document: _dot(query, document), documents)
        order = sorted(range(len(near)), key=lambda index: -near[index])[: asked.top_n]
        await exchange.send_json(
            {
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
        )

    async def _compare(self, exchange: Exchange, asked: Comparison) -> None:
        self._check_compares()
        made = await self._embed(exchange, asked.request, asked.names)
        vectors = made.vectors
        near = await one_by_one(lambda pair: _dot(vectors[pair[0]], vectors[pair[1]]), asked.pairs)
        await exchange.send_json(
            {
                **self._head(exchange, "list"),
                "data": [
                    {"object": "score", "index": index, "score": score}
                    for index, score in enumerate(near)
                ],
                "usage": _counts(made.usage),
            }
        )

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
        return parse(data, max_len), envelope

    async def _embed(self, exchange: Exchange, request: EmbedRequest, names: Names) -> Embeddings:
        given = replace(request, tenant=exchange.tenant)
        deadline_s, metadata = exchange.read_deadline_s(), exchange.trace_metadata
        return await _named(lambda: self.prompts.embed(given, deadline_s, metadata), names)

    def _head(self, exchange: Exchange, kind: str) -> dict[str, object]:
        return {"id": exchange.request_id, "object": kind, "model": self.admission.model.name}


async def _named(work: Callable[[], Awaitable[A]], names: Names) -> A:
    """What ``work`` makes; its refusals name fields as the client does."""
    try:
        return await work()
    except InvalidRequestError as error:
        raise renamed(error, names) from None


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
