"""The tools of a request, and whether to call them, as members of a JSON body. Pure.

Chats and responses say the same of a function, chats within a member of its own
(``tools[0].function.name``), responses beside its type: a :class:`ToolSyntax` is which.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

from pydantic import BeforeValidator, FailFast, Field

from diptych.errors import InvalidRequestError
from diptych.text.chat_template import Message, Tool
from router.frontend.field_names import renamed
from router.frontend.http.body import StrictModel, as_list, validated
from router.frontend.tools import check_each, check_num_tools
from router.generation.request import ChatPrompt, ToolChoice

_CHOICES: Final = {
    "auto": ToolChoice.AUTO,
    "none": ToolChoice.NONE,
    "required": ToolChoice.REQUIRED,
}
_FUNCTION: Final = "function"
_ALLOWED: Final = "allowed_tools"


class _Typed(StrictModel):
    type: str


class _Named(StrictModel):
    name: str


class _Function(StrictModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Allowed(StrictModel):
    mode: str
    tools: Annotated[list[dict[str, Any]], FailFast(), Field(min_length=1)]


class _Body(StrictModel):
    tools: Annotated[list[dict[str, Any]], FailFast(), BeforeValidator(as_list)] = Field(
        default_factory=list
    )
    parallel_tool_calls: bool | None = None


class _Inner(NamedTuple):
    """What a typed object says beside its type, and where in the body that stands."""

    said: Mapping[str, object]
    path: str


class ToolSyntax(enum.Enum):
    """Where what a typed object says stands."""

    NESTED = enum.auto()  # in a member that is called as the type is
    FLAT = enum.auto()  # beside the type

    def inner(self, said: Mapping[str, object], kind: str, path: str) -> _Inner:
        """Of an object of that type. Raises InvalidRequestError."""
        if self is ToolSyntax.FLAT:
            return _Inner(said, path)
        path, inner = f"{path}.{kind}", said.get(kind)
        if inner is None:
            raise InvalidRequestError("is required", field=path)
        if not isinstance(inner, dict):
            raise InvalidRequestError("should be an object", field=path)
        return _Inner(inner, path)

    def function(self, said: Mapping[str, object], path: str) -> _Inner:
        """Of what has to be a function. Raises InvalidRequestError."""
        if validated(_Typed, said, path).type != _FUNCTION:
            raise InvalidRequestError("only function is supported", field=f"{path}.type")
        return self.inner(said, _FUNCTION, path)


class _Choice(NamedTuple):
    choice: ToolChoice
    required: str = ""
    required_path: str = "tool_choice"
    allowed: Mapping[str, str] | None = None
    """The names of those that may be called, and where they stand; None: all may be."""


class SaidTools(NamedTuple):
    """What a body says of tools."""

    tools: tuple[Tool, ...]
    """Those that may be called."""
    choice: ToolChoice
    required: str
    """The one that has to be called, if there is one."""
    has_parallel_calls: bool
    names: Mapping[str, str]
    """How to call the request's fields, see :func:`router.frontend.field_names.renamed`."""

    def prompt(
        self, messages: tuple[Message, ...], template_arguments: Mapping[str, object] | None
    ) -> ChatPrompt:
        """A chat with these tools, whose answer is taken apart."""
        return ChatPrompt(
            messages,
            template_arguments or {},
            tools=self.tools,
            tool_choice=self.choice,
            required_tool=self.required,
            has_parallel_calls=self.has_parallel_calls,
            is_split=True,
        )


def read_tools(content: Mapping[str, object], syntax: ToolSyntax = ToolSyntax.NESTED) -> SaidTools:
    """The tools and the choice among them. Raises InvalidRequestError."""
    _check_num(content.get("tools"), "tools")
    read = validated(_Body, content)
    tools = {}
    for index, said in enumerate(read.tools):
        function = syntax.function(said, f"tools[{index}]")
        tools[function.path] = _tool(function)
    choice = _read_choice(content.get("tool_choice"), syntax)
    if choice.allowed is not None:
        try:  # here, as nobody else sees those that are left out
            check_each(list(tools.values()))
        except InvalidRequestError as error:
            raise renamed(error, _names(list(tools), choice)) from None
        tools = _allowed(tools, choice.allowed)
    return SaidTools(
        tuple(tools.values()),
        choice.choice,
        choice.required,
        read.parallel_tool_calls is not False,
        _names(list(tools), choice),
    )


def _check_num(given: object, path: str) -> None:
    """Of a list of tools, before anything looks at the items."""
    if isinstance(given, list):
        try:
            check_num_tools(len(given))
        except InvalidRequestError as error:
            raise renamed(error, {"chat.tools": path}) from None


def _names(paths: Sequence[str], choice: _Choice) -> Mapping[str, str]:
    each = {f"chat.tools[{index}].": f"{path}." for index, path in enumerate(paths)}
    return {
        **each,
        "chat.tools": "tools",
        "chat.tool_choice": "tool_choice",
        "chat.required_tool": choice.required_path,
    }


def _allowed(tools: Mapping[str, Tool], allowed: Mapping[str, str]) -> dict[str, Tool]:
    """Those of the tools: what the model may not call it is not told of."""
    known = {tool.name for tool in tools.values()}
    for name, path in allowed.items():
        if name not in known:
            raise InvalidRequestError("is none of the tools", field=path)
    return {path: tool for path, tool in tools.items() if tool.name in allowed}


def _tool(function: _Inner) -> Tool:
    read = validated(_Function, function.said, function.path)
    return Tool(read.name, read.description or "", read.parameters)


def _read_choice(value: object, syntax: ToolSyntax) -> _Choice:
    path = "tool_choice"
    if value is None:
        return _Choice(ToolChoice.AUTO)
    if isinstance(value, str) and value in _CHOICES:
        return _Choice(_CHOICES[value])
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"should be one of {', '.join(_CHOICES)}, or name a function", field=path
        )
    if value.get("type") == _ALLOWED:
        return _read_allowed(syntax.inner(value, _ALLOWED, path), syntax)
    named = _name(value, syntax, path)
    return _Choice(ToolChoice.REQUIRED, named.name, named.path)


def _read_allowed(inner: _Inner, syntax: ToolSyntax) -> _Choice:
    _check_num(inner.said.get("tools"), f"{inner.path}.tools")
    read = validated(_Allowed, inner.said, inner.path)
    if read.mode not in ("auto", "required"):
        raise InvalidRequestError("should be auto or required", field=f"{inner.path}.mode")
    each = [
        _name(said, syntax, f"{inner.path}.tools[{index}]") for index, said in enumerate(read.tools)
    ]
    return _Choice(_CHOICES[read.mode], allowed={named.name: named.path for named in each})


class _Name(NamedTuple):
    name: str
    path: str


def _name(said: Mapping[str, object], syntax: ToolSyntax, path: str) -> _Name:
    """That of a function which is only named."""
    function = syntax.function(said, path)
    name = validated(_Named, function.said, function.path).name
    return _Name(name, f"{function.path}.name")
