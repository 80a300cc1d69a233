"""Tools of a request: told to the template, and refused where nothing could come of them."""

import json
import sys
from pathlib import Path

import pytest

from diptych.errors import InvalidRequestError
from diptych.v1 import inference_pb2
from router.frontend import validation
from router.frontend.tools import constraint_of, read_arguments
from tests.text_models import byte_level_tokenizer, write_folder
from tests.unit.router.frontend.asked import facts, read, tools


def test_tools_reach_the_template_where_it_knows_them_and_may_be_called(tmp_path: Path) -> None:
    asked = tools("f", description="d", parameters={"type": "object"})
    knows = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    knowing = write_folder(tmp_path, byte_level_tokenizer(), chat_template=knows)
    said = '[{"type": "function", "function": {"name": "f", "description": "d", '
    said += '"parameters": {"type": "object"}}}]a'
    assert knowing.decode(validation.tokenize(read(asked), knowing, 1000).token_ids) == said
    asked.chat.tool_choice = inference_pb2.TOOL_CHOICE_NONE
    assert knowing.decode(validation.tokenize(read(asked), knowing, 1000).token_ids) == "a"


LARGEST = sys.float_info.max


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ("", {}),
        ('{"a": 1932e119431419, "b": [-1e999]}', {"a": LARGEST, "b": [-LARGEST]}),
        ('{"a": %s}' % ("9" * 5000), {"a": LARGEST}),
        ('{"a": %s}' % ("9" * 400), {"a": int("9" * 400)}),
        (r'{"\ud83d": ["x\ud83d", {"b": "\ud83d\ude00"}]}', {"�": ["x�", {"b": "😀"}]}),
    ],
)
def test_what_a_model_wrote_can_be_sent_back(written: str, read_as: dict[str, object]) -> None:
    assert read_arguments(written, "at") == read_as
    json.dumps(read_arguments(written, "at"), ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize("written", ["[1]", "5", "{", '{"a": NaN}', '{"a": -Infinity}', "[" * 9**5])
def test_arguments_that_are_no_json_object_are_refused(written: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a JSON object") as caught:
        read_arguments(written, "at")
    assert caught.value.field == "at"


def test_schemas_that_are_too_large_to_be_held_to_are_refused() -> None:
    asked = tools("f", parameters={"description": "x" * 70_000})
    validation.check(read(asked), facts())
    assert constraint_of(read(asked)) is None
    asked.chat.tool_choice = inference_pb2.TOOL_CHOICE_REQUIRED
    with pytest.raises(InvalidRequestError) as caught:
        constraint_of(read(asked))
    assert caught.value.field == "chat.tools"


def test_tools_that_the_template_would_not_tell_of_are_refused(tmp_path: Path) -> None:
    tokenizer = write_folder(tmp_path, byte_level_tokenizer())
    with pytest.raises(InvalidRequestError) as caught:
        validation.tokenize(read(tools("f")), tokenizer, 1000)
    assert caught.value.field == "chat.tools"
