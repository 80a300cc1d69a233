"""``diptych generate``: stream one answer from a router to standard output."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Self

from pydantic import Field, create_model, model_validator
from pydantic_settings import CliPositionalArg

from diptych import settings
from diptych.cli.breakdown import breakdown, kv_path, kv_was_handed_off
from diptych.cli.connection import Connection, say_retry
from diptych.cli.expected_trace import ExpectedTrace
from diptych.cli.sampling_flags import read_options, sampling_fields
from diptych.cli.shown_answer import Metadata, Write, show_answer, write_text
from diptych.cli.shown_line import shown
from diptych.cli.streams import read_input
from diptych.cli.tool_file import Calls, read_tools, shown_call
from diptych.client import ChatMessage, Chunk, DiptychClient, build_request
from diptych.errors import ConfigurationError, DiptychError
from diptych.process import EXIT_FAILED
from diptych.request_class import RequestClass
from diptych.service_level import LEVEL_HELP, ServiceLevel
from diptych.v1 import inference_pb2

_PROMPTS = ("message", "prompt", "chat")  # of which there is one


class _GenerateConfig(Connection):
    """Stream one answer from a router.

    A plain argument is a user's message, or a text to continue where the model has no
    chat template. - reads standard input.
    """

    message: CliPositionalArg[str | None] = Field(None, description="What to say to the model.")
    prompt: str | None = Field(None, description="Text to continue, as it is.")
    chat: str | None = Field(None, description="A user's message, put into the chat template.")
    system: str | None = Field(None, description="The system message that goes before a user's.")
    tools: Path | None = Field(
        None, description="JSON file of functions that the model may call; its calls are shown."
    )
    tool_choice: Calls = Field(
        Calls.AUTO, description="Whether it calls them as it likes, or one at least."
    )
    priority: RequestClass | None = Field(None, description=LEVEL_HELP["priority"])
    ttft_ms: float | None = Field(None, description=LEVEL_HELP["ttft_ms"])
    tpot_ms: float | None = Field(None, description=LEVEL_HELP["tpot_ms"])
    timing: bool = Field(False, description="Show where the time went, on standard error.")
    expect_handoff: bool = Field(
        False,
        description="Fail unless a decode worker pulled the prompt's KV and computed none of it. "
        "The prompt's log probabilities are asked for, which prefill workers alone tell: else "
        "short prompts are not shipped, and none is where a decode worker is as soon done with it.",
    )
    expect_trace: str | None = Field(
        None,
        description="host:port of the metrics of routers and workers, several with commas; of a "
        "name all addresses. Have the request traced, and fail unless those that served it send "
        "spans to their collector. Where they trace nothing, it is only said.",
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if sum(getattr(self, name) is not None for name in _PROMPTS) != 1:
            raise ValueError("give a message, --chat or --prompt")
        if self.system is not None and self.prompt is not None:
            raise ValueError("--system goes with a message")
        if self.tools is not None and self.prompt is not None:
            raise ValueError("--tools goes with a message")
        return self

    def with_input(self) -> Self:
        """The same with what standard input says in place of -; it is waited for.

        Before there is an event loop, so that Ctrl-C ends that. Raises ConfigurationError.
        """
        read = {name: read_input() for name in _PROMPTS if getattr(self, name) == "-"}
        return self.model_copy(update=read)

    def request(self, *, has_chat_template: bool) -> inference_pb2.GenerateRequest:
        """The request that these settings describe. Raises InvalidRequestError."""
        options, said = read_options(self), self.chat
        if self.expect_handoff:
            options = replace(options, prompt_logprobs=0)
        tools = read_tools(self.tools, self.tool_choice)
        level = ServiceLevel(self.priority, self.ttft_ms, self.tpot_ms)
        level.check()
        is_chat = self.system is not None or self.tools is not None
        if said is None and (has_chat_template or is_chat):
            said = self.message
        if said is None:
            text = self.prompt or self.message or ""
            return build_request(text, options=options, model=self.model, level=level)
        messages = [] if self.system is None else [ChatMessage("system", self.system)]
        messages.append(ChatMessage("user", said))
        return build_request(
            messages=messages, options=options, model=self.model, level=level, tools=tools
        )


GenerateConfig = create_model(
    "GenerateConfig",
    __base__=_GenerateConfig,
    __doc__=_GenerateConfig.__doc__,
    **sampling_fields(),
)


def run(args: list[str]) -> int:
    """Stream the answer; 0, or 1 if the router refused or failed, or what was expected was not."""
    config = settings.load(
        GenerateConfig, args, prog="diptych generate", env_prefix="DIPTYCH_GENERATE_"
    ).with_input()
    trace = None if config.expect_trace is None else ExpectedTrace(config.expect_trace)
    try:
        last = asyncio.run(_generate(config, trace))
    except ConfigurationError:
        raise
    except DiptychError as error:
        line = shown(f"diptych generate: {error.reason}: {error.message}")
        print(f"\n{line}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    print(flush=True)  # noqa: T201
    if config.timing and last.usage is not None and last.timing is not None:
        print("\n".join(breakdown(last.usage, last.timing)), file=sys.stderr)  # noqa: T201
    is_well = not config.expect_handoff or _was_handed_off(last)
    if trace is not None:
        is_well &= asyncio.run(trace.was_sent(last.timing))
    return 0 if is_well else EXIT_FAILED


def _was_handed_off(last: Chunk) -> bool:
    """Whether KV moved for this answer; if not, says what happened instead."""
    if last.timing is not None and kv_was_handed_off(last.timing):
        return True
    instead = "unknown path" if last.timing is None else kv_path(last.timing)
    what = "the prompt's KV was not handed off"
    print(f"diptych generate: {what}: {instead}", file=sys.stderr)  # noqa: T201
    return False


async def stream(
    address: str,
    request: inference_pb2.GenerateRequest,
    write: Write,
    timeout_s: float | None = None,
) -> Chunk:
    """Send ``request``, ``write`` each text as it comes; the last chunk (usage, timing).

    Raises:
        DiptychError: the router refused or failed.
    """
    async with DiptychClient(address) as client:
        return await show_answer(client, request, write, timeout_s)


async def _generate(config: _GenerateConfig, trace: ExpectedTrace | None) -> Chunk:
    async with config.client(say_retry) as client:
        metadata: Metadata = ()
        if trace is not None:
            await trace.begin()
            metadata = trace.metadata
        asks = config.message is not None
        has_template = asks and (await config.find_model(client)).has_chat_template
        request = config.request(has_chat_template=has_template)
        return await show_answer(
            client, request, write_text, config.timeout_s, metadata, _write_call
        )


def _write_call(call: inference_pb2.ToolCall) -> None:
    write_text(f"{shown_call(call)}\n")
