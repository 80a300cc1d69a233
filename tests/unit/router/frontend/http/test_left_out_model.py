"""A body that names no model is for the one that is there."""

from collections.abc import Callable, Mapping

import pytest

from router.frontend.http.asked import Asked, Envelope
from router.frontend.http.chat_request import read_chat
from router.frontend.http.completion_request import read_completion
from router.frontend.http.response_request import read_response

ENVELOPE = Envelope(request_id="r", num_bytes=9, max_model_len=100)


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (read_completion, {"prompt": "p"}),
        (read_chat, {"messages": [{"role": "user", "content": "a"}]}),
        (read_response, {"input": "a"}),
    ],
)
def test_a_body_may_leave_out_its_model(
    read: Callable[[Mapping[str, object], Envelope], Asked], said: dict[str, object]
) -> None:
    assert read(said, ENVELOPE).request.model == ""
    assert read({**said, "model": None}, ENVELOPE).request.model == ""
    assert read({**said, "model": "m"}, ENVELOPE).request.model == "m"
