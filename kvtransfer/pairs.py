"""The sources this worker can pull from: connected, compared, proven, measured."""

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from diptych.timers import Timers
from diptych.v1 import worker_pb2
from kvtransfer.counters import ReaderCounters
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.memory import ScratchBlocks
from kvtransfer.pull import PullRequest, PullResult
from kvtransfer.reader import Pull


class PeerKey(NamedTuple):
    """A source process; a restart at the same address is another one."""

    address: str
    incarnation: str


class PairTable:
    """One entry per source process that any router named. Event loop only.

    ``on_change()`` after ``pairs()`` changed. ``on_quarantine(block_ids)`` when a
    pull ended with reads unfinished; ``on_quarantine_end(block_ids)`` when those
    reads (each block once, in any partition) can no longer write.
    """

    counters: ReaderCounters

    def __init__(
        self,
        endpoint: TransferEndpoint,
        *,
        scratch: ScratchBlocks,
        timers: Timers,
        on_change: Callable[[], None],
        on_quarantine: Callable[[frozenset[int]], None],
        on_quarantine_end: Callable[[frozenset[int]], None],
    ) -> None:
        raise NotImplementedError

    async def run(self) -> None:
        """Keep all pairs connected and proven until cancelled. Run it in a task group."""
        raise NotImplementedError

    def set_peers(self, owner: Hashable, peers: Iterable[PeerKey]) -> None:
        """Replace the sources that ``owner`` (a router's stream) knows. Empty: it left."""
        raise NotImplementedError

    def pairs(self) -> list[worker_pb2.Pair]:
        """The state of every pair, for Watch."""
        raise NotImplementedError

    def open_pull(self, request: PullRequest) -> Pull:
        """Prepare a pull; ``await pull.run()`` performs it. Raises nothing."""
        raise NotImplementedError

    async def pull(self, request: PullRequest) -> PullResult:
        """``open_pull(request).run()``: see there."""
        return await self.open_pull(request).run()
