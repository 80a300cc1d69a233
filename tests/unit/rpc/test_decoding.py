"""What does not parse is refused by name, for little work."""

import sys
from types import FrameType
from typing import Any

import pytest

from diptych.errors import InvalidRequestError
from diptych.rpc import utf8
from diptych.rpc.decoding import decode
from diptych.v1 import inference_pb2

_NOT_UTF8 = b"stop\xff"


def _broken(request: inference_pb2.GenerateRequest) -> bytes:
    """Its bytes, with the word "stop?" in them made no UTF-8."""
    data = request.SerializeToString()
    assert b"stop?" in data
    return data.replace(b"stop?", _NOT_UTF8)


def _refusal(data: bytes) -> tuple[str, int]:
    """The field that is refused, and how many lines of the search ran."""
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != utf8.__file__:
            return None
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(InvalidRequestError) as caught:
            decode(inference_pb2.GenerateRequest, data)
    finally:
        sys.settrace(before)
    return caught.value.field, num_lines


def test_nested_string_is_named() -> None:
    """The path leads through messages and repeated fields."""
    request = inference_pb2.GenerateRequest()
    for word in ("fine", "stop?"):
        request.chat.messages.add(role="user").content.add(text=word)
    assert _refusal(_broken(request))[0] == "chat.messages[1].content[0].text"


def test_token_ids_are_not_looked_at() -> None:
    """A request of many ids costs the search what one of a single id does."""
    lines = set()
    for num_ids in (1, 10_000):
        request = inference_pb2.GenerateRequest()
        request.tokens.ids.extend([7] * num_ids)
        request.emitted_token_ids.extend([7] * num_ids)
        request.sampling.stop.append("stop?")
        data = _broken(request)
        _refusal(data)  # the twin is made once
        field, num_lines = _refusal(data)
        assert field == "sampling.stop[0]"
        lines.add(num_lines)
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
        _refusal(data)
        field, num_lines = _refusal(data)
        assert field == "request"
        lines.add(num_lines)
    assert len(lines) == 1
