"""What a client asks for, on the wire and as a router reads it."""

import json
from types import MappingProxyType
from typing import Any

import pytest

from diptych.client import (
    ChatMessage,
    SamplingOptions,
    Tool,
    ToolChoice,
    Tools,
    build_request,
)
from diptych.errors import InvalidRequestError
from diptych.text import chat_template
from diptych.v1 import inference_pb2
from router.frontend import public_messages
from router.generation import request as generation

CALL = inference_pb2.ToolCall(id="1", name="f", arguments='{"x": 1}')
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}


def read(**asked: Any) -> generation.ChatPrompt:
    message = build_request(**asked)
    prompt = public_messages.read_request(message, message.ByteSize()).prompt
    assert isinstance(prompt, generation.ChatPrompt)
    return prompt


def test_tools_and_their_turns_are_what_the_router_reads() -> None:
    turns = [
        ("user", "a"),
        ChatMessage("assistant", "", tool_calls=[CALL], reasoning="r"),
        ChatMessage("tool", "2", tool_call_id="1"),
        ChatMessage("assistant", "b", tool_calls=[CALL]),
    ]
    tools = Tools([Tool("f", "d", SCHEMA), Tool("g")], ToolChoice.REQUIRED, "f", is_parallel=False)
    assert read(messages=turns, tools=tools) == generation.ChatPrompt(
        (
            chat_template.Message("user", "a"),
            chat_template.Message(
                "assistant", "", (chat_template.ToolCall("1", "f", {"x": 1}),), reasoning="r"
            ),
            chat_template.Message("tool", "2", tool_call_id="1"),
            chat_template.Message("assistant", "b", (chat_template.ToolCall("1", "f", {"x": 1}),)),
        ),
        tools=(chat_template.Tool("f", "d", SCHEMA), chat_template.Tool("g")),
        tool_choice=generation.ToolChoice.REQUIRED,
        required_tool="f",
        has_parallel_calls=False,
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"properties": MappingProxyType({"a": MappingProxyType({"minimum": 2**53})})},
        {"required": ("a", "b"), "enum": [True, None, 1.5, {}, []]},
    ],
)
def test_parameters_arrive_as_they_are_whatever_holds_them(parameters: dict[str, Any]) -> None:
    (tool,) = read(messages=[("user", "a")], tools=Tools([Tool("f", "", parameters)])).tools
    plain = json.loads(json.dumps(parameters, default=dict))
    assert tool.parameters == plain
    said = read(messages=[("user", "a")], template_arguments=parameters)
    assert said.template_arguments == plain


@pytest.mark.parametrize(
    "value",
    [2**53 + 1, 10**400, float("nan"), float("inf"), b"bytes", {1, 2}],
    ids=["odd", "huge", "nan", "endless", "bytes", "set"],
)
def test_what_would_arrive_as_something_else_is_refused_with_its_tool(value: Any) -> None:
    tools = Tools([Tool("f"), Tool("g", "", {"properties": {"a": [value]}})])
    with pytest.raises(ValueError, match="parameters of tool 'g': "):
        build_request(messages=[("user", "a")], tools=tools)
    with pytest.raises(ValueError, match="template_arguments: "):
        build_request(messages=[("user", "a")], template_arguments={"a": value})


@pytest.mark.parametrize("choice", ToolChoice)
def test_each_choice_is_the_routers(choice: ToolChoice) -> None:
    asked = read(messages=[("user", "a")], tools=Tools([Tool("f")], choice))
    assert asked.tool_choice is generation.ToolChoice[choice.name]


def test_a_chat_without_tools_says_nothing_of_them() -> None:
    plain = build_request(messages=[("user", "a")])
    assert {item.name for item, _ in plain.chat.ListFields()} == {"messages"}
    assert read(messages=[("user", "a")], split_reasoning=True).is_split


@pytest.mark.parametrize(
    "asked",
    [{"tools": Tools([Tool("f")])}, {"template_arguments": {"a": 1}}, {"split_reasoning": True}],
)
def test_what_is_for_chats_alone_is_refused_elsewhere(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="for messages"):
        build_request("a prompt", **asked)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (SamplingOptions(max_tokens=-1), "sampling.max_tokens"),
        (SamplingOptions(seed=2**64), "sampling.seed"),
        (SamplingOptions(stop_token_ids=(3, -7)), "sampling.stop_token_ids[1]"),
        (SamplingOptions(logit_bias={2**32: 1.0}), "sampling.logit_bias"),
    ],
)
def test_a_number_that_the_wire_has_no_room_for_is_named(
    options: SamplingOptions, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_request("a", options=options)
    assert caught.value.field == field
