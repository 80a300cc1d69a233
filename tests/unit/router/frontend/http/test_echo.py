"""A completion that is asked for with its prompt: what is told of that, and when."""

import json
from typing import Any

import pytest

from diptych.errors import InvalidRequestError
from diptych.finish_reason import FinishReason
from diptych.text.tokenizer import Tokenizer
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs
from router.frontend.http.answer_form import COMPLETION, Heading, StreamedAnswer, WholeAnswer
from router.frontend.http.asked import Asked, Envelope
from router.frontend.http.completion_request import read_completion
from router.frontend.http.logprob_form import CompletionLogprobs
from router.frontend.http.prompt_form import PromptForm, PromptWish
from router.generation.answer import (
    ChoiceFinished,
    Delta,
    GenerationEvent,
    Started,
    Summary,
    Timing,
    Usage,
)

ENVELOPE = Envelope(request_id="r", num_bytes=9, max_model_len=100)


def completion(**members: Any) -> Asked:
    return read_completion({"model": "m", "prompt": "p", **members}, ENVELOPE)


def test_what_is_echoed_is_told_of_as_the_answer_is() -> None:
    asked = completion(echo=True, logprobs=3, prompt_logprobs=1)
    assert asked.prompt == PromptWish(echoes=True, num_top=1, num_echoed=3, text="p")
    assert asked.request.sampling.prompt_logprobs == 3
    assert asked.request.return_prompt_token_ids
    assert completion(echo=True).request.sampling.prompt_logprobs is None
    alone = completion(echo=True, max_tokens=0, logprobs=1)
    assert alone.prompt is not None
    assert alone.prompt.is_all
    assert alone.request.sampling.max_tokens == 1
    assert completion(echo=False).prompt is None
    assert completion(max_tokens=0).request.sampling.max_tokens == 0, "to be refused"
    further = completion(echo=True, logprobs=1, prompt_logprobs=3)
    assert further.request.sampling.prompt_logprobs == 3


@pytest.mark.parametrize(("num_top", "num_of_prompt"), [(0, 2), (1, 3), (3, 1), (2, 2)])
def test_each_member_tells_as_many_of_the_likeliest_as_it_asks_for(
    tokenizer: Tokenizer, num_top: int, num_of_prompt: int
) -> None:
    """Workers tell the more of both."""
    asked = completion(prompt=[5, 6], echo=True, logprobs=num_top, prompt_logprobs=num_of_prompt)
    likeliest = tuple(range(10, 10 + max(num_top, num_of_prompt)))
    found = TokenLogprobs(-5.0, likeliest, tuple(map(float, range(-1, -1 - len(likeliest), -1))))
    assert asked.prompt is not None
    form = PromptForm(asked.prompt, tokenizer.text, CompletionLogprobs(tokenizer.text))
    form.begin((5, 6))
    form.add(PromptLogprobs(1, (found,)))
    assert form.logprobs is not None
    echoed: Any = form.logprobs.take()
    assert len(echoed["top_logprobs"][1]) == 1 + num_top, "the prompt's own is among them"
    told: Any = form.members()["prompt_logprobs"]
    assert len(told[1]) == 1 + num_of_prompt


def test_a_prompts_log_probabilities_are_for_answers_in_one_piece() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt_logprobs=0, stream=True)
    assert caught.value.field == "prompt_logprobs"
    assert completion(echo=True, logprobs=1, stream=True).prompt is not None


@pytest.mark.parametrize("nothing", [False, 0.0])
def test_what_is_not_the_number_0_is_none_with_an_echo_too(nothing: object) -> None:
    assert completion(prompt="a", echo=True, max_tokens=0).prompt is not None
    with pytest.raises(InvalidRequestError) as caught:
        completion(echo=True, max_tokens=nothing)
    assert caught.value.field == "max_tokens"


def test_each_of_several_prompts_is_echoed_as_it_was_written() -> None:
    first = completion(prompt=["a", "b"], echo=True)
    texts = [each.prompt.text for each in (first, *first.others) if each.prompt is not None]
    assert texts == ["a", "b"]


def test_a_prompt_alone_does_not_end_by_a_token_behind_it(tokenizer: Tokenizer) -> None:
    heading = Heading(
        form=COMPLETION, request_id="r", model="m", created_s=17, stop_token_ids=frozenset({9})
    )
    events: list[GenerationEvent] = [
        Started("r", "m", 0, (5,)),
        Delta("x", [9], 0, []),
        ChoiceFinished(FinishReason.STOP, 9),
        Summary(Usage(num_prompt_tokens=1, num_output_tokens=1, num_cached_tokens=0), Timing()),
    ]
    for is_all, ends in ((True, ("length", None)), (False, ("stop", 9))):
        wish = PromptWish(echoes=True, is_all=is_all, text="p")
        whole = WholeAnswer(heading, prompt=PromptForm(wish, tokenizer.text))
        for event in events:
            whole.add(event)
        stream = StreamedAnswer(heading, False, prompt=PromptForm(wish, tokenizer.text))
        *_, last, _, _ = b"".join(map(stream.send, events)).decode().split("\n\n")
        streamed = json.loads(last.removeprefix("data: "))["choices"][0]
        for choice in (whole.choice(), streamed):
            assert (choice["finish_reason"], choice["stop_reason"]) == ends
