"""Answers in one message each that were handed to gRPC, which keeps them until taken. Pure.

gRPC can neither end such a call nor tell its client anything, so who is slow cannot be cut off: a
further request is refused instead, before any work on it.
"""

from typing import Final

from diptych.shared_room import SharedRoom

FREE_BYTES: Final = 16_384
"""Of an answer that need no room; how many there are is bounded by the server's calls."""


class HandedOver(SharedRoom):
    """Owns how many bytes wait in gRPC. Event loop only.

    Invariant: they are more than ``max_bytes`` by the answers alone that were being made when
    it was reached; how many those are is bounded by admission.
    """

    def __init__(self, max_bytes: int) -> None:
        what = "answers of {} bytes wait for clients to take them"
        super().__init__(max_bytes, what, free=FREE_BYTES)

    @property
    def num_bytes(self) -> int:
        """Of all tenants, without those that need no room."""
        return self.num_held
