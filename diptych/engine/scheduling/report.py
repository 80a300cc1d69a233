"""What a prefill worker tells of a sequence's tokens beside their KV. Plain data. Pure."""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from diptych.token_logprobs import PromptLogprobs


class Pooling(enum.IntEnum):
    """How the hidden states of a sequence's tokens become one vector. Values as on the wire."""

    MEAN = 1
    LAST_TOKEN = 2


class LogprobsReport(NamedTuple):
    """Log probabilities of the tokens at ``first_position`` up to ``end_position``.

    Each follows from what comes before it, so that at least 1 is the first.
    """

    first_position: int
    end_position: int
    num_top: int  # likeliest tokens to tell in each one's place

    def num_shareable_tokens(self, num_tokens: int) -> int:
        """Tokens whose KV may come from others: what they are computed for is not asked."""
        return min(num_tokens - 1, self.first_position - 1)

    def num_told(self, start: int, end: int) -> int:
        """Tokens whose log probabilities computing tokens ``start`` to ``end`` tells."""
        first, behind = self._told(start, end)
        return max(0, behind - first)

    def part(self, token_ids: Sequence[int], start: int, end: int) -> "LogprobsPart | None":
        """What computing tokens ``start`` to ``end`` of these tells; None: nothing."""
        first, behind = self._told(start, end)
        if first >= behind:
            return None
        return LogprobsPart(first - 1 - start, tuple(token_ids[first:behind]), first, self.num_top)

    def _told(self, start: int, end: int) -> tuple[int, int]:
        return max(start + 1, self.first_position), min(end + 1, self.end_position)


class PoolingReport(NamedTuple):
    """One vector of the hidden states of all tokens."""

    pooling: Pooling

    def num_shareable_tokens(self, num_tokens: int) -> int:
        """As LogprobsReport's."""
        return 0 if self.pooling is Pooling.MEAN else num_tokens - 1

    def num_told(self, start: int, end: int) -> int:
        """As LogprobsReport's: none."""
        return 0

    def part(self, token_ids: Sequence[int], start: int, end: int) -> "StatesPart | None":
        """As LogprobsReport's."""
        if self.pooling is Pooling.MEAN:
            return StatesPart(0, end - start)
        return StatesPart(end - start - 1, 1) if end == len(token_ids) else None


class LogprobsPart(NamedTuple):
    """The log probabilities that one chunk of tokens can tell."""

    first_row: int  # of the chunk: the token before the first one told of
    token_ids: tuple[int, ...]  # those told of
    position: int  # of the first of them
    num_top: int

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


class StatesPart(NamedTuple):
    """The rows of one chunk whose hidden states are to be added up."""

    first_row: int
    num_rows: int


class SummedStates(NamedTuple):
    """Hidden states behind the last norm, added up."""

    values: tuple[float, ...]  # [hidden_size]


Report = LogprobsReport | PoolingReport
Part = LogprobsPart | StatesPart
Told = PromptLogprobs | SummedStates
