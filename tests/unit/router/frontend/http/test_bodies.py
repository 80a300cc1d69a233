"""How many values a body may have."""

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
