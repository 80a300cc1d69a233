"""One pull of a lease, fetched again under its ticket where a transport agent's end broke it."""

from collections.abc import Callable

from diptych.v1 import decode_pb2
from kvtransfer.reader.fetch_driver import FetchDriver
from kvtransfer.reader.pair import SourcePair
from kvtransfer.reader.proven_link import Link
from kvtransfer.reader.pull_machine import PullError, PullResult

MAX_FETCHES = 4  # an agent that ends each time is no connection


class FetchSeries:
    """The fetches of one lease under one ticket, and what the failure of one means. Pure."""

    def __init__(self) -> None:
        self.num_begun = 0

    def begin(self) -> bool:
        """Another one begins; True if it is not the first."""
        self.num_begun += 1
        return self.num_begun > 1

    def goes_on_after(self, error: PullError) -> bool:
        """Whether there is to be another one: an agent ended, and has not done so each time."""
        return error.agent_lost and self.num_begun < MAX_FETCHES

    @staticmethod
    def loses_pair(error: PullError) -> bool:
        """Whether other pulls over the same pair would fail the same way."""
        if error.unasked:
            return False
        if error.failure == decode_pb2.PULL_FAILURE_SOURCE_LOST:
            return True
        return error.failure == decode_pb2.PULL_FAILURE_TRANSPORT and not error.refusal


class LeasePull:
    """What a Bind asks for: run once by one task on the event loop.

    Waits for a pair that is being proven. Where an agent ended under a fetch, ours or
    the source's, lease and ticket stand: the next fetch begins once the pair is proven
    again, and into the same blocks only when no earlier read can write them any more.
    """

    def __init__(
        self,
        pair: SourcePair | None,
        open_fetch: Callable[[Link], FetchDriver],
        *,
        source_address: str,
        wait_s: float,
        on_refetch: Callable[[], None],
    ) -> None:
        """``pair`` is None where nobody named the source; ``source_address`` is for messages.

        ``wait_s`` bounds each wait for the pair.
        """
        self._pair = pair
        self._open_fetch = open_fetch
        self._source_address = source_address
        self._wait_s = wait_s
        self._on_refetch = on_refetch
        self._fetch: FetchDriver | None = None  # the newest
        self._abandoned = False

    async def run(self) -> PullResult:
        """Pull until proven. Cancelling the task abandons the pull. Raises PullError."""
        pair = self._pair
        failed: PullError | None = None
        series = FetchSeries()
        while True:
            link = None if pair is None else await pair.until_proven(self._wait_s)
            if pair is None or link is None or self._abandoned:
                raise self._not_connected() if failed is None else self._not_again(pair, failed)
            if series.begin():
                self._on_refetch()
            self._fetch = self._open_fetch(link)
            try:
                with link.fetching():
                    result = await self._fetch.run()
            except PullError as error:
                if series.loses_pair(error) and pair.link is link:
                    pair.lost(error.message)
                if not series.goes_on_after(error):
                    raise
                failed = error
            else:
                if pair.link is link:
                    pair.measured(result.stats)
                return result

    def abandon(self) -> frozenset[int]:
        """End the pull now, as ``FetchDriver.abandon``."""
        self._abandoned = True
        return frozenset() if self._fetch is None else self._fetch.abandon()

    def _not_again(self, pair: SourcePair | None, failed: PullError) -> PullError:
        """As the lost agent failed it; why it was not fetched again is said, too."""
        why = f"its pair was not proven again within {self._wait_s} s"
        if pair is not None and not pair.is_being_proven:
            why = f"its pair was not proven again: {pair.message}"
        return PullError(failed.failure, f"{failed.message}; {why}", agent_lost=True)

    def _not_connected(self) -> PullError:
        why = "no router names it"
        if self._pair is not None:
            why = self._pair.message or f"not proven within {self._wait_s} s"
        message = f"no proven connection to {self._source_address}: {why}"
        return PullError(decode_pb2.PULL_FAILURE_NOT_CONNECTED, message)
