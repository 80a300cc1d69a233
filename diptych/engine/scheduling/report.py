"""What a prefill worker tells of a sequence's tokens beside their KV. Plain data. Pure."""

from typing import NamedTuple


class LogprobsReport(NamedTuple):
    """Log probabilities of the tokens at ``first_position`` up to ``end_position``.

    Each follows from what comes before it, so that at least 1 is the first.
    """

    first_position: int
    end_position: int
    num_top: int  # likeliest tokens to tell in each one's place

    @property
    def num_shareable_tokens(self) -> int:
        """Tokens whose KV may come from others: what they are computed for is not asked."""
        return self.first_position - 1


class LogprobsPart(NamedTuple):
    """The part of a report that one chunk of tokens can tell."""

    first_row: int  # of the chunk: the token before the first one told of
    token_ids: tuple[int, ...]  # those told of
    position: int  # of the first of them
    num_top: int

    @classmethod
    def of(
        cls, report: LogprobsReport, token_ids: list[int], start: int, end: int
    ) -> "LogprobsPart | None":
        """What computing tokens ``start`` to ``end`` tells; None: nothing."""
        first = max(start + 1, report.first_position)
        behind = min(end + 1, report.end_position)
        if first >= behind:
            return None
        return cls(first - 1 - start, tuple(token_ids[first:behind]), first, report.num_top)
