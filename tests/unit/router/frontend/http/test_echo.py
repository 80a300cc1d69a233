"""A completion that is asked for with its prompt: what is told of that, and when."""

from typing import Any

import pytest

from diptych.errors import InvalidRequestError
from router.frontend.http.asked import Asked, Envelope
from router.frontend.http.completion_request import read_completion
from router.frontend.http.prompt_form import PromptWish

ENVELOPE = Envelope(request_id="r", num_bytes=9, max_model_len=100)


def completion(**members: Any) -> Asked:
    return read_completion({"model": "m", "prompt": "p", **members}, ENVELOPE)


def test_what_is_echoed_is_told_of_as_the_answer_is() -> None:
    asked = completion(echo=True, logprobs=3, prompt_logprobs=1)
    assert asked.prompt == PromptWish(echoes=True, num_top=1, text="p")
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
