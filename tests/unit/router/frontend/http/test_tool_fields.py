"""A chat that may call only some of its tools."""

from typing import Any

import pytest

from diptych.errors import InvalidRequestError
from diptych.text.chat_template import Tool
from router.frontend.field_names import renamed
from router.frontend.http.tool_fields import SaidTools, read_tools
from router.generation.request import ToolChoice

F, G = ({"type": "function", "function": {"name": name}} for name in "fg")


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
        ({"tools": [F, {"type": "function", "function": {"name": "h"}}]}, "tools[1].function.name"),
        ({"tools": [F], "mode": "none"}, "mode"),
    ],
)
def test_what_is_wrong_with_them_is_named(allowed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        choosing(**allowed)
    assert caught.value.field == f"tool_choice.allowed_tools.{field}"
