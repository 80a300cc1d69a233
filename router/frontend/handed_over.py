"""Answers in one message each that were handed to gRPC, which keeps them until taken. Pure.

gRPC can neither end such a call nor tell its client anything, so who is slow cannot be cut off: a
further request is refused instead, before any work on it.
"""

from typing import Final

from router.frontend.tenant_bytes import TenantBytes

FREE_BYTES: Final = 16_384
"""Of an answer that need no room; how many there are is bounded by the server's calls."""


class HandedOver(TenantBytes):
    """Owns how many bytes wait in gRPC. Event loop only.

    Invariant: they are more than ``max_bytes`` by the answers alone that were being made when
    it was reached; how many those are is bounded by admission.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, FREE_BYTES, "answers of {} bytes wait for clients to take them")
