"""The answers of Score and Embed are one message each."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from diptych.rpc.channel import MAX_MESSAGE_BYTES
from diptych.rpc.server import Context
from diptych.v1 import inference_pb2
from router.frontend.callers.callers import Anybody
from router.frontend.grpc import InferenceServicer
from router.frontend.handed_over import HandedOver
from router.frontend.prompt_answers import MAX_INPUTS, MAX_SCORED
from router.frontend.prompt_messages import MAX_NUMBERS, write_embeddings, write_scores
from router.generation.answer import Usage
from router.generation.prompt_work import ContinuationScore, Embeddings, Scores

MOST = 2**32 - 1
USAGE = Usage(num_prompt_tokens=MOST, num_output_tokens=0, num_cached_tokens=MOST)


def test_the_largest_answers_fit_a_message() -> None:
    size, num_more = divmod(MAX_NUMBERS, MAX_INPUTS)
    vectors = [array("f", bytes(4 * size))] * (MAX_INPUTS - 1)
    last = array("f", bytes(4 * (size + num_more)))
    largest = write_embeddings(Embeddings((*vectors, last), USAGE))
    assert MAX_MESSAGE_BYTES - 2**16 < largest.ByteSize() <= MAX_MESSAGE_BYTES
    score = ContinuationScore(array("f", bytes(4 * (MAX_SCORED // MAX_INPUTS))), is_greedy=True)
    assert write_scores(Scores((score,) * MAX_INPUTS, USAGE)).ByteSize() <= MAX_MESSAGE_BYTES


class Prompts:
    """Answers nothing, and keeps what it was told of the answer."""

    def __init__(self) -> None:
        self.told: dict[str, int] = {}

    @contextmanager
    def answering(self, *given: object, **told: int) -> Iterator[None]:
        self.told = told
        yield

    async def embed(self, call: None) -> Embeddings:
        return Embeddings((array("f", [1.0]),), USAGE)


async def test_vectors_that_fit_no_message_are_none_of_an_answers() -> None:
    prompts, nobody = Prompts(), cast(Any, None)
    servicer = InferenceServicer(
        nobody,
        nobody,
        cast(Any, prompts),
        Anybody(),
        nobody,
        max_request_bytes=99,
        handed=HandedOver(2**20),
    )
    context = SimpleNamespace(time_remaining=lambda: None, invocation_metadata=lambda: ())
    asked = inference_pb2.EmbedRequest(inputs=[inference_pb2.Input(text="a")])
    made = await servicer.Embed(asked.SerializeToString(), cast(Context, context))
    assert list(made.embeddings[0].values) == [1.0]
    assert prompts.told == {"max_numbers": MAX_NUMBERS}
