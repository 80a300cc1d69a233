"""What does not parse is refused by name, for little work."""

from functools import partial

import pytest

from diptych.errors import InvalidRequestError
from diptych.rpc import utf8
from diptych.rpc.decoding import decode
from diptych.v1 import inference_pb2
from tests.work_count import num_lines_run

_NOT_UTF8 = b"stop\xff"


def _broken(request: inference_pb2.GenerateRequest) -> bytes:
    """Its bytes, with the word "stop?" in them made no UTF-8."""
    data = request.SerializeToString()
    assert b"stop?" in data
    return data.replace(b"stop?", _NOT_UTF8)


def _refused_field(data: bytes) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decode(inference_pb2.GenerateRequest, data)
    return caught.value.field


def test_nested_string_is_named() -> None:
    """The path leads through messages and repeated fields."""
    request = inference_pb2.GenerateRequest()
    for word in ("fine", "stop?"):
        request.chat.messages.add(role="user").content.add(text=word)
    assert _refused_field(_broken(request)) == "chat.messages[1].content[0].text"


def test_token_ids_are_not_looked_at() -> None:
    """A request of many ids costs the search what one of a single id does."""
    lines = set()
    for num_ids in (1, 10_000):
        request = inference_pb2.GenerateRequest()
        request.tokens.ids.extend([7] * num_ids)
        request.emitted_token_ids.extend([7] * num_ids)
        request.sampling.stop.append("stop?")
        data = _broken(request)
        assert _refused_field(data) == "sampling.stop[0]"  # the twin is made once
        lines.add(num_lines_run(utf8, partial(_refused_field, data)))
    assert len(lines) == 1


def test_search_is_bounded() -> None:
    """A string after very many others is not found: the refusal names the request."""
    lines = set()
    for extra in (0, 5000):
        request = inference_pb2.GenerateRequest()
        for _ in range(utf8.MAX_SEARCHED + extra):
            request.chat.messages.add()
        request.chat.messages.add(role="stop?")
        data = _broken(request)
        assert _refused_field(data) == "request"
        lines.add(num_lines_run(utf8, partial(_refused_field, data)))
    assert len(lines) == 1
