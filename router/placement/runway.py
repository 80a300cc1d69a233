"""How much a router lets wait on a prefill worker. Pure.

Only as much is sent ahead as keeps the worker busy with full steps: that is a time, and tokens only
while a worker has not measured yet how fast it is. The rest waits in the router, whose forecasts it
does not spoil. One prompt of each payer may be sent beyond: workers compute what they have in
turns, so it need not wait for those of others that came before.
"""

from typing import Final, NamedTuple

_BEYOND: Final = 2.0  # times the runway, for prompts of payers of whom none waits there


class Runway(NamedTuple):
    """What may wait there of one router's prompts; a prompt more is sent while less does."""

    max_tokens: int  # where it is not known what the worker computes in a second
    seconds: float
    """Of the worker's computing."""

    def is_open(self, num_tokens: int, tokens_per_s: float) -> bool:
        """Where so many are left to compute; ``tokens_per_s`` is the worker's, 0: not known."""
        return self._is_within(num_tokens, tokens_per_s, 1.0)

    def is_open_beyond(self, num_tokens: int, tokens_per_s: float) -> bool:
        """Whether a payer's first prompt may be sent all the same."""
        return self._is_within(num_tokens, tokens_per_s, _BEYOND)

    def _is_within(self, num_tokens: int, tokens_per_s: float, times: float) -> bool:
        if tokens_per_s > 0:
            return num_tokens <= self.seconds * tokens_per_s * times
        return num_tokens < self.max_tokens * times
