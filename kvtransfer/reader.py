"""The shell of one pull: gRPC stream, reads on the transfer thread, timers."""

from kvtransfer.pull import PullRequest, PullResult


class Pull:
    """One pull, run once by one task on the event loop."""

    request: PullRequest

    async def run(self) -> PullResult:
        """Pull until proven.

        Waits first for local blocks that an earlier pull's reads may still write.
        Cancelling the task abandons the pull. Raises PullError.
        """
        raise NotImplementedError

    def abandon(self) -> frozenset[int]:
        """End the pull now (its task still has to be cancelled). Idempotent, synchronous.

        No read is posted afterwards. Returns the local blocks that posted reads may
        still write, for ``scheduler.release(seq, ids)``; ``on_quarantine`` was called with
        them, ``on_quarantine_end`` follows.
        """
        raise NotImplementedError
