"""The tools of a chat, and whether to call them, as members of a JSON body. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

from pydantic import BeforeValidator, FailFast, Field

from diptych.errors import InvalidRequestError
from diptych.text.chat_template import Tool
from router.frontend.http.body import StrictModel, as_list, validated
from router.frontend.tools import check_num_tools
from router.generation.request import ToolChoice

_CHOICES: Final = {
    "auto": ToolChoice.AUTO,
    "none": ToolChoice.NONE,
    "required": ToolChoice.REQUIRED,
}


class _Function(StrictModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(StrictModel):
    type: str
    function: _Function | None = None


class _Named(StrictModel):
    name: str


class _NamedChoice(StrictModel):
    type: str
    function: _Named | None = None


class _Choice(StrictModel):
    tool_choice: _NamedChoice


class _Body(StrictModel):
    tools: Annotated[list[_Tool], FailFast(), BeforeValidator(as_list)] = Field(
        default_factory=list
    )
    parallel_tool_calls: bool | None = None


class SaidTools(NamedTuple):
    """What a body says of tools."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    required: str
    """The one that has to be called, if there is one."""
    has_parallel_calls: bool

    @property
    def names(self) -> Mapping[str, str]:
        """How to call the request's fields, see :func:`router.frontend.field_names.renamed`."""
        each = {
            f"chat.tools[{index}].": f"tools[{index}].function." for index in range(len(self.tools))
        }
        return {
            **each,
            "chat.tools": "tools",
            "chat.tool_choice": "tool_choice",
            "chat.required_tool": "tool_choice.function.name",
        }


def read_tools(content: Mapping[str, object]) -> SaidTools:
    """The tools and the choice among them. Raises InvalidRequestError."""
    given = content.get("tools")
    if isinstance(given, list):
        try:
            check_num_tools(len(given))
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message.partition(": ")[2], field="tools") from None
    read = validated(_Body, content)
    tools = tuple(_tool(each, f"tools[{index}]") for index, each in enumerate(read.tools))
    choice, required = _read_choice(content.get("tool_choice"))
    return SaidTools(tools, choice, required, read.parallel_tool_calls is not False)


def _tool(said: _Tool, path: str) -> Tool:
    if said.type != "function":
        raise InvalidRequestError("only function is supported", field=f"{path}.type")
    if said.function is None:
        raise InvalidRequestError("is required", field=f"{path}.function")
    function = said.function
    return Tool(function.name, function.description or "", function.parameters)


def _read_choice(value: object) -> tuple[ToolChoice, str]:
    if value is None:
        return ToolChoice.AUTO, ""
    if isinstance(value, str) and value in _CHOICES:
        return _CHOICES[value], ""
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"should be one of {', '.join(_CHOICES)}, or name a function", field="tool_choice"
        )
    named = validated(_Choice, {"tool_choice": value}).tool_choice
    if named.type != "function":
        raise InvalidRequestError("only function is supported", field="tool_choice.type")
    if named.function is None:
        raise InvalidRequestError("is required", field="tool_choice.function")
    return ToolChoice.REQUIRED, named.function.name
