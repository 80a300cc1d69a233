"""Scores and vectors of texts: what a client asks for and gets, as the wire has it. Pure."""

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

from diptych.client.request import ChatMessage, chat_prompt, sayable
from diptych.v1 import common_pb2, inference_pb2

Text = str | Sequence[int]
"""A text, or token ids."""


class Pooling(enum.Enum):
    """How the hidden states of a text's tokens become one vector."""

    MEAN = common_pb2.POOLING_MEAN
    LAST_TOKEN = common_pb2.POOLING_LAST_TOKEN


class ContinuationScore(NamedTuple):
    """How likely the model finds a continuation."""

    logprobs: tuple[float, ...]
    """Natural logarithms, of each of its tokens."""
    is_greedy: bool
    """Whether each of them is the likeliest in its place."""

    @property
    def logprob(self) -> float:
        """Of all of it."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """How many tokens each place is as good as open to."""
        return math.exp(-self.logprob / len(self.logprobs))


def build_score_request(
    continuations: Sequence[Text],
    prompt: Text | None = None,
    *,
    messages: Sequence[ChatMessage | tuple[str, str]] | None = None,
    model: str = "",
    request_id: str = "",
    cache_salt: str = "",
) -> inference_pb2.ScoreRequest:
    """What may follow one of ``prompt`` and ``messages``, or nothing; see inference.proto.

    Raises InvalidRequestError: a text has half a character.
    """
    if prompt is not None and messages is not None:
        raise ValueError("give no more than one of prompt and messages")
    with sayable():
        request = inference_pb2.ScoreRequest(
            model=model,
            continuations=map(_input, continuations),
            request_id=request_id,
            cache_salt=cache_salt,
        )
        if isinstance(prompt, str):
            request.text = prompt
        elif prompt is not None:
            request.tokens.SetInParent()
            request.tokens.ids.extend(prompt)
        elif messages is not None:
            request.chat.CopyFrom(chat_prompt(messages))
    return request


def build_embed_request(
    inputs: Sequence[Text],
    *,
    pooling: Pooling | None = None,
    dimensions: int | None = None,
    normalize: bool = True,
    model: str = "",
    request_id: str = "",
    cache_salt: str = "",
) -> inference_pb2.EmbedRequest:
    """Vectors of these, see inference.proto; ``pooling`` None: as the model's makers say.

    Raises InvalidRequestError: a text has half a character.
    """
    with sayable():
        request = inference_pb2.EmbedRequest(
            model=model,
            inputs=map(_input, inputs),
            dimensions=dimensions,
            normalize=normalize,
            request_id=request_id,
            cache_salt=cache_salt,
        )
    if pooling is not None:
        request.pooling = pooling.value
    return request


def read_scores(response: inference_pb2.ScoreResponse) -> list[ContinuationScore]:
    """One for each continuation."""
    return [ContinuationScore(tuple(each.logprobs), each.is_greedy) for each in response.scores]


def read_vectors(response: inference_pb2.EmbedResponse) -> list[tuple[float, ...]]:
    """One for each input."""
    return [tuple(each.values) for each in response.embeddings]


def _input(each: Text) -> inference_pb2.Input:
    if isinstance(each, str):
        return inference_pb2.Input(text=each)
    return inference_pb2.Input(tokens=inference_pb2.TokenPrompt(ids=each))
