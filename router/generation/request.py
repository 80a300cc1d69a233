"""A client's request as plain data, whichever front end it came through. Not checked yet."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from diptych.sampling_params import NOTHING_SAID, SamplingOptions
from diptych.service_level import NO_LEVEL, ServiceLevel
from diptych.tenant import NOBODY, Tenant
from diptych.text.chat_template import Message, Tool


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text to continue, tokenised as it is."""

    text: str
    is_continuation: bool = False
    """Other tokens come before it: no special ones are added."""
    is_continued: bool = False
    """Other tokens come after it: none is added that ends a text."""


class ToolChoice(enum.IntEnum):
    """Whether a model is to call tools. Values as on the wire."""

    AUTO = 0
    NONE = 1
    REQUIRED = 2


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's chat template, and further names that the template knows."""

    messages: tuple[Message, ...]
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice.AUTO
    required_tool: str = ""
    """The one that has to be called; with REQUIRED."""
    has_parallel_calls: bool = True
    """Whether one answer may have several calls."""
    is_split: bool = False
    """Whether reasoning is told apart from the text; with tools it always is."""
    now_unix_s: int = 0
    """What the template takes for now, seconds since 1970 UTC; 0: when it is rendered."""

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """Those that the model is told of, and may call."""
        return () if self.tool_choice is ToolChoice.NONE else self.tools

    @property
    def forced_tools(self) -> tuple[Tool, ...]:
        """Those of which one has to be called; none: nothing has to be."""
        if self.tool_choice is not ToolChoice.REQUIRED:
            return ()
        return tuple(tool for tool in self.tools if self.required_tool in ("", tool.name))


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are.

    May be a view of what came over the wire: check its length before copying it.
    """

    token_ids: Sequence[int]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


class LogprobRoom(NamedTuple):
    """For how many log probabilities there is memory until the answer is written."""

    num: int
    is_of_prompt: bool
    """The prompt's alone stay there: those of the output are written as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """See ``GenerateRequest`` in inference.proto, whose names these are."""

    prompt: Prompt
    sampling: SamplingOptions = NOTHING_SAID
    model: str = ""
    request_id: str = ""
    cache_salt: str = ""
    level: ServiceLevel = NO_LEVEL
    tenant: Tenant = NOBODY
    """Whose it is, by the caller's key or token; never by what the request says."""
    emitted_token_ids: Sequence[int] = ()  # as TokenPrompt.token_ids
    model_digest: str = ""  # of the weights that emitted those; empty: any
    return_prompt_token_ids: bool = False
    logprob_room: LogprobRoom | None = None
    """None: all are written as they come."""
    num_bytes: int
    """Size of the request as it arrived: what it counts for while it is open."""

    @property
    def num_tokens_at_least(self) -> int:
        """What it will come to with its answer, as far as that is known before it is tokenised."""
        num_prompt = len(self.prompt.token_ids) if isinstance(self.prompt, TokenPrompt) else 1
        return num_prompt + max(0, self.sampling.max_tokens or 0)

    def rendered_at(self, now_unix_s: int) -> "GenerationRequest":
        """With a moment that a chat's template takes for now, unless it has one."""
        chat = self.prompt
        if not isinstance(chat, ChatPrompt) or chat.now_unix_s:
            return self
        return replace(self, prompt=replace(chat, now_unix_s=now_unix_s))

    @property
    def prompt_field(self) -> str:
        """What the prompt is called in errors."""
        match self.prompt:
            case TextPrompt():
                return "text"
            case ChatPrompt():
                return "chat.messages"
            case TokenPrompt():
                return "tokens"
