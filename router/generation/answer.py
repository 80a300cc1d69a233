"""What an answer consists of, as plain data; the order is that of ``Generate`` in inference.proto.

``Started``, then ``PromptLogprobs`` where they are asked for, any number of ``Delta``, then
one ``ChoiceFinished`` for each choice and one ``Summary``. An answer that fails ends with an
error instead.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from diptych.finish_reason import FinishReason
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs


class KVPath(enum.IntEnum):
    """How the KV came to be where it was needed. Values as on the wire."""

    UNSPECIFIED = 0
    DISAGGREGATED = 1
    LOCAL = 2
    RECOMPUTED = 3
    PREFILL_ONLY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one proven pull cost; see ``TransferStats`` in common.proto."""

    transport: str
    num_bytes: int
    num_tokens: int
    read_s: float
    exposed_s: float
    total_s: float
    digest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of tokens; see ``Usage`` in inference.proto."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_resumed_tokens: int = 0

    @property
    def num_new_tokens(self) -> int:
        """Output tokens that the client did not have before this call."""
        return self.num_output_tokens - self.num_resumed_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where the time went, s; see ``Timing`` in inference.proto. 0 where it did not get."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_write_s: float = 0.0
    ttft_s: float = 0.0
    handoff_gap_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    transfer: Transfer | None = None
    kv_path: KVPath = KVPath.UNSPECIFIED
    num_attempts: int = 1
    prefill_worker: str = ""
    decode_worker: str = ""
    num_preemptions: int = 0
    num_computed_prompt_tokens: int | None = None  # by decode workers; None: none told


class Started(NamedTuple):
    """What the request became; comes with the first token."""

    request_id: str
    model: str
    seed: int
    prompt_token_ids: tuple[int, ...]  # empty unless asked for
    model_digest: str = ""  # of the weights that answer; empty: unknown
    now_unix_s: int = 0  # what the chat's template took for now


class CalledTool(NamedTuple):
    """A call of a tool, whole. ``arguments`` is a JSON object, as text."""

    call_id: str
    name: str
    arguments: str


class Said(NamedTuple):
    """The parts of a piece of text: for the reader, thought, called."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[CalledTool, ...] = ()

    def followed_by(self, other: "Said") -> "Said":
        """Both as one."""
        return Said(
            self.text + other.text,
            self.reasoning + other.reasoning,
            self.tool_calls + other.tool_calls,
        )


class Delta(NamedTuple):
    """More of one choice's output.

    The text is what became certain with these tokens, so it may be empty, and it
    may come without tokens at the end. Where an answer is split its reasoning and its
    calls of tools are not in the text.
    """

    text: str
    token_ids: list[int]
    position: int  # in the output, of token_ids[0]
    margins: list[float]  # one per token, or none
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, or none
    choice: int = 0
    reasoning: str = ""
    tool_calls: tuple[CalledTool, ...] = ()

    @property
    def said(self) -> Said:
        """All that is said with it."""
        return Said(self.text, self.reasoning, self.tool_calls)

    @property
    def is_plain(self) -> bool:
        """Whether all that is said is text, of which there is some."""
        return bool(self.text and not self.reasoning and not self.tool_calls)

    def saying(self, said: Said) -> "Delta":
        """The same tokens, with this."""
        return self._replace(text=said.text, reasoning=said.reasoning, tool_calls=said.tool_calls)


class ChoiceFinished(NamedTuple):
    """A choice has ended.

    ``matched``: the stop string or the stop token that ended it, if one did.
    """

    reason: FinishReason
    matched: str | int | None = None
    choice: int = 0


class Summary(NamedTuple):
    """What the request took. The last event."""

    usage: Usage
    timing: Timing


GenerationEvent = Started | PromptLogprobs | Delta | ChoiceFinished | Summary


class Outlet(Protocol):
    """Writes deltas at once, where that takes no waiting. Event loop only."""

    @property
    def is_open(self) -> bool:
        """Whether ``write`` may be called now."""
        ...

    def write(self, delta: Delta) -> None:
        """Write the next one."""
        ...
