"""``diptych generate``: stream one answer from a router to standard output."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator
from pydantic_settings import CliPositionalArg

from diptych import settings
from diptych.cli.breakdown import breakdown, kv_path, kv_was_handed_off
from diptych.client import DEFAULT_RETRIES, ChatMessage, Chunk, DiptychClient, build_request
from diptych.errors import ConfigurationError, DiptychError
from diptych.sampling_params import OPTIONS, Option, SamplingOptions, check_options
from diptych.v1 import inference_pb2

EXIT_REFUSED = 1


class _GenerateConfig(BaseModel):
    """Stream one answer from a router.

    A plain argument is a user's message, or a text to continue where the model has no
    chat template. - reads standard input.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    message: CliPositionalArg[str | None] = Field(None, description="What to say to the model.")
    address: str = Field(
        "127.0.0.1:50051", description="host:port of the router, or of several, with commas."
    )
    retries: int = Field(
        DEFAULT_RETRIES,
        ge=0,
        description="Tries in a row that bring nothing new, before an answer that broke off, "
        "or was refused for the moment, is given up.",
    )
    prompt: str | None = Field(None, description="Text to continue, as it is.")
    chat: str | None = Field(None, description="A user's message, put into the chat template.")
    system: str | None = Field(None, description="The system message that goes before a user's.")
    model: str = Field("", description="Name of the model; unset: the router's only one.")
    timing: bool = Field(False, description="Show where the time went, on standard error.")
    expect_handoff: bool = Field(
        False,
        description="Fail unless a decode worker pulled the prompt's KV and computed none of it. "
        "Routers do not ship short prompts.",
    )
    timeout_s: float | None = Field(None, gt=0, description="Give up after this, s.")
    api_key_file: Path | None = Field(
        None, description="File with the key that the router asks for, and nothing else."
    )
    tls: bool = Field(False, description="Speak TLS; the system's authorities are believed.")
    ca: Path | None = Field(
        None, description="Speak TLS; the authorities of this PEM file are believed."
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if sum(given is not None for given in (self.message, self.prompt, self.chat)) != 1:
            raise ValueError("give a message, --chat or --prompt")
        if self.system is not None and self.prompt is not None:
            raise ValueError("--system goes with a message")
        return self

    def client(self) -> DiptychClient:
        """Raises ConfigurationError: a file cannot be read."""
        key = ""
        if self.api_key_file is not None:
            try:
                key = self.api_key_file.read_text().strip()
            except OSError as error:
                raise ConfigurationError(
                    f"--api-key-file: {self.api_key_file}: {error.strerror}"
                ) from None
        return DiptychClient(
            self.address, api_key=key, tls=self.ca or self.tls, retries=self.retries
        )

    def options(self) -> SamplingOptions:
        """How to sample. Raises InvalidRequestError."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _FLAGS}
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        options = SamplingOptions(**{**given, **lists})
        check_options(options, "sampling")
        return options

    def request(self, *, has_chat_template: bool) -> inference_pb2.GenerateRequest:
        """The request that these settings describe. Raises InvalidRequestError."""
        options, said = self.options(), self.chat
        if said is None and (has_chat_template or self.system is not None):
            said = self.message
        if said is None:
            text = _text(self.prompt or self.message or "")
            return build_request(text, options=options, model=self.model)
        messages = [] if self.system is None else [ChatMessage("system", self.system)]
        messages.append(ChatMessage("user", _text(said)))
        return build_request(messages=messages, options=options, model=self.model)


def _flag(option: Option) -> str:
    """The help text of an option's flag."""
    if option.default is None:
        return option.help
    whose = "the model's own, or " if option.from_model else ""
    return f"{option.help} Unset: {whose}{option.default:g}."


_FLAGS: Final = tuple(item.name for item in fields(SamplingOptions) if OPTIONS[item.name].is_flag)


def _sampling_fields() -> dict[str, Any]:
    """One setting for each sampling option; lists and maps are repeatable flags."""
    made = {}
    for item in fields(SamplingOptions):
        if item.name not in _FLAGS:
            continue
        kind, default = item.type, item.default
        if isinstance(default, tuple):
            kind, default = (list[int] if kind == tuple[int, ...] else list[str]), []
        elif default is MISSING:
            kind, default = dict[int, float], {}
        made[item.name] = (kind, Field(default, description=_flag(OPTIONS[item.name])))
    return made


GenerateConfig = create_model(
    "GenerateConfig",
    __base__=_GenerateConfig,
    __doc__=_GenerateConfig.__doc__,
    **_sampling_fields(),
)


def run(args: list[str]) -> int:
    """Stream the answer; 0, or 1 if the router refused or failed, or KV was to move and did not."""
    config = settings.load(
        GenerateConfig, args, prog="diptych generate", env_prefix="DIPTYCH_GENERATE_"
    )
    try:
        last = asyncio.run(_generate(config))
    except ConfigurationError:
        raise
    except DiptychError as error:
        print(f"\ndiptych generate: {error.reason}: {error.message}", file=sys.stderr)  # noqa: T201
        return EXIT_REFUSED
    print(flush=True)  # noqa: T201
    if config.timing and last.usage is not None and last.timing is not None:
        print("\n".join(breakdown(last.usage, last.timing)), file=sys.stderr)  # noqa: T201
    if config.expect_handoff and not _was_handed_off(last):
        return EXIT_REFUSED
    return 0


def _was_handed_off(last: Chunk) -> bool:
    """Whether KV moved for this answer; if not, says what happened instead."""
    if last.timing is not None and kv_was_handed_off(last.timing):
        return True
    instead = "unknown path" if last.timing is None else kv_path(last.timing)
    print(f"diptych generate: no KV was handed off: {instead}", file=sys.stderr)  # noqa: T201
    return False


async def stream(
    address: str,
    request: inference_pb2.GenerateRequest,
    write: Callable[[str], None],
    timeout_s: float | None = None,
) -> Chunk:
    """Send ``request``, ``write`` each text as it comes; the last chunk (usage, timing).

    Raises:
        DiptychError: the router refused or failed.
    """
    async with DiptychClient(address) as client:
        return await _stream(client, request, write, timeout_s)


async def _generate(config: _GenerateConfig) -> Chunk:
    async with config.client() as client:
        has_template = config.message is not None and await _has_chat_template(client, config.model)
        request = config.request(has_chat_template=has_template)
        return await _stream(client, request, _write, config.timeout_s)


async def _has_chat_template(client: DiptychClient, model: str) -> bool:
    return any(
        served.has_chat_template for served in await client.models() if model in ("", served.name)
    )


async def _stream(
    client: DiptychClient,
    request: inference_pb2.GenerateRequest,
    write: Callable[[str], None],
    timeout_s: float | None,
) -> Chunk:
    last = None
    async for chunk in client.stream(request, timeout_s):
        write(chunk.text)
        last = chunk
    assert last is not None, "a stream ends with a chunk, or an error"
    return last


def _text(value: str) -> str:
    return sys.stdin.read() if value == "-" else value


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
