"""Work on prompts alone, which draws nothing: what clients ask for and hear. Plain data."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diptych.tenant import NOBODY, Tenant
from router.generation.answer import Usage
from router.generation.request import Prompt, TextPrompt, TokenPrompt

Input = TextPrompt | TokenPrompt


class Pooling(enum.Enum):
    """How the hidden states of an input's tokens become one vector."""

    MEAN = "mean"
    LAST_TOKEN = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWork:
    """What every kind of it has; see inference.proto, whose names these are. Not checked yet."""

    model: str = ""
    request_id: str = ""
    cache_salt: str = ""
    tenant: Tenant = NOBODY
    """Whose it is, by the caller's key."""
    num_bytes: int
    """Size of the request as it arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(PromptWork):
    """How likely is each continuation after the prompt?"""

    prompt: Prompt | None
    """None: each by itself, from its second token on."""
    continuations: Sequence[Input]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest(PromptWork):
    """Which vectors are these inputs?"""

    inputs: Sequence[Input]
    pooling: Pooling | None = None
    """None: as the model's makers say, else that of the last token."""
    dimensions: int | None = None
    normalize: bool = True


class ContinuationScore(NamedTuple):
    """Of one continuation; see ``ContinuationScore`` in inference.proto."""

    logprobs: Sequence[float]
    is_greedy: bool


class Scores(NamedTuple):
    """One for each continuation, in their order."""

    scores: tuple[ContinuationScore, ...]
    usage: Usage


class Embeddings(NamedTuple):
    """One vector for each input, in their order."""

    vectors: tuple[Sequence[float], ...]
    usage: Usage
