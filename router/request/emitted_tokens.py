"""The output of one request: which tokens were emitted, and whether it is complete. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych.v1 import common_pb2

# Takes new tokens and their margins; True: a stop string ended the text within them.
TokenSink = Callable[[Sequence[int], Sequence[float]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """What decides when an output is complete."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


class Output:
    """Accepts tokens only at the position that is next.

    Invariant: ``sink`` saw exactly ``token_ids``, in order; nothing follows a
    complete output.
    """

    def __init__(self, shape: RequestShape, sink: TokenSink) -> None:
        self.token_ids: list[int] = []
        self._shape = shape
        self._sink = sink
        self._matched = False

    @property
    def num_sequence_tokens(self) -> int:
        """Prompt and output."""
        return len(self._shape.prompt_ids) + len(self.token_ids)

    @property
    def complete_reason(self) -> int:
        """The FinishReason that the output itself shows; 0 if it may go on."""
        shape, num_output = self._shape, len(self.token_ids)
        if num_output == 0:
            return 0
        stopped = num_output >= shape.min_tokens and self.token_ids[-1] in shape.stop_token_ids
        if stopped or self._matched:
            return common_pb2.FINISH_REASON_STOP
        return common_pb2.FINISH_REASON_LENGTH if num_output >= shape.max_tokens else 0

    @property
    def stop_matched(self) -> bool:
        """Whether a stop string ended it: no worker knows that."""
        return self._matched

    def accept(self, position: int, token_ids: Sequence[int], margins: Sequence[float]) -> bool:
        """Emit those tokens that are next; those that were emitted before are ignored.

        ``position`` is that of the first, from the prompt's start. False if tokens
        before it are missing; then nothing was emitted.
        """
        known = self.num_sequence_tokens - position
        if known < 0:
            return False
        room = self._shape.max_tokens - len(self.token_ids)
        new = token_ids[known : known + room]
        if new and not self.complete_reason:
            self.token_ids.extend(new)
            self._matched = self._sink(new, margins[known : known + room])
        return True
