"""A field of a request has the name that its client wrote."""

import pytest

from diptych.errors import InvalidRequestError
from router.frontend.field_names import renamed


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sampling.top_p", "top_p"),
        ("sampling.stop[1]", "stop[1]"),
        ("tokens.ids[3]", "prompt[3]"),
        ("tokens", "prompt"),
        ("text", "prompt"),
        ("texture", "texture"),
    ],
)
def test_a_field_has_the_clients_name(ours: str, theirs: str) -> None:
    names = {"tokens.ids": "prompt", "tokens": "prompt", "text": "prompt", "sampling.": ""}
    error = renamed(InvalidRequestError("is wrong", field=ours), names)
    assert (error.field, error.message) == (theirs, f"{theirs}: is wrong")
