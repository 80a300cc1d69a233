"""Log probabilities that an answer keeps until it is written have a bound."""

from typing import Any

import pytest

from diptych.errors import InvalidRequestError
from diptych.sampling_params import SamplingOptions
from router.frontend import told_logprobs, validation
from router.frontend.validation import EncodedPrompt
from router.generation.request import GenerationRequest, LogprobRoom, TokenPrompt
from router.request.resolved import ResolvedRequest
from tests.unit.router.frontend.asked import MAX_LEN, facts

NUM_PROMPT = 5


def resolve(num: int | None, *, is_of_prompt: bool = False, **sampling: Any) -> ResolvedRequest:
    """With room for so many; None: it is not counted."""
    room = None if num is None else LogprobRoom(num, is_of_prompt)
    request = GenerationRequest(
        prompt=TokenPrompt([1] * NUM_PROMPT),
        sampling=SamplingOptions(**sampling),
        logprob_room=room,
        num_bytes=0,
    )
    return validation.resolve(request, EncodedPrompt([1] * NUM_PROMPT), facts(), drawn_seed=7)


@pytest.mark.parametrize(
    ("sampling", "num", "field"),
    [
        ({"prompt_logprobs": 20}, NUM_PROMPT * 21, "prompt_logprobs"),
        ({"logprobs": 2, "max_tokens": 3, "n": 4}, 3 * 4 * 3, "logprobs"),
        ({"logprobs": 0, "max_tokens": 3, "best_of": 4}, 3 * 4, "logprobs"),
        ({"logprobs": 1, "prompt_logprobs": 1, "max_tokens": 2}, 2 * (NUM_PROMPT + 2), "prompt_"),
    ],
)
def test_one_too_many_is_refused_by_name(sampling: dict[str, Any], num: int, field: str) -> None:
    assert resolve(num, **sampling).num_logprobs == num
    with pytest.raises(InvalidRequestError, match=f"^sampling.{field}"):
        resolve(num - 1, **sampling)
    is_kept = "best_of" in sampling
    assert resolve(None, **sampling).num_logprobs == (num if is_kept else 0)


def test_those_that_are_written_as_they_come_do_not_count() -> None:
    sampling: dict[str, Any] = {"logprobs": 1, "prompt_logprobs": 1, "max_tokens": 3}
    num = NUM_PROMPT * 2
    assert resolve(num, is_of_prompt=True, **sampling).num_logprobs == num
    with pytest.raises(InvalidRequestError):
        resolve(num - 1, is_of_prompt=True, **sampling)


def test_an_output_of_any_length_ends_where_the_room_does() -> None:
    sampling: dict[str, Any] = {"logprobs": 1, "n": 2}
    assert resolve(3 * 4 + 1, **sampling).shape.max_tokens == 3
    assert resolve(10**6, **sampling).shape.max_tokens == MAX_LEN - NUM_PROMPT
    with pytest.raises(InvalidRequestError, match="logprobs"):
        resolve(3, **sampling)


def test_those_of_choices_of_which_the_best_are_told_have_a_bound_over_grpc_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are all kept until the last choice has ended."""
    monkeypatch.setattr(told_logprobs, "MAX_LOGPROBS", 24)
    of_best: dict[str, Any] = {"logprobs": 1, "prompt_logprobs": 20, "best_of": 4}
    assert resolve(None, max_tokens=3, **of_best).num_logprobs == 24
    with pytest.raises(InvalidRequestError, match=r"^sampling\.logprobs"):
        resolve(None, max_tokens=4, **of_best)
    assert resolve(None, **of_best).shape.max_tokens == 3
    assert resolve(None, max_tokens=4, **of_best, n=4).num_logprobs == 0
