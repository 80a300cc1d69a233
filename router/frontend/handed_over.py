"""Answers in one message each that were handed to gRPC, which keeps them until taken. Pure.

gRPC can neither end such a call nor tell its client anything, so who is slow cannot be cut off: a
further request is refused instead, before any work on it. A tenant may hold as much as it leaves
free, so that one alone fills half, and others have room (Choudhury and Hahne's dynamic thresholds).
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

from diptych.errors import RETRY_LATER_S, QueueFullError

FREE_BYTES: Final = 16_384
"""Of an answer that need no room; how many there are is bounded by the server's calls."""


class HandedOver:
    """Owns how many bytes wait in gRPC. Event loop only.

    Invariant: they are more than ``max_bytes`` by the answers alone that were being made when
    it was reached; how many those are is bounded by admission.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()
        self.num_bytes = 0

    def admit(self, tenant: str) -> None:
        """Before any work on an answer, whose size nobody knows yet.

        Raises QueueFullError: it leaves as many untaken as are free.
        """
        if self._held[tenant] >= self._max_bytes - self.num_bytes:
            raise QueueFullError(
                f"answers of {self.num_bytes} bytes wait for clients to take them",
                retry_after_s=RETRY_LATER_S,
            )

    def hold(self, tenant: str, num_bytes: int) -> Callable[[], None]:
        """Count an answer of so many; call what is returned once its call is over."""
        num = max(0, num_bytes - FREE_BYTES)
        self._held[tenant] += num
        self.num_bytes += num

        def release() -> None:
            self.num_bytes -= num
            self._held[tenant] -= num
            if not self._held[tenant]:
                del self._held[tenant]

        return release
