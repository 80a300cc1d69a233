"""Several choices, and several prompts with choices each, are one answer, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from diptych.finish_reason import FinishReason
from diptych.sampling_params import NOTHING_SAID
from diptych.text.tokenizer import Tokenizer
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs
from router.frontend.http.answer_form import COMPLETION, STREAM_END
from router.frontend.http.answer_writer import Answered
from router.frontend.http.asked import Asked, Envelope
from router.frontend.http.choices_form import ChoicesWriters
from router.frontend.http.completion_request import read_completion
from router.frontend.http.merged_events import OfPrompt
from router.frontend.http.several_form import StreamedPrompts, WholePrompts
from router.generation.answer import (
    ChoiceFinished,
    Delta,
    GenerationEvent,
    Started,
    Summary,
    Timing,
    Usage,
)
from tests.text_models import byte_level_tokenizer, write_folder

USAGE = Usage(num_prompt_tokens=3, num_output_tokens=4, num_cached_tokens=2)
WRITERS = ChoicesWriters(COMPLETION)
STOP_ID = 9


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Answered:
    tokenizer: Tokenizer = write_folder(tmp_path_factory.mktemp("text"), byte_level_tokenizer())
    return Answered(
        request_id="r", model="m", created_s=17, text=tokenizer.text, recommended=NOTHING_SAID
    )


def asked_of(prompt: object, **members: Any) -> Asked:
    envelope = Envelope(request_id="r", num_bytes=9, max_model_len=100)
    body = {"model": "m", "prompt": prompt, "n": 2, "stop_token_ids": [STOP_ID]}
    return read_completion({**body, **members}, envelope)


def events_of(name: str) -> Iterator[GenerationEvent]:
    """The second of two choices ends first."""
    yield Started("r", "m", 0, (5, 6, 7))
    yield PromptLogprobs(1, (TokenLogprobs(-1.0, (), ()), TokenLogprobs(-2.0, (), ())))
    yield Delta(f"{name}0", [1], 0, [])
    yield Delta(f"{name}1", [STOP_ID], 0, [], choice=1)
    yield ChoiceFinished(FinishReason.STOP, STOP_ID, choice=1)
    yield Delta("...", [3], 1, [])
    yield ChoiceFinished(FinishReason.LENGTH)
    yield Summary(USAGE, Timing())


def pieces_of(data: bytes) -> list[dict[str, Any]]:
    said = data.removesuffix(STREAM_END).decode().split("\n\n")
    return [json.loads(piece.removeprefix("data: ")) for piece in said if piece]


def ends_of(choices: list[dict[str, Any]]) -> dict[int, tuple[str, int | None]]:
    ends = [each for each in choices if each["finish_reason"]]
    told = {each["index"]: (each["finish_reason"], each["stop_reason"]) for each in ends}
    assert len(told) == len(ends), "each ends once"
    return told


def texts_of(choices: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for each in choices:
        texts[each["index"]] = texts.get(each["index"], "") + each["text"]
    return texts


ENDS = {0: ("length", None), 1: ("stop", STOP_ID)}


def test_each_choice_is_told_under_its_index(answered: Answered) -> None:
    writer = WRITERS.whole(asked_of("p", prompt_logprobs=0), answered)
    for event in events_of("a"):
        writer.add(event)
    content: Any = writer.content()
    assert texts_of(content["choices"]) == {0: "a0...", 1: "a1"}
    assert ends_of(content["choices"]) == ENDS
    assert content["usage"]["completion_tokens"] == 4
    told = [each.get("prompt_logprobs") for each in content["choices"]]
    assert [told[0] and len(told[0]), told[1]] == [3, None], "the first tells of the prompt"


def test_a_choice_of_a_stream_ends_when_it_does(answered: Answered) -> None:
    writer = WRITERS.stream(
        asked_of("p", stream=True, stream_options={"include_usage": True}), answered
    )
    sent = [writer.send(event) for event in events_of("a")]
    assert [bool(each) for each in sent] == [False, False, True, True, True, True, True, True]
    assert sent[-1].endswith(STREAM_END)
    *pieces, last = pieces_of(b"".join(sent))
    choices = [choice for piece in pieces for choice in piece["choices"]]
    assert texts_of(choices) == {0: "a0...", 1: "a1"}
    assert ends_of(choices) == ENDS
    assert [(last["choices"], last["usage"]["completion_tokens"])] == [([], 4)]


def mixed() -> Iterator[OfPrompt]:
    """The second prompt's answer is told before the first one's."""
    for prompt in (1, 0):
        for event in events_of("ab"[prompt]):
            yield OfPrompt(prompt, event)


ALL_TEXTS = {0: "a0...", 1: "a1", 2: "b0...", 3: "b1"}


def test_the_choices_of_a_prompt_stand_behind_those_before(answered: Answered) -> None:
    writer = WholePrompts.of(WRITERS, asked_of(["p", "q"]), answered)
    for event in mixed():
        writer.add(event)
    content: Any = writer.content()
    assert [each["index"] for each in content["choices"]] == [0, 1, 2, 3]
    assert texts_of(content["choices"]) == ALL_TEXTS
    assert ends_of(content["choices"]) == {**ENDS, 2: ENDS[0], 3: ENDS[1]}
    assert content["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 8,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_a_stream_of_several_prompts_ends_once_with_all_usage(answered: Answered) -> None:
    asked = asked_of(["p", "q"], stream=True, stream_options={"include_usage": True})
    writer = StreamedPrompts.of(WRITERS, asked, answered)
    data = b"".join(map(writer.send, mixed()))
    assert data.count(STREAM_END) == 1
    *pieces, last = pieces_of(data)
    choices = [choice for piece in pieces for choice in piece["choices"]]
    assert texts_of(choices) == ALL_TEXTS
    assert ends_of(choices) == {**ENDS, 2: ENDS[0], 3: ENDS[1]}
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
