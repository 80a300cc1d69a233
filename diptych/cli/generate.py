"""``diptych generate``: stream one answer from a router to standard output."""

import asyncio
import sys
from collections.abc import Callable
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from diptych import settings
from diptych.cli.breakdown import breakdown
from diptych.client import ChatMessage, Chunk, DiptychClient, GenerateOptions, build_request
from diptych.errors import DiptychError
from diptych.v1 import inference_pb2

EXIT_REFUSED = 1


class GenerateConfig(BaseModel):
    """Stream one answer from a router. Give --prompt or --chat; - reads standard input."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str = Field("127.0.0.1:50051", description="host:port of the router.")
    prompt: str | None = Field(None, description="Text to continue, as it is.")
    chat: str | None = Field(None, description="A user's message, put into the chat template.")
    system: str | None = Field(None, description="The system message that goes before --chat.")
    model: str = Field("", description="Name of the model; unset: the router's only one.")
    max_tokens: int | None = Field(
        None, ge=1, description="Output tokens at the most; unset: what the context length leaves."
    )
    temperature: float | None = Field(None, description="0 is greedy; unset: 1.0. 0 to 100.")
    top_k: int = Field(0, ge=0, description="Draw from the k most likely tokens; 0: from all.")
    top_p: float | None = Field(
        None, description="Draw from the likeliest tokens up to this probability. Above 0, to 1."
    )
    seed: int | None = Field(
        None, ge=0, lt=2**64, description="The same seed gives the same answer; unset: a new one."
    )
    stop: list[str] = Field([], description="Text that ends the answer.")
    ignore_eos: bool = Field(False, description="Go on after the model's end-of-sequence token.")
    timing: bool = Field(False, description="Show where the time went, on standard error.")
    timeout_s: float | None = Field(None, gt=0, description="Give up after this, s.")

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.chat is None):
            raise ValueError("give --prompt or --chat")
        if self.system is not None and self.chat is None:
            raise ValueError("--system goes with --chat")
        return self

    def request(self) -> inference_pb2.GenerateRequest:
        """The request that these settings describe."""
        options = GenerateOptions(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )
        if self.chat is None:
            return build_request(_text(self.prompt or ""), options=options, model=self.model)
        messages = [] if self.system is None else [ChatMessage("system", self.system)]
        messages.append(ChatMessage("user", _text(self.chat)))
        return build_request(messages=messages, options=options, model=self.model)


def run(args: list[str]) -> int:
    """Stream the answer; 0, or 1 when the router refused or failed."""
    config = settings.load(
        GenerateConfig, args, prog="diptych generate", env_prefix="DIPTYCH_GENERATE_"
    )
    try:
        last = asyncio.run(stream(config.address, config.request(), _write, config.timeout_s))
    except DiptychError as error:
        print(f"\ndiptych generate: {error.reason}: {error.message}", file=sys.stderr)  # noqa: T201
        return EXIT_REFUSED
    print(flush=True)  # noqa: T201
    if config.timing and last.usage is not None and last.timing is not None:
        print("\n".join(breakdown(last.usage, last.timing)), file=sys.stderr)  # noqa: T201
    return 0


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
    last = None
    async with DiptychClient(address) as client:
        async for chunk in client.stream(request, timeout_s):
            write(chunk.text)
            last = chunk
    if last is None or last.finish_reason is None:
        raise DiptychError("the stream ended without a finish reason")
    return last


def _text(value: str) -> str:
    return sys.stdin.read() if value == "-" else value


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
