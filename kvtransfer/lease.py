"""The source's record of its leases: who may read which blocks, and what was announced.

Pure and synchronous; owned by the event loop. The prefill worker opens, announces,
grants and closes; :class:`~kvtransfer.source.KVSourceServicer` observes and answers
readers. It holds no block: the worker's lease stream does, and frees after ``close``.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

LeaseId = Hashable


class AnnouncedRange(NamedTuple):
    """Tokens whose KV is complete; ``digests`` is None until the transfer thread has them."""

    first_token: int
    num_tokens: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    digests: tuple[bytes, ...] | None
    last: bool


class LeaseObserver(Protocol):
    """Told of changes, synchronously, after they were made."""

    def on_announced(self, lease_id: LeaseId, index: int, announced: AnnouncedRange) -> None: ...
    def on_digested(self, lease_id: LeaseId) -> None: ...
    def on_granted(self, lease_id: LeaseId) -> None: ...
    def on_closed(self, lease_id: LeaseId) -> None: ...


class LeaseTable:
    """All open leases of this worker.

    ``generation_of(block_id)`` is the pool's count of how often a block was
    handed out for writing.
    """

    def __init__(self, block_size: int, generation_of: Callable[[int], int]) -> None:
        self.block_size = block_size

    def observe(self, observer: LeaseObserver) -> None:
        """Register the one observer (KVSourceServicer does this itself)."""
        raise NotImplementedError

    def open(self, lease_id: LeaseId, block_ids: Sequence[int], num_tokens: int) -> None:
        """Record a lease on ``block_ids``, which the caller holds, for ``num_tokens`` tokens.

        ``ceil(num_tokens / block_size)`` blocks are used; more are ignored.
        Raises ValueError: the id is open, or too few blocks.
        """
        raise NotImplementedError

    def announce(self, lease_id: LeaseId, upto_tokens: int) -> None:
        """KV of the first ``upto_tokens`` tokens is complete on the device.

        Call after each step (and at once for a prefix hit). Never blocks. Whole
        blocks become readable; the final partial one when ``upto_tokens`` reaches
        the lease's ``num_tokens``. Unknown leases and repeats are ignored.
        """
        raise NotImplementedError

    def grant(self, lease_id: LeaseId, ticket: bytes, reader_incarnation: str) -> None:
        """Let one reader fetch; revokes the grant before. May precede announcements.

        Raises LeaseExpiredError: no such lease. InvalidRequestError: a ticket that
        is not 16 bytes or was used before.
        """
        raise NotImplementedError

    def close(self, lease_id: LeaseId) -> None:
        """End the lease: readers are refused from here on. Idempotent.

        Call before the blocks are freed.
        """
        raise NotImplementedError
