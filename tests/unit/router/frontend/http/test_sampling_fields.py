"""Sampling parameters as clients of other servers say them, and what is wrong with them."""

import pytest

from diptych.errors import InvalidRequestError
from diptych.sampling_params import check_options
from router.frontend.field_names import renamed
from router.frontend.http.asked import Envelope
from router.frontend.http.completion_request import read_completion
from router.frontend.http.sampling_fields import read_sampling


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (-1, None),  # as vLLM: any
        (0, 0),
        (2**64 - 1, 2**64 - 1),
        (-2, 2**64 - 2),
        (-(2**63), 2**63),
    ],
)
def test_a_seed_may_be_a_signed_number(said: int, expected: int | None) -> None:
    sampling = read_sampling({"seed": said})
    assert sampling.seed == expected
    check_options(sampling, "sampling")


@pytest.mark.parametrize("said", [-(2**63) - 1, 2**64])
def test_a_seed_of_more_bits_is_refused(said: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"^sampling\.seed"):
        check_options(read_sampling({"seed": said}), "sampling")


@pytest.mark.parametrize("said", ["1" * 5000, "1" * 30, "01", "\u0661", "-1", ""])
def test_what_is_no_token_id_is_called_so(said: str) -> None:
    """However long: Python's own limits are no news to a client."""
    with pytest.raises(InvalidRequestError, match=r"^logit_bias: '.{0,64}' is not a token id$"):
        read_sampling({"logit_bias": {said: 1}})


@pytest.mark.parametrize("prompt", ["p", ["p", "q"]])
def test_what_is_wrong_with_echoed_log_probabilities_is_named_as_its_client_wrote_it(
    prompt: object,
) -> None:
    error = InvalidRequestError("no", field="sampling.prompt_logprobs")
    body = {"model": "m", "prompt": prompt, "echo": True, "logprobs": 2}
    envelope = Envelope(request_id="r", num_bytes=9, max_model_len=100)
    for more, field in (({}, "logprobs"), ({"prompt_logprobs": 1}, "prompt_logprobs")):
        asked = read_completion({**body, **more}, envelope)
        for each in (asked, *asked.others):
            assert renamed(error, each.names).field == field
