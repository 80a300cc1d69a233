"""What was said so far in a chat, and how the next answer is to be drawn. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from diptych.cli.sampling_flags import FLAGS
from diptych.client import (
    ChatMessage,
    Chunk,
    SamplingOptions,
    ToolChoice,
    Tools,
    build_request,
)
from diptych.errors import InvalidRequestError
from diptych.sampling_params import NOTHING_SAID, check_options
from diptych.v1 import inference_pb2

_FIELDS: Mapping[str, "Field[Any]"] = {
    item.name: item for item in fields(SamplingOptions) if item.name in FLAGS
}


class Conversation:
    """A chat's turns and settings. Owned by the command that holds it."""

    def __init__(
        self, model: str, system: str, options: SamplingOptions, tools: Tools | None = None
    ) -> None:
        self.system = system
        self.options = options
        self.last: Chunk | None = None  # of the last answer; None: it has not come to its end
        self._model = model
        self._turns: list[ChatMessage] = []
        self._tools = tools

    @property
    def turns(self) -> list[ChatMessage]:
        """All that was said, the system message first."""
        first = [ChatMessage("system", self.system)] if self.system else []
        return [*first, *self._turns]

    def restore(self, turns: Sequence[ChatMessage]) -> None:
        """Go on with another chat, of these ``turns``. The settings stay."""
        self.clear()
        is_first_system = bool(turns) and turns[0].role == "system"
        self.system = turns[0].content if is_first_system else ""
        self._turns += turns[is_first_system:]

    def request(self, said: str | None) -> inference_pb2.GenerateRequest:
        """What to ask for when the user says this; None: when calls were answered.

        What has to be called is so for each thing that the user says.
        """
        tools, now = self._tools, () if said is None else (ChatMessage("user", said),)
        if tools is not None and said is None:
            tools = replace(tools, choice=ToolChoice.AUTO)
        return build_request(
            messages=[*self.turns, *now],
            options=self.options,
            model=self._model,
            tools=tools,
            split_reasoning=True,
        )

    def answered(
        self,
        said: str | None,
        text: str,
        last: Chunk | None,
        calls: Sequence[inference_pb2.ToolCall] = (),
        reasoning: str = "",
    ) -> None:
        """Keep a turn, whole or not; one that says nothing might as well not have been."""
        self.last = last
        if text or calls:
            now = () if said is None else (ChatMessage("user", said),)
            turn = ChatMessage("assistant", text, tool_calls=calls, reasoning=reasoning)
            self._turns += (*now, turn)

    def call_answered(self, call: inference_pb2.ToolCall, answer: str) -> None:
        """What came of a call; each of a turn has to be answered before the next."""
        self._turns.append(ChatMessage("tool", answer, tool_call_id=call.id))

    def clear(self) -> None:
        """Forget all turns. The settings stay."""
        self._turns.clear()
        self.last = None

    def set_option(self, name: str, words: list[str]) -> None:
        """Give an option a value, or, without ``words``, none. Raises InvalidRequestError.

        Several words are for options that are lists; each is KEY=VALUE for one that is a map.
        """
        known = _FIELDS.get(name)
        if known is None:
            raise InvalidRequestError("no such option; /set lists them", field=name)
        value = _read(known, words) if words else getattr(NOTHING_SAID, name)
        changed: dict[str, Any] = {name: value}
        options = replace(self.options, **changed)
        check_options(options, "sampling")
        self.options = options


def _read(known: "Field[Any]", words: list[str]) -> object:
    """The value of an option, by its declared type. Raises InvalidRequestError."""
    kind: Any = known.type
    given: object = " ".join(words)
    if isinstance(known.default, tuple):
        given = words
    elif known.default is MISSING:
        given = dict(word.partition("=")[::2] for word in words)
    try:
        value: object = TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise InvalidRequestError(problem, field=known.name) from None
    return value
