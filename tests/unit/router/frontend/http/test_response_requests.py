"""Bodies of the Responses API become plain requests, or are refused by the name of a member."""

import math
from typing import Any

import pytest

from diptych.constraint import Constraint
from diptych.errors import InvalidRequestError
from diptych.sampling_params import SamplingOptions
from diptych.text.chat_template import Message, Tool, ToolCall
from router.frontend.field_names import renamed
from router.frontend.http.asked import Asked, Envelope
from router.frontend.http.response_request import read_response
from router.frontend.tools import MAX_TOOL_BYTES
from router.frontend.validation import MAX_MESSAGES, MAX_PARTS
from router.generation.request import ChatPrompt, ToolChoice

ENVELOPE = Envelope(request_id="r", num_bytes=9, max_model_len=100)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}},
    {"type": "function", "name": "g", "strict": True},
]
LONG = "x" * (2 * MAX_TOOL_BYTES)
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'}


def response(**members: Any) -> Asked:
    return read_response({"model": "m", "input": "hi", **members}, ENVELOPE)


def prompt(asked: Asked) -> ChatPrompt:
    assert isinstance(asked.request.prompt, ChatPrompt)
    return asked.request.prompt


def refused(**members: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        response(**members)
    return caught.value.field


def test_a_text_is_what_the_user_says_after_the_instructions() -> None:
    asked = response(instructions="be brief", chat_template_kwargs={"a": 1}, cache_salt="s")
    assert prompt(asked) == ChatPrompt(
        (Message("system", "be brief"), Message("user", "hi")), {"a": 1}, is_split=True
    )
    assert (asked.request.model, asked.request.request_id) == ("m", "r")
    assert (asked.request.cache_salt, asked.request.num_bytes) == ("s", 9)
    assert asked.request.sampling == SamplingOptions()
    assert not asked.is_stream


def test_lists_that_are_null_are_left_out() -> None:
    assert response(include=None, tools=None) == response()


def test_sampling_is_said_as_elsewhere_but_for_its_length() -> None:
    asked = response(temperature=0.5, top_p=0.9, max_output_tokens=7, seed=3, stop="x")
    expected = SamplingOptions(temperature=0.5, top_p=0.9, max_tokens=7, seed=3, stop=("x",))
    assert asked.request.sampling == expected
    wrong = InvalidRequestError("too many", field="sampling.max_tokens")
    assert renamed(wrong, asked.names).field == "max_output_tokens"


def test_two_lengths_that_differ_are_refused() -> None:
    assert refused(max_output_tokens=7, max_tokens=8) == "max_tokens"
    for same in ({"max_tokens": 7}, {"max_tokens": None}, {}):
        asked = response(max_output_tokens=7, **same)
        assert asked.request.sampling.max_tokens == 7
    assert response(max_tokens=8, max_output_tokens=None).request.sampling.max_tokens == 8


def test_log_probabilities_are_asked_for_by_what_to_include() -> None:
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    assert response(include=include).request.sampling.logprobs == 0
    assert response(include=include, top_logprobs=3).request.sampling.logprobs == 3
    assert response(include=include[1:]).request.sampling.logprobs is None
    assert refused(top_logprobs=3) == "top_logprobs"
    assert refused(include=["thoughts"]) == "include[0]"


def test_what_a_model_said_in_one_turn_is_one_message() -> None:
    asked = response(
        instructions="i",
        input=[
            {"role": "developer", "content": "d"},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "u"}, {"type": "text", "text": "v"}],
            },
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "encrypted_content": None,
                "content": [{"type": "reasoning_text", "text": "t"}],
            },
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "a", "annotations": []}],
            },
            {**CALL, "id": "fc_1", "status": "completed"},
            {**CALL, "call_id": "2", "name": "g", "arguments": ""},
            {"type": "function_call_output", "call_id": "1", "output": "one"},
            {
                "type": "function_call_output",
                "call_id": "2",
                "output": [{"type": "input_text", "text": "two"}],
            },
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
            {"role": "assistant", "content": "b"},
            {"role": "assistant", "content": "c"},
        ],
    )
    called = (ToolCall("1", "f", {"x": 1}), ToolCall("2", "g", {}))
    assert prompt(asked).messages == (
        Message("system", "i"),
        Message("system", "d"),
        Message("user", "uv"),
        Message("assistant", "a", called, reasoning="t"),
        Message("tool", "one", tool_call_id="1"),
        Message("tool", "two", tool_call_id="2"),
        Message("assistant", "b", reasoning="s"),
        Message("assistant", "c"),
    )
    for ours, theirs in (
        ("chat.messages[0]", "instructions"),
        ("chat.messages[3].tool_calls[0].name", "input[4].name"),
        ("chat.messages[3].tool_calls[1].arguments", "input[5].arguments"),
        ("chat.messages[5].tool_call_id", "input[7].call_id"),
        ("chat.messages[7].content", "input[10].content"),
        ("chat.messages", "input"),
        ("chat.template_arguments.x", "chat_template_kwargs.x"),
    ):
        assert renamed(InvalidRequestError("bad", field=ours), asked.names).field == theirs


