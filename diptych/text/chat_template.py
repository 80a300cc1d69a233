"""A model's own chat template: messages to prompt text, in a sandbox.

The template is the checkpoint's (jinja2, as Hugging Face transformers runs it),
so it gets what it expects there and nothing else: no attribute access beyond
the sandbox, no files. Knows nothing of tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from diptych.errors import ConfigurationError, InvalidRequestError


class Message(NamedTuple):
    """One turn of a chat."""

    role: str
    content: str


class ChatTemplate:
    """A compiled template. Immutable; any thread.

    ``special_tokens`` are the texts of ``bos_token``, ``eos_token`` and so on.

    Raises:
        ConfigurationError: the template is not valid jinja2.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigurationError(f"the model's chat template: {error}") from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt text; with ``add_generation_prompt`` it ends where the answer begins.

        Raises:
            InvalidRequestError: the template refuses these messages.
        """
        try:
            return self._template.render(
                messages=[message._asdict() for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # noqa: BLE001 - a template may fail in any way
            raise InvalidRequestError(
                f"the model's chat template refuses them: {error}", field="chat.messages"
            ) from None


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
