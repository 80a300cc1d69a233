"""A chat that may call only some of its tools."""

from typing import Any

import pytest

from diptych.errors import InvalidRequestError
from diptych.text.chat_template import Tool
from router.frontend.field_names import renamed
from router.frontend.http.tool_fields import SaidTools, read_tools
from router.frontend.tools import MAX_TOOL_BYTES, MAX_TOOLS
from router.generation.request import ToolChoice

F, G = ({"type": "function", "function": {"name": name}} for name in "fg")


UNKNOWN = {"type": "function", "function": {"name": "h"}}


def choosing(**allowed: Any) -> SaidTools:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", **allowed}}
    return read_tools({"tools": [F, G], "tool_choice": choice})


def test_a_chat_is_told_of_the_tools_that_it_may_call() -> None:
    said = choosing(tools=[G])
    assert (said.tools, said.choice, said.required) == ((Tool("g"),), ToolChoice.AUTO, "")
    wrong = InvalidRequestError("bad", field="chat.tools[0].name")
    assert renamed(wrong, said.names).field == "tools[1].function.name"
    assert choosing(mode="required", tools=[F, G]).choice is ToolChoice.REQUIRED


@pytest.mark.parametrize(
    ("allowed", "field"),
    [
        ({}, "tools"),
        ({"tools": []}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [F, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [F, UNKNOWN]}, "tools[1].function.name"),
        ({"tools": [F], "mode": "none"}, "mode"),
        ({"tools": ["f"] * (MAX_TOOLS + 1)}, "tools"),
    ],
)
def test_what_is_wrong_with_them_is_named(allowed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        choosing(**allowed)
    assert caught.value.field == f"tool_choice.allowed_tools.{field}"


@pytest.mark.parametrize(
    ("left_out", "field"),
    [
        ({"name": "g", "description": "d" * MAX_TOOL_BYTES}, "tools"),
        ({"name": "f"}, "tools[1].function.name"),
        ({"name": "no name"}, "tools[1].function.name"),
        ({"name": "g", "parameters": {"type": "array"}}, "tools[1].function.parameters.type"),
    ],
)
def test_those_that_it_is_not_told_of_are_checked_too(left_out: Any, field: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [F]}}
    tools = [F, {"type": "function", "function": left_out}]
    with pytest.raises(InvalidRequestError) as caught:
        read_tools({"tools": tools, "tool_choice": choice})
    assert caught.value.field == field
