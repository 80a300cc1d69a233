"""Calling a router from Python. Needs the base install only.

    async with DiptychClient("127.0.0.1:50051") as client:
        async for chunk in client.generate("The capital of France is"):
            print(chunk.text, end="")

An answer that breaks off goes on by itself, on the same router or another
(``DiptychClient("a:50051,b:50051")``), without a gap or a repeat. What cannot be
healed, and what does not heal in time, is an error.

Errors are :class:`diptych.errors.DiptychError` of the class whose reason the
router gave. Leaving the loop early, or cancelling the task, cancels the request.
:class:`BlockingClient` is the same for code without an event loop. :class:`BatchClient`
has a batch server answer a file of requests, :class:`BlockingBatchClient` without an event loop.
"""

from diptych.client.answer_reader import BrokenStreamError
from diptych.client.batches import BatchClient, BatchState
from diptych.client.blocking import BlockingClient
from diptych.client.blocking_batches import BlockingBatchClient
from diptych.client.chunk import Chunk
from diptych.client.client import DEFAULT_RETRIES, DiptychClient
from diptych.client.prompts import (
    ContinuationScore,
    Pooling,
    build_embed_request,
    build_score_request,
)
from diptych.client.request import ChatMessage, build_request
from diptych.client.tools import Tool, ToolChoice, Tools
from diptych.constraint import Constraint
from diptych.finish_reason import FinishReason
from diptych.request_class import RequestClass
from diptych.sampling_params import SamplingOptions
from diptych.service_level import ServiceLevel
from diptych.token_logprobs import TokenLogprobs

__all__ = [
    "DEFAULT_RETRIES",
    "BatchClient",
    "BatchState",
    "BlockingBatchClient",
    "BlockingClient",
    "BrokenStreamError",
    "ChatMessage",
    "Chunk",
    "Constraint",
    "ContinuationScore",
    "DiptychClient",
    "FinishReason",
    "Pooling",
    "RequestClass",
    "SamplingOptions",
    "ServiceLevel",
    "TokenLogprobs",
    "Tool",
    "ToolChoice",
    "Tools",
    "build_embed_request",
    "build_request",
    "build_score_request",
]
