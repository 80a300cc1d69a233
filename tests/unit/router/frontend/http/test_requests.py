"""Bodies of the HTTP API become plain requests, or are refused by the name of a member."""

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from diptych.errors import InvalidRequestError
from diptych.sampling_params import NEUTRAL, OPTIONS, SamplingOptions
from diptych.text.chat_template import Message
from router.frontend.http import unserved
from router.frontend.http.asked import Asked, Envelope
from router.frontend.http.body import parse
from router.frontend.http.chat_request import read_chat
from router.frontend.http.completion_request import read_completion
from router.frontend.http.sampling_fields import SERVED, read_sampling
from router.frontend.validation import MAX_MESSAGES, MAX_PARTS
from router.generation.request import ChatPrompt, TextPrompt, TokenPrompt

ENVELOPE = Envelope(request_id="r", num_bytes=9)
TURN = {"role": "user", "content": "hi"}


def completion(**members: Any) -> Asked:
    return read_completion({"model": "m", "prompt": "p", **members}, ENVELOPE)


def chat(**members: Any) -> Asked:
    return read_chat({"model": "m", "messages": [TURN], **members}, ENVELOPE)


def refusal(content: Mapping[str, object], *, is_chat: bool = False) -> InvalidRequestError:
    read = read_chat if is_chat else read_completion
    with pytest.raises(InvalidRequestError) as caught:
        read(content, ENVELOPE)
    return caught.value


def test_every_declared_parameter_is_read_under_its_name() -> None:
    values: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "seed": 2**64 - 1,
        "max_tokens": 5,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [7, 8],
        "ignore_eos": True,
    }
    assert set(values) == SERVED, "a parameter was added: say here what it is over HTTP"
    expected = {**values, "stop": ("a", "b"), "stop_token_ids": (7, 8)}
    assert read_sampling(values) == SamplingOptions(**expected)
    assert read_sampling(dict.fromkeys(values)) == SamplingOptions()


def test_nothing_is_served_and_refused() -> None:
    for table in (unserved.OF_COMPLETION, unserved.OF_CHAT):
        assert not SERVED & set(table)
        assert set(OPTIONS) <= SERVED | set(table)
        assert set(NEUTRAL) <= set(table)


def test_a_completion() -> None:
    asked = completion(
        stop="x", cache_salt="s", stream=True, stream_options={"include_usage": True}
    )
    assert asked.request.prompt == TextPrompt("p")
    assert asked.request.sampling == SamplingOptions(max_tokens=16, stop=("x",))
    assert (asked.request.model, asked.request.request_id) == ("m", "r")
    assert (asked.request.cache_salt, asked.request.num_bytes) == ("s", 9)
    assert (asked.is_stream, asked.includes_usage) == (True, True)
    assert (completion().is_stream, completion().includes_usage) == (False, False)
    for given, expected in (
        ([1, 2], TokenPrompt([1, 2])),
        ([[1, 2]], TokenPrompt([1, 2])),
        (["a"], TextPrompt("a")),
        ([], TokenPrompt([])),
    ):
        assert completion(prompt=given).request.prompt == expected


def test_detail_16_what_is_not_said_is_left_to_the_models_makers() -> None:
    """The router fills it in, from what it logged of generation_config.json at its start."""
    assert chat().request.sampling == SamplingOptions()
    assert chat(temperature=None, top_p=None).request.sampling == SamplingOptions()


def test_a_chat() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    asked = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
        ],
        chat_template_kwargs={"enable_thinking": False},
    )
    assert asked.request.prompt == ChatPrompt(
        (Message("system", "be brief"), Message("user", "a b"), Message("assistant", "c")),
        {"enable_thinking": False},
    )
    assert asked.request.sampling == SamplingOptions()
    assert chat(max_tokens=5).request.sampling.max_tokens == 5
    both = chat(max_tokens=5, max_completion_tokens=3)
    assert both.request.sampling.max_tokens == 3
    assert both.names["sampling.max_tokens"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": 1}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"return_margins": True}, "return_margins"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
@pytest.mark.parametrize("is_chat", [False, True])
def test_what_is_wrong_or_not_served_is_named(
    members: dict[str, Any], field: str, is_chat: bool
) -> None:
    content = {"model": "m", "prompt": "p", "messages": [TURN], **members}
    error = refusal(content, is_chat=is_chat)
    assert error.field == field
    assert error.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"messages": [TURN] * (MAX_MESSAGES + 1)}, "messages"),
        ({"messages": [{**TURN, "content": [{"type": "text", "text": ""}] * (MAX_PARTS + 1)}]},
         "messages[0].content"),
        ({"messages": [{**TURN, "content": [{"type": "text", "text": ""}] * MAX_PARTS}, TURN]},
         "messages"),
        ({"messages": [TURN, {**TURN, "name": "x"}]}, "messages[1].name"),
        ({"messages": [{**TURN, "role": "tool"}]}, "messages[0].role"),
        ({"messages": [{**TURN, "content": None}]}, "messages[0].content"),
        ({"messages": [{**TURN, "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [5]}, "messages[0]"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{}]}, "tools"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_chat_is_named(members: dict[str, Any], field: str) -> None:
    assert refusal({"model": "m", "messages": [TURN], **members}, is_chat=True).field == field


@pytest.mark.parametrize(
    "members",
    [
        {"messages": [{"role": "user", "content": [{}] * 50}]},
        {"messages": [5] * 50},
        {"prompt": ["a", *[5] * 50]},
        {"prompt": [5, *["a"] * 50]},
        {"prompt": "p", "stop": [5] * 17},
    ],
)
def test_no_work_is_spent_after_the_first_error(members: dict[str, Any]) -> None:
    """A body of megabytes may be wrong in every part: the first is what is told."""
    error = refusal({"model": "m", **members}, is_chat="messages" in members)
    reasons = error.__context__
    assert not isinstance(reasons, ValidationError) or reasons.error_count() == 1


def test_detail_23_what_changes_nothing_is_no_refusal() -> None:
    void = dict.fromkeys(unserved.OF_CHAT)
    assert chat(**void, user="u", metadata={"a": 1}, seed=None) == chat()
    same = {name: values[0] for name, values in unserved.OF_CHAT.items() if values}
    assert chat(**same).request == chat().request
    same = {name: values[0] for name, values in unserved.OF_COMPLETION.items() if values}
    assert completion(**same).request == completion().request


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
        parse(data)
    assert caught.value.field == "body"
