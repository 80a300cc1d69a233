"""Whether a sequence that has its first token gets more, at no cost per token. Pure."""


class StallWatch:
    """Looks from time to time whether the output has grown.

    A worker that hangs as a whole is lost by its heartbeat's counter; this bounds a sequence
    that gets nothing while its worker goes on with others, whether it runs or is handed over.
    Without a token for ``bound_s`` it is stuck, which is noticed within twice that. Whether it
    may be, as its prompt is computed or it sits out, its owner knows: the request's machine.
    """

    def __init__(self, bound_s: float) -> None:
        self.due_s: float | None = None
        """When to look next, a moment of the request's clock; None: no token is due."""
        self._bound_s = bound_s
        self._num_tokens = 0  # when it was looked last

    def begin(self, num_tokens: int, now: float) -> None:
        """More is due of a sequence with so much output from now on."""
        self._num_tokens = num_tokens
        self.due_s = now + self._bound_s

    def end(self) -> None:
        """None is any more."""
        self.due_s = None

    def is_stuck(self, num_tokens: int, now: float) -> bool:
        """Look at ``due_s``: whether nothing came since the last time."""
        if num_tokens == self._num_tokens:
            return True
        self.begin(num_tokens, now)
        return False
