"""Prompts of ours that a decode worker computes itself, until it tells of them. Pure."""


class LocalPrompts:
    """Of one router, on one worker.

    A worker tells of a prompt from the moment when its sequence is started: what it tells while one
    only has its blocks, which is at once, has nothing of that one.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        """Of those that it has not told of."""
        self._untold: dict[int, int] = {}  # tokens, by sequence
        self._started: set[int] = set()  # of these

    def asked(self, sequence_id: int, num_tokens: int) -> None:
        """It is asked for blocks for one."""
        self._untold[sequence_id] = num_tokens
        self.num_tokens += num_tokens

    def started(self, sequence_id: int) -> None:
        """It is told to compute it."""
        if sequence_id in self._untold:
            self._started.add(sequence_id)

    def told(self) -> None:
        """It said how it is: what was started is in that."""
        for sequence_id in list(self._started):
            self.over(sequence_id)

    def over(self, sequence_id: int) -> bool:
        """It is computed, or will not be; whether it had not been told of."""
        num_tokens = self._untold.pop(sequence_id, None)
        self._started.discard(sequence_id)
        self.num_tokens -= num_tokens or 0
        return num_tokens is not None

    def clear(self) -> None:
        """All are over."""
        self._untold.clear()
        self._started.clear()
        self.num_tokens = 0
