"""A model's own chat template: messages to prompt text, in a sandbox.

The template is the checkpoint's (jinja2, as Hugging Face transformers runs it),
so it gets what it expects there and nothing else: no attribute access beyond
the sandbox, no files. Knows nothing of tokens.
"""

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn, Protocol

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from diptych.errors import ConfigurationError, InvalidRequestError

SPECIAL_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")

# Some show a turn's calls only where it has no content, as DeepSeek's do.
_ASKS_FOR_NONE = re.compile(r"""\bcontent['"]?\]?\s+is\s+(?:not\s+)?none\b""", re.IGNORECASE)
# What templates call an assistant's thoughts: the first that one reads counts.
_THINKING = "thinking"
_THOUGHTS = ("reasoning_content", "reasoning", _THINKING)


class Hide(Protocol):
    """Makes of what a client said what a template gets in its place."""

    def __call__(self, value: Any, *, is_role: bool = False) -> Any:
        """A value of JSON, with what is in it; ``is_role``: it is who speaks."""


def shown(value: Any, *, is_role: bool = False) -> Any:
    """The value itself."""
    return value


class ToolCall(NamedTuple):
    """A call of a tool in an earlier turn."""

    tool_call_id: str
    name: str
    arguments: Mapping[str, Any]
    """JSON can say all of them: no NaN is there, and no half of a character."""


class Tool(NamedTuple):
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """JSON schema of its arguments; None: it takes none."""

    def for_template(self, hide: Hide = shown) -> dict[str, Any]:
        """As templates expect it."""
        function: dict[str, Any] = {"name": hide(self.name)}
        if self.description:
            function["description"] = hide(self.description)
        if self.parameters is not None:
            function["parameters"] = hide(self.parameters)
        return {"type": "function", "function": function}


class Message(NamedTuple):
    """One turn of a chat."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    """What the assistant thought before it answered."""
    name: str = ""
    """Of the tool whose answer it is, or of who speaks; many templates do not show it."""

    def for_template(
        self,
        hide: Hide = shown,
        *,
        may_be_none: bool = False,
        as_json: bool = False,
        thoughts: str = _THOUGHTS[0],
    ) -> dict[str, Any]:
        """As templates expect it; what is empty is left out, which they ask for.

        ``may_be_none``: the content beside calls, if there is none. ``as_json``: calls' arguments
        are texts. ``thoughts``: what the reasoning is called.
        """
        is_none = may_be_none and self.tool_calls and not self.content
        turn: dict[str, Any] = {
            "role": hide(self.role, is_role=True),
            "content": None if is_none else hide(self.content),
        }
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": hide(call.tool_call_id),
                    "type": "function",
                    "function": {
                        "name": hide(call.name),
                        "arguments": hide(_to_json(call.arguments) if as_json else call.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            turn["tool_call_id"] = hide(self.tool_call_id)
        # Those who call it so, as gpt-oss does, refuse calls with both.
        is_refused = thoughts == _THINKING and self.tool_calls and self.content
        if self.reasoning and not is_refused:
            turn[thoughts] = hide(self.reasoning)
        if self.name:
            turn["name"] = hide(self.name)
        return turn


class ChatTemplate:
    """A compiled template. Immutable; any thread.

    ``special_tokens`` are the texts of ``bos_token``, ``eos_token`` and so on. ``with_tools`` is
    another one, for chats with tools, where the model has it.

    Raises:
        ConfigurationError: the template is not valid jinja2.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        clock: Callable[[], float] = time.time,
        with_tools: str = "",
    ) -> None:
        self.source = f"{source}{with_tools}"
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._clock = clock
        self._special_tokens = dict(special_tokens)
        self._reserved = frozenset({*environment.globals, *SPECIAL_TOKEN_ROLES})
        self._asks_for_none = _ASKS_FOR_NONE.search(self.source) is not None
        read = (name for name in _THOUGHTS if re.search(rf"[.'\"]{name}\b", self.source))
        self._thoughts = next(read, _THOUGHTS[0])
        try:
            self._template = environment.from_string(source)
            self._with_tools = environment.from_string(with_tools) if with_tools else self._template
            names = meta.find_undeclared_variables(environment.parse(with_tools or source))
            self.knows_tools = "tools" in names
            """Whether it tells the model of tools."""
        except Exception as error:  # noqa: BLE001 - or Python refuses what jinja2 made of it
            raise ConfigurationError(f"the model's chat template: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, object] | None = None,
        *,
        tools: Sequence[Tool] = (),
        now_unix_s: int = 0,
        add_generation_prompt: bool = True,
        hide: Hide = shown,
    ) -> str:
        """The prompt text; with ``add_generation_prompt`` it ends where the answer begins.

        ``arguments`` are further names that the template knows. ``now_unix_s`` is what it takes
        for now, in seconds since 1970 UTC; 0: what the clock says. ``hide`` makes of what a client
        said what the template gets in its place.

        Raises:
            InvalidRequestError: the template refuses these messages, or an argument
                has the name of something that templates get.
        """
        own: dict[str, object] = {
            "messages": (),
            "add_generation_prompt": add_generation_prompt,
            "tools": [tool.for_template(hide) for tool in tools] or None,
            "documents": None,
            "strftime_now": datetime.fromtimestamp(now_unix_s or self._clock()).strftime,
            **self._special_tokens,
        }
        for name in arguments or {}:
            if name in own or name in self._reserved:
                raise InvalidRequestError("cannot be set", field=f"chat.template_arguments.{name}")
        given = {name: hide(value) for name, value in (arguments or {}).items()}
        template, refused = self._with_tools if tools else self._template, ""
        for turns in self._ways(messages, hide):
            try:
                return template.render({**given, **own, "messages": turns})
            except TypeError as error:  # it joins what is no text: it may be meant for another way
                refused = refused or str(error)
            except Exception as error:  # noqa: BLE001 - a template may fail in any way
                refused = refused or str(error)
                break
        raise InvalidRequestError(
            f"the model's chat template refuses them: {refused}", field="chat.messages"
        )

    def _ways(self, messages: Sequence[Message], hide: Hide) -> Iterator[list[dict[str, Any]]]:
        """The turns as most templates take them, then as others do; those that differ."""
        has_calls = any(message.tool_calls for message in messages)
        may_be_none = (True, False) if has_calls and self._asks_for_none else (False,)
        as_json = (False, True) if has_calls else (False,)
        for no_content, texts in itertools.product(may_be_none, as_json):
            yield [
                message.for_template(
                    hide, may_be_none=no_content, as_json=texts, thoughts=self._thoughts
                )
                for message in messages
            ]


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the model's own words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
