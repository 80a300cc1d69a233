"""The output of one request: which tokens were emitted, and whether it is complete. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych.token_logprobs import TokenLogprobs
from diptych.v1 import common_pb2
from router.request.prompt_told import Wanted

# Takes new tokens, their margins and log probabilities (as many, or none of these); True: a
# stop string ended the text within them.
TokenSink = Callable[[Sequence[int], Sequence[float], Sequence[TokenLogprobs]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """What decides when an answer is complete."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    told: Wanted | None = None
    has_logprobs: bool = False
    """Whether each token is told with its log probability."""


class EmittedTokens:
    """The output so far; accepts tokens only at the position that is next.

    Invariant: ``sink`` saw exactly ``token_ids``, in order; nothing follows a
    complete output. Owned by the request's machine.
    """

    __slots__ = (
        "_shape",
        "_sink",
        "complete_reason",
        "num_max_tokens",
        "num_sequence_tokens",
        "stop_matched",
        "token_ids",
    )

    def __init__(self, shape: RequestShape, sink: TokenSink) -> None:
        self.token_ids: list[int] = []
        self.complete_reason = 0
        """The FinishReason that the output itself shows; 0: it may go on."""
        self.stop_matched = False
        """Whether a stop string ended it: no worker knows that."""
        self.num_sequence_tokens = len(shape.prompt_ids)
        """Prompt and output: the position that is next."""
        self.num_max_tokens = len(shape.prompt_ids) + shape.max_tokens
        """The longest that prompt and output may become together."""
        self._shape = shape
        self._sink = sink

    def is_ahead(self, position: int) -> bool:
        """Whether tokens before ``position`` are missing."""
        return position > self.num_sequence_tokens

    def is_told(self, num_tokens: int, logprobs: Sequence[TokenLogprobs]) -> bool:
        """Whether so many tokens come with what is wanted of each."""
        return len(logprobs) == num_tokens or not self._shape.has_logprobs

    def accept(
        self,
        position: int,
        token_ids: Sequence[int],
        margins: Sequence[float],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> bool:
        """Emit those tokens that are next; those that were emitted before are ignored.

        ``position`` is that of the first, from the prompt's start. False if tokens
        before it are missing; then nothing was emitted.
        """
        known = self.num_sequence_tokens - position
        if known < 0:
            return False
        end = known + self._shape.max_tokens - len(self.token_ids)
        if self.complete_reason or known >= len(token_ids):
            return True
        if known or end < len(token_ids):
            token_ids, margins = token_ids[known:end], margins[known:end]
            logprobs = logprobs[known:end]
        self.token_ids.extend(token_ids)
        self.num_sequence_tokens += len(token_ids)
        self.stop_matched = self._sink(token_ids, margins, logprobs)
        self.complete_reason = self._reason()
        return True

    def _reason(self) -> int:
        shape, num_output = self._shape, len(self.token_ids)
        stopped = num_output >= shape.min_tokens and self.token_ids[-1] in shape.stop_token_ids
        if stopped or self.stop_matched:
            return common_pb2.FINISH_REASON_STOP
        return common_pb2.FINISH_REASON_LENGTH if num_output >= shape.max_tokens else 0
