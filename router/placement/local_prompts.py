"""Prompts of ours that a decode worker computes itself, until it tells of them. Pure."""

from typing import Final

_CROSSING_S: Final = 0.05  # within which what is sent has come, in either direction


class LocalPrompts:
    """Of one router, on one worker.

    A worker tells of a prompt from the moment when its sequence is started: what it tells while one
    only has its blocks, which is at once, has nothing of that one. Nothing says that a start has
    come: what it tells may have crossed that on its way, if it is heard soon after.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        """Of those that it has not told of."""
        self._untold: dict[int, int] = {}  # tokens, by sequence
        self._started: dict[int, float] = {}  # when, s, of these

    def asked(self, sequence_id: int, num_tokens: int) -> None:
        """It is asked for blocks for one."""
        self._untold[sequence_id] = num_tokens
        self.num_tokens += num_tokens

    def reserved(self, sequence_id: int, num_cached_tokens: int) -> bool:
        """It has the blocks, and so many of the prompt's tokens in them; whether that is news."""
        num_less = min(self._untold.get(sequence_id, 0), num_cached_tokens)
        if num_less:
            self._untold[sequence_id] -= num_less
            self.num_tokens -= num_less
        return num_less > 0

    def started(self, sequence_id: int, now_s: float) -> None:
        """It is told to compute it."""
        if sequence_id in self._untold:
            self._started[sequence_id] = now_s

    def told(self, heard_s: float) -> None:
        """It said how it is, which was heard then: what was started well before is in that."""
        for sequence_id, started_s in list(self._started.items()):
            if heard_s - started_s >= _CROSSING_S:
                self.over(sequence_id)

    def over(self, sequence_id: int) -> bool:
        """It is computed, or will not be; whether it had not been told of."""
        num_tokens = self._untold.pop(sequence_id, None)
        self._started.pop(sequence_id, None)
        self.num_tokens -= num_tokens or 0
        return num_tokens is not None

    def clear(self) -> None:
        """All are over."""
        self._untold.clear()
        self._started.clear()
        self.num_tokens = 0
