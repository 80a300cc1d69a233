"""Tools that a command offers a model: read from a file, and what the model calls, as a line."""

import enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from diptych.cli.shown_line import shown
from diptych.client import Tool, ToolChoice, Tools
from diptych.errors import InvalidRequestError
from diptych.v1 import inference_pb2

FIELD = "--tools"


class Calls(enum.StrEnum):
    """Whether a model is to call the tools of a file."""

    AUTO = "auto"
    REQUIRED = "required"


class _Function(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None


def _inner(said: object) -> object:
    """OpenAI's form has the function within an object that says its type."""
    if isinstance(said, dict) and said.get("type") == "function" and "function" in said:
        return said["function"]
    return said


_FILE: TypeAdapter[list[_Function]] = TypeAdapter(
    list[Annotated[_Function, BeforeValidator(_inner)]]
)


def read_tools(path: Path | None, calls: Calls) -> Tools | None:
    """The tools in a file: a JSON list of functions, in OpenAI's form or as they are.

    Raises InvalidRequestError: it cannot be read, says something else, or there is none to call.
    """
    if path is None:
        if calls is Calls.REQUIRED:
            raise InvalidRequestError(f"goes with {FIELD}", field="--tool-choice")
        return None
    try:
        read = _FILE.validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidRequestError(str(error), field=FIELD) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(map(str, first["loc"]))
        raise InvalidRequestError(f"{path}: {at}: {first['msg']}", field=FIELD) from None
    choice = ToolChoice.REQUIRED if calls is Calls.REQUIRED else ToolChoice.AUTO
    tools = Tools([Tool(each.name, each.description, each.parameters) for each in read], choice)
    try:
        tools.write_to(inference_pb2.ChatPrompt())
    except ValueError as error:  # as every request with them would
        raise InvalidRequestError(f"{path}: {error}", field=FIELD) from None
    return tools


def shown_call(call: inference_pb2.ToolCall) -> str:
    """What a person reads of it: one line that no model writes to the terminal with.

    The arguments are as they came, whether they are JSON or not. Whitespace with a break in it
    is one space (within a JSON string there is none); what is not to be seen is escaped.
    """
    return f"{shown(call.name)}({shown(call.arguments)})"
