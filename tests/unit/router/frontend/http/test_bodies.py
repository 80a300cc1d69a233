"""What a body may be, and how many values it may have."""

import json
from collections.abc import Sequence

import pytest

from diptych.errors import InvalidRequestError
from router.frontend.http.body import parse
from router.frontend.validation import MOST_IDS

MAX_LEN = 100


def of_prompts(prompts: Sequence[Sequence[int]]) -> bytes:
    return json.dumps({"input": prompts}).encode()


def test_prompts_of_one_body_may_have_many_ids_together() -> None:
    """As clients send texts that they tokenised themselves, a thousand at a time."""
    prompts = [[7] * 200 for _ in range(2048)]
    assert parse(of_prompts(prompts), MAX_LEN, MOST_IDS)["input"] == prompts
    with pytest.raises(InvalidRequestError, match="values"):
        parse(of_prompts(prompts), MAX_LEN)


@pytest.mark.parametrize("value", ["7", "[]", "{}", '""'])
def test_of_nothing_else_there_may_be_more(value: str) -> None:
    num = MOST_IDS + 1 if value == "7" else 140_000
    data = f'{{"input":[{",".join([value] * num)}]}}'.encode()
    with pytest.raises(InvalidRequestError, match="values"):
        parse(data, MAX_LEN, MOST_IDS)


@pytest.mark.parametrize(
    "value",
    [
        b"[" + b"[]," * 200_000 + b"0]",
        b"[" + b"{}," * 200_000 + b"0]",
        b"[0" + b",0" * 200_000 + b"]",
    ],
)
def test_more_values_than_any_request_needs_are_not_made(value: bytes) -> None:
    """A member that nobody knows may not cost what no member that is known may."""
    with pytest.raises(InvalidRequestError, match=r"has more than [0-9]* values"):
        parse(b'{"new": ' + value + b"}", MAX_LEN)


def test_a_text_is_one_value_whatever_it_says() -> None:
    text = b'a,[{\\"' * 200_000 + b"\\\\"
    assert (
        len(str(parse(b'{"prompt": "' + text + b'", "b": ["c,"]}', MAX_LEN)["prompt"])) == 1_000_001
    )


def test_a_text_without_end_is_gone_through_once() -> None:
    """As often as it has quotes would take hours."""
    with pytest.raises(InvalidRequestError, match="is not JSON"):
        parse(b'{"prompt": "' + b',\\"' * 1_000_000, MAX_LEN)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nul",
        b"5",
        b'{"a": NaN}',
        b'{"a": 1, "a": 1}',
        b'{"a": "\\ud83d"}',
        b"\xef\xbb\xbf{}",
        b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(data, MAX_LEN)
    assert caught.value.field == "body"
