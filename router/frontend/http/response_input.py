"""The input of a response, a text or a list of items, as the messages of a chat. Pure.

What the model said in one turn comes as several items (what it thought, said, called); its chat
template wants them as one message. Each message knows the items that it is made of, so that
an error names the item.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

from pydantic import FailFast, Field

from diptych.errors import InvalidRequestError
from diptych.text.chat_template import Message, ToolCall
from router.frontend.http.body import StrictModel, validated
from router.frontend.http.message_parts import Parts, read_text
from router.frontend.tools import check_arguments, read_arguments
from router.frontend.validation import MAX_MESSAGES, MAX_PARTS

_ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_TEXTS: Final = frozenset({"text", "input_text", "output_text"})
_THOUGHTS: Final = frozenset({"text", "reasoning_text", "summary_text"})


class _Item(StrictModel):
    """One of any type; each type has members of its own."""

    type: str = "message"
    role: str | None = None
    content: Parts = Field(default_factory=list)
    summary: Parts = Field(default_factory=list)
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts = Field(default_factory=list)

    @property
    def num_parts(self) -> int:
        """Of all its members together."""
        return len(self.content) + len(self.summary) + len(self.output)


class _Instructions(StrictModel):
    instructions: str | None = None


class _Items(StrictModel):
    input: Annotated[list[_Item], FailFast(), Field(max_length=MAX_MESSAGES)]


class SaidMessages(NamedTuple):
    """What a body says of the chat so far."""

    messages: tuple[Message, ...]
    names: Mapping[str, str]
    """How to call the request's fields, see :func:`router.frontend.field_names.renamed`."""


@dataclass(slots=True)
class _Turn:
    """What the model said before anybody else spoke."""

    path: str
    reasoning: list[str] = field(default_factory=list)
    content: str | None = None
    calls: list[ToolCall] = field(default_factory=list)


class _Reader:
    """The messages so far, and the turn of the model's that more items may belong to."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._names: dict[str, str] = {}
        self._turn: _Turn | None = None

    def add(self, message: Message, path: str) -> None:
        """One that is no part of a turn of the model's."""
        self.end_turn()
        self._append(message, path)

    def add_item(self, item: _Item, path: str) -> None:
        """The next item. Raises InvalidRequestError."""
        match item.type:
            case "message":
                self._add_message(item, path)
            case "reasoning":
                self._add_reasoning(item, path)
            case "function_call":
                self._add_call(item, path)
            case "function_call_output":
                call_id = _required(item.call_id, f"{path}.call_id")
                output = read_text(item.output, f"{path}.output", _TEXTS)
                self.add(Message("tool", output, tool_call_id=call_id), path)
            case _:
                raise InvalidRequestError(
                    "should be message, reasoning, function_call or function_call_output",
                    field=f"{path}.type",
                )

    def end_turn(self) -> None:
        """What comes next is no part of what the model said last."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        reasoning = "\n".join(turn.reasoning)
        said = Message("assistant", turn.content or "", tuple(turn.calls), reasoning=reasoning)
        self._append(said, turn.path)

    def finish(self) -> SaidMessages:
        """All that was said, once every item was added."""
        self.end_turn()
        names = {**self._names, "chat.messages": "input", "chat": "input"}
        return SaidMessages(tuple(self._messages), names)

    def _add_message(self, item: _Item, path: str) -> None:
        role = _required(item.role, f"{path}.role")
        if role not in _ROLES:
            raise InvalidRequestError(f"should be one of {', '.join(_ROLES)}", field=f"{path}.role")
        of_model = _ROLES[role] == "assistant"
        content = read_text(item.content, f"{path}.content", _TEXTS, of_model=of_model)
        if not of_model:
            self.add(Message(_ROLES[role], content), path)
            return
        turn = self._turn
        if turn is None or turn.content is not None or turn.calls:
            turn = self._begin_turn(path)
        turn.content = content

    def _add_reasoning(self, item: _Item, path: str) -> None:
        if item.encrypted_content:
            raise InvalidRequestError("cannot be read here", field=f"{path}.encrypted_content")
        parts, name = (item.content, "content") if item.content else (item.summary, "summary")
        turn = self._turn
        if turn is None or turn.content is not None or turn.calls:
            turn = self._begin_turn(path)
        turn.reasoning.append(read_text(parts, f"{path}.{name}", _THOUGHTS))

    def _add_call(self, item: _Item, path: str) -> None:
        call_id = _required(item.call_id, f"{path}.call_id")
        name = _required(item.name, f"{path}.name")
        arguments = read_arguments(item.arguments or "", f"{path}.arguments")
        turn = self._turn or self._begin_turn(path)
        at = f"chat.messages[{len(self._messages)}].tool_calls[{len(turn.calls)}]"
        self._names[at] = path
        turn.calls.append(ToolCall(call_id, name, arguments))

    def _begin_turn(self, path: str) -> _Turn:
        self.end_turn()
        self._turn = _Turn(path)
        return self._turn

    def _append(self, message: Message, path: str) -> None:
        at = f"chat.messages[{len(self._messages)}]"
        self._names[f"{at}.tool_call_id"] = f"{path}.call_id"
        self._names[at] = path
        self._messages.append(message)


def read_input(content: Mapping[str, object]) -> SaidMessages:
    """The instructions, if there are some, and the input. Raises InvalidRequestError."""
    items = content.get("input")
    if not isinstance(items, str | list):
        wanted = "is required" if items is None else "should be a text or a list of items"
        raise InvalidRequestError(wanted, field="input")
    reader = _Reader()
    body = validated(_Instructions, content)
    if body.instructions:
        reader.add(Message("system", body.instructions), "instructions")
    if isinstance(items, str):
        reader.add(Message("user", items), "input")
    else:
        _read_items(validated(_Items, content).input, reader)
    return reader.finish()


def _read_items(items: list[_Item], reader: _Reader) -> None:
    num_parts = sum(item.num_parts for item in items)
    if num_parts > MAX_PARTS:
        raise InvalidRequestError(f"has {num_parts} parts, more than {MAX_PARTS}", field="input")
    calls = [item.arguments or "" for item in items if item.type == "function_call"]
    check_arguments(calls, "input")
    for index, item in enumerate(items):
        reader.add_item(item, f"input[{index}]")


def _required(value: str | None, path: str) -> str:
    if value is None:
        raise InvalidRequestError("is required", field=path)
    return value
