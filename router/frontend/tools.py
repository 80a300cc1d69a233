"""The tools of a chat, checked before anything is rendered. Pure.

Every refusal is an InvalidRequestError with the path of the field in a GenerationRequest.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NoReturn

from diptych.constraint import Constraint
from diptych.errors import InvalidRequestError
from diptych.sampling_params import SamplingOptions
from diptych.text.chat_template import Tool
from diptych.text.response.forced_calls import by_tool, forced_calls
from router.frontend.field_names import renamed
from router.frontend.json_values import have_more_values
from router.generation.request import ChatPrompt, GenerationRequest, ToolChoice

MAX_TOOLS: Final = 512
MAX_TOOL_BYTES: Final = 262_144  # of all, as JSON
MAX_ARGUMENT_BYTES: Final = 2**20  # of all calls in earlier turns
MAX_ARGUMENT_VALUES: Final = 2**16
"""Of all calls in earlier turns: a text is one, however long, so whole files fit."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")
_LONE: Final = re.compile(r"[\ud800-\udfff]")


def check_num_tools(num_tools: int) -> None:
    """For front ends too, before they go through them. Raises InvalidRequestError."""
    if num_tools > MAX_TOOLS:
        raise InvalidRequestError(
            f"has {num_tools} items, more than {MAX_TOOLS}", field="chat.tools"
        )


def check_tools(request: GenerationRequest, chat: ChatPrompt) -> None:
    """What a chat says of tools. Raises InvalidRequestError."""
    _check_choice(chat, check_each(chat.tools))
    if chat.forced_tools:
        _check_free_end(request.sampling)


def check_each(tools: Sequence[Tool]) -> AbstractSet[str]:
    """Their names. For front ends too, of tools that are not told on.

    Raises InvalidRequestError.
    """
    check_num_tools(len(tools))
    num_bytes = 0
    names: set[str] = set()
    for index, tool in enumerate(tools):
        num_bytes += _check_tool(tool, names, f"chat.tools[{index}]")
        if num_bytes > MAX_TOOL_BYTES:
            raise InvalidRequestError(
                f"have more than {MAX_TOOL_BYTES} bytes, as JSON", field="chat.tools"
            )
    return names


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """What the output has to be: calls that the client insists on, or as it says.

    Raises InvalidRequestError: the schemas are too large to be held to.
    """
    chat = request.prompt
    if not isinstance(chat, ChatPrompt) or not chat.forced_tools:
        return request.sampling.constraint
    is_parallel = chat.has_parallel_calls and not chat.required_tool
    made = forced_calls(chat.forced_tools, is_parallel=is_parallel)
    try:
        made.check("chat.tools")
    except InvalidRequestError as error:
        raise renamed(error, {"chat.tools.grammar": "chat.tools"}) from None
    return made


def of_tools(error: InvalidRequestError, chat: ChatPrompt) -> InvalidRequestError:
    """A refusal of what ``constraint_of`` made of them, by the name of the one that is wrong."""
    told = renamed(error, {"sampling.constraint.grammar": "chat.tools"})
    message = by_tool(told.message.removeprefix(f"{told.field}: "), chat.forced_tools)
    return InvalidRequestError(message, field=told.field)


def check_arguments(texts: Sequence[str], field: str) -> None:
    """Those of all calls in earlier turns, before any is read; ``field`` has the turns.

    Raises InvalidRequestError: reading them would take too long.
    """
    written = [text.encode(errors="surrogatepass") for text in texts]
    if sum(map(len, written)) > MAX_ARGUMENT_BYTES:
        excess = f"{MAX_ARGUMENT_BYTES} bytes"
    elif have_more_values(written, MAX_ARGUMENT_VALUES):
        excess = f"{MAX_ARGUMENT_VALUES} values"
    else:
        return
    raise InvalidRequestError(f"the arguments of all calls have more than {excess}", field=field)


def read_arguments(text: str, path: str) -> Mapping[str, Any]:
    """Those of a call in an earlier turn, with whatever a model may have written.

    A number that is too large is the largest there is, and half a character U+FFFD: nobody has
    to look through what is read, for JSON can say all of it.
    Raises InvalidRequestError.
    """
    try:
        arguments = _DECODER.decode(text or "{}")
        if _HALF.search(text):
            arguments = _whole(arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError("is not a JSON object", field=path)
    return arguments


def _whole(value: Any) -> Any:
    """The same without halves of characters."""
    if isinstance(value, str):
        return _LONE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {_whole(name): _whole(each) for name, each in value.items()}
    return value


def _number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


def _whole_number(text: str) -> float:
    try:
        return int(text)
    except ValueError:  # of more digits than Python reads
        return _number(text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _check_tool(tool: Tool, names: set[str], path: str) -> int:
    """Its size as JSON, in bytes; ``names`` gets its name."""
    if not _NAME.fullmatch(tool.name):
        raise InvalidRequestError(
            "has to be 1 to 128 letters, digits and any of _ - . : /", field=f"{path}.name"
        )
    if tool.name in names:
        raise InvalidRequestError(f"{tool.name!r} is there twice", field=f"{path}.name")
    names.add(tool.name)
    if (tool.parameters or {}).get("type", "object") != "object":
        raise InvalidRequestError("has to be object", field=f"{path}.parameters.type")
    try:
        written = json.dumps(tool.for_template(), ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise InvalidRequestError(
            "has a number or a character that no JSON text can say", field=path
        ) from None
    return len(written)


def _check_free_end(sampling: SamplingOptions) -> None:
    for name in ("ignore_eos", "stop", "stop_token_ids"):
        if getattr(sampling, name):
            raise InvalidRequestError(
                "an output that has to be calls ends where they do", field=f"sampling.{name}"
            )


def _check_choice(chat: ChatPrompt, names: AbstractSet[str]) -> None:
    is_required = chat.tool_choice is ToolChoice.REQUIRED
    if is_required and not chat.tools:
        raise InvalidRequestError("there are no tools", field="chat.tool_choice")
    if chat.required_tool and not is_required:
        raise InvalidRequestError("is for calls that are required", field="chat.required_tool")
    if chat.required_tool and chat.required_tool not in names:
        raise InvalidRequestError("is none of the tools", field="chat.required_tool")


_DECODER: Final = json.JSONDecoder(
    parse_float=_number, parse_int=_whole_number, parse_constant=_no_constant
)
