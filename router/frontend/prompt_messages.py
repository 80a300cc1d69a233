"""The messages of Score and Embed (inference.proto) as plain data, and back. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from diptych.errors import InvalidRequestError
from diptych.rpc.channel import MAX_MESSAGE_BYTES
from diptych.tenant import Tenant
from diptych.v1 import common_pb2, inference_pb2
from router.frontend.prompt_answers import check_num_inputs
from router.frontend.public_messages import read_prompt, write_usage
from router.generation.prompt_work import (
    Embeddings,
    EmbedRequest,
    Input,
    Pooling,
    ScoreRequest,
    Scores,
)
from router.generation.request import TextPrompt, TokenPrompt

MAX_NUMBERS: Final = (MAX_MESSAGE_BYTES - 2**16) // 4
"""In the vectors of one answer, which is one message; the rest of it is for what is around them."""

_POOLINGS = {
    common_pb2.POOLING_UNSPECIFIED: None,
    common_pb2.POOLING_MEAN: Pooling.MEAN,
    common_pb2.POOLING_LAST_TOKEN: Pooling.LAST_TOKEN,
}


def read_score(message: inference_pb2.ScoreRequest, num_bytes: int, tenant: Tenant) -> ScoreRequest:
    """What a client asks for. Raises InvalidRequestError."""
    has_prompt = message.WhichOneof("prompt") is not None
    return ScoreRequest(
        prompt=read_prompt(message) if has_prompt else None,
        continuations=tuple(_read_inputs(message.continuations, "continuations")),
        model=message.model,
        request_id=message.request_id,
        cache_salt=message.cache_salt,
        tenant=tenant,
        num_bytes=num_bytes,
    )


def read_embed(message: inference_pb2.EmbedRequest, num_bytes: int, tenant: Tenant) -> EmbedRequest:
    """What a client asks for. Raises InvalidRequestError."""
    if message.pooling not in _POOLINGS:
        raise InvalidRequestError("is not known", field="pooling")
    return EmbedRequest(
        inputs=tuple(_read_inputs(message.inputs, "inputs")),
        pooling=_POOLINGS[message.pooling],
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        normalize=message.normalize if message.HasField("normalize") else True,
        model=message.model,
        request_id=message.request_id,
        cache_salt=message.cache_salt,
        tenant=tenant,
        num_bytes=num_bytes,
    )


def write_scores(scores: Scores) -> inference_pb2.ScoreResponse:
    """The answer of Score."""
    return inference_pb2.ScoreResponse(
        scores=[
            inference_pb2.ContinuationScore(logprobs=each.logprobs, is_greedy=each.is_greedy)
            for each in scores.scores
        ],
        usage=write_usage(scores.usage),
    )


def write_embeddings(embeddings: Embeddings) -> inference_pb2.EmbedResponse:
    """The answer of Embed."""
    return inference_pb2.EmbedResponse(
        embeddings=[inference_pb2.Embedding(values=vector) for vector in embeddings.vectors],
        usage=write_usage(embeddings.usage),
    )


def _read_inputs(inputs: Sequence[inference_pb2.Input], field: str) -> Iterator[Input]:
    check_num_inputs(len(inputs), field)
    for index, each in enumerate(inputs):
        match each.WhichOneof("input"):
            case "text":
                yield TextPrompt(each.text)
            case "tokens":
                yield TokenPrompt(each.tokens.ids)
            case _:
                raise InvalidRequestError("give one of text, tokens", field=f"{field}[{index}]")
