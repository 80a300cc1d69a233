"""Several answers to one prompt are taken in turn, and begin when the first one runs."""

from collections.abc import Callable
from typing import cast

from diptych.client.answer_reader import AnswerReader
from diptych.finish_reason import FinishReason
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs
from diptych.v1 import inference_pb2
from router.generation.answer import ChoiceFinished, Delta
from router.placement.types import WorkerId
from router.request.choices import Choices
from router.request.session import Session

Output = PromptLogprobs | Delta | ChoiceFinished
D = WorkerId("d:1", "d-1")


class FakeSession:
    """Has all its output at once: its writer is slow."""

    is_under_way = True
    decode_worker = D

    def __init__(self, output: list[Output]) -> None:
        self._output = output

    def start(self) -> None: ...

    def poll(self) -> Output | None:
        return self._output.pop(0) if self._output else None


def make_choices(*outputs: list[Output]) -> Choices:
    sessions = [FakeSession(output) for output in outputs]

    def make(index: int, beside: WorkerId | None, on_output: Callable[[], None]) -> Session:
        return cast("Session", sessions[index])

    return Choices(len(sessions), make)


def told(position: int) -> PromptLogprobs:
    return PromptLogprobs(position, (TokenLogprobs(-1.0, (), ()),))


def to_proto(event: Output) -> inference_pb2.GenerateResponse:
    if isinstance(event, PromptLogprobs):
        return inference_pb2.GenerateResponse(prompt_logprobs=event.to_proto())
    assert isinstance(event, Delta)
    delta = inference_pb2.Delta(
        choice=event.choice, token_ids=event.token_ids, position=event.position
    )
    return inference_pb2.GenerateResponse(delta=delta)


async def test_all_that_is_told_of_the_prompt_comes_before_any_choice_has_a_token() -> None:
    """A long prompt's parts wait together for a slow writer, as do the tokens of the others."""
    end, token = ChoiceFinished(FinishReason.LENGTH), Delta("", [7], 0, [])
    choices = make_choices([told(1), told(2), told(3), token, end], [token, end], [token, end])
    events: list[Output] = []
    while (event := await choices.next_event()) is not None:
        events.append(event)
    assert events[:3] == [told(1), told(2), told(3)]
    assert events[3:6] == [token._replace(choice=index) for index in range(3)]

    reader = AnswerReader(
        inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingOptions(n=3))
    )
    reader.read(inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="r")))
    chunks = [chunk for event in events[:6] if (chunk := reader.read(to_proto(event)))]
    assert [len(chunk.prompt_logprobs) for chunk in chunks] == [3, 0, 0]