def test_tools_are_named_beside_their_type() -> None:
    asked = response(
        tools=TOOLS, tool_choice={"type": "function", "name": "g"}, parallel_tool_calls=False
    )
    assert prompt(asked) == ChatPrompt(
        (Message("user", "hi"),),
        tools=(Tool("f", "d", {"type": "object"}), Tool("g")),
        tool_choice=ToolChoice.REQUIRED,
        required_tool="g",
        has_parallel_calls=False,
        is_split=True,
    )
    for ours, theirs in (
        ("chat.tools[1].name", "tools[1].name"),
        ("chat.required_tool", "tool_choice.name"),
    ):
        assert renamed(InvalidRequestError("bad", field=ours), asked.names).field == theirs


def test_only_allowed_tools_are_told_of() -> None:
    allowed = {"type": "allowed_tools", "mode": "required"}
    asked = response(tools=TOOLS, tool_choice={**allowed, "tools": TOOLS[1:]})
    assert prompt(asked).tools == (Tool("g"),)
    assert prompt(asked).tool_choice is ToolChoice.REQUIRED
    wrong = InvalidRequestError("bad", field="chat.tools[0].name")
    assert renamed(wrong, asked.names).field == "tools[1].name"
    unknown = {**allowed, "tools": [{"type": "function", "name": "h"}]}
    assert refused(tools=TOOLS, tool_choice=unknown) == "tool_choice.tools[0].name"


def test_a_form_is_said_in_text() -> None:
    schema = {"type": "integer"}
    format_ = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    asked = response(text={"format": format_, "verbosity": "medium"})
    assert asked.request.sampling.constraint == Constraint.json_schema(schema)
    wrong = InvalidRequestError("bad", field="sampling.constraint.json_schema")
    assert renamed(wrong, asked.names).field == "text.format.schema"
    any_object = response(text={"format": {"type": "json_object"}})
    assert any_object.request.sampling.constraint == Constraint.json_schema({"type": "object"})
    assert response(text={"format": {"type": "text"}}).request.sampling.constraint is None


def test_what_was_asked_is_repeated() -> None:
    plain = response().repeated
    assert plain["text"] == {"format": {"type": "text"}}
    assert (plain["tools"], plain["tool_choice"], plain["metadata"]) == ([], "auto", {})
    members: dict[str, Any] = {
        "instructions": "i",
        "max_output_tokens": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "me",
        "text": {"format": {"type": "json_object"}},
        "tool_choice": "none",
        "tools": [{**TOOLS[0], "strict": None}, {**TOOLS[1], "description": "e", "parameters": {}}],
    }
    assert response(**members).repeated == {**members, "top_logprobs": 0}


def test_tools_and_forms_are_repeated_with_the_members_that_nobody_said() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    repeated = response(tools=TOOLS, text={"format": form}).repeated
    first = {**TOOLS[0], "strict": None}
    assert repeated["tools"] == [first, {**TOOLS[1], "description": None, "parameters": None}]
    assert repeated["text"] == {"format": {**form, "description": None, "strict": False}}


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"tools": [{**TOOLS[0], "note": LONG}]}, "tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "f", "note": LONG}},
            "tool_choice",
        ),
        ({"text": {"format": {"type": "text", "note": LONG}}}, "text"),
    ],
)
def test_what_would_be_repeated_is_short_though_nobody_reads_it(
    members: dict[str, Any], field: str
) -> None:
    assert refused(**members) == field


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "a"}], "input": None}, "messages"),
        ({"logprobs": True}, "logprobs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"reasoning": "low"}, "reasoning"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": "plain"}, "text"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOLS[0], {"type": "mcp", "server_label": "x"}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": {}}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "a", "tools": TOOLS}},
            "tool_choice.mode",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
        ),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{}] * (MAX_MESSAGES + 1)}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "text"}] * MAX_PARTS}] * 2}, "input"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call", "id": "1"}]}, "input[0].type"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name"),
        ({"input": [{**CALL, "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"safety_identifier": "x" * 65}, "safety_identifier"),
        ({"priority": "first"}, "priority"),
    ],
)
def test_what_is_wrong_or_not_served_is_named(members: dict[str, Any], field: str) -> None:
    assert refused(**members) == field


def test_who_says_it_as_a_chat_does_is_told_where_it_is_said() -> None:
    with pytest.raises(InvalidRequestError, match=r"is said in text\.format here"):
        response(response_format={"type": "json_object"})


def test_what_changes_nothing_here_is_passed_over() -> None:
    void = {
        "add_generation_prompt": True,
        "background": False,
        "function_call": "auto",
        "logprobs": False,
        "max_tool_calls": 3,
        "previous_response_id": None,
        "reasoning": {"effort": None},
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "store": False,
        "stream_options": {"include_obfuscation": False},
        "truncation": "disabled",
        "user": "me",
    }
    assert response(**void) == response()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tools", [{**TOOLS[0], "more": math.inf}]),
        ("tool_choice", {"type": "function", "name": "f", "more": math.inf}),
        ("text", {"format": {"type": "text", "more": [-math.inf]}}),
    ],
)
def test_a_number_that_no_json_could_repeat_is_refused(name: str, said: object) -> None:
    """1e999 is JSON, and is read as infinity."""
    assert refused(**{"tools": TOOLS, name: said}) == name
