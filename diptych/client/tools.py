"""What a model may call, as a client says it. Pure."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych.client.json_struct import JSONValue, write_struct
from diptych.v1 import inference_pb2


class ToolChoice(enum.Enum):
    """Whether a model is to call tools."""

    AUTO = enum.auto()  # as it likes
    NONE = enum.auto()  # it is not told of any
    REQUIRED = enum.auto()  # one at least, with arguments that fit


_ON_WIRE: Final = {
    ToolChoice.AUTO: inference_pb2.TOOL_CHOICE_UNSPECIFIED,
    ToolChoice.NONE: inference_pb2.TOOL_CHOICE_NONE,
    ToolChoice.REQUIRED: inference_pb2.TOOL_CHOICE_REQUIRED,
}


class Tool(NamedTuple):
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, JSONValue] | None = None
    """JSON schema of its arguments, an object; None: it takes none."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request. The model's chat template has to know of such."""

    tools: Sequence[Tool]
    choice: ToolChoice = ToolChoice.AUTO
    required_tool: str = ""
    """The one that has to be called, with REQUIRED; empty: any."""
    is_parallel: bool = True
    """Whether one answer may have several calls."""

    def write_to(self, chat: inference_pb2.ChatPrompt) -> None:
        """Say it in a request's chat.

        Raises ValueError: the parameters of a tool would not arrive as they are.
        """
        for tool in self.tools:
            written = chat.tools.add(name=tool.name, description=tool.description)
            if tool.parameters is not None:
                write_struct(
                    tool.parameters, written.parameters, f"parameters of tool {tool.name!r}"
                )
        chat.tool_choice = _ON_WIRE[self.choice]
        chat.required_tool = self.required_tool
        chat.parallel_tool_calls = self.is_parallel
