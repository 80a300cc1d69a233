"""The one thread that posts and polls reads and computes digests."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TransferThread:
    """Runs short jobs in order; polls unfinished reads while there are any, else sleeps.

    Knows no transport. One per process; started and stopped by the endpoint.
    """

    def __init__(self, name: str = "kv-transfer") -> None:
        self._name = name

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Finish queued jobs, end the thread, join it."""
        raise NotImplementedError

    async def call(self, job: Callable[[], T]) -> T:
        """Run ``job`` on the thread; cancelling the wait does not stop the job."""
        raise NotImplementedError
