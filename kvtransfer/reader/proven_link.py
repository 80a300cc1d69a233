"""A connected source over one transport, and for how long it stays so."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from diptych.v1 import kv_source_pb2
from diptych.v1 import kv_source_pb2_grpc as pb_grpc
from kvtransfer.transports.base import Peer
from kvtransfer.transports.ways import Way

_UNSAID = Way("")


class Link:
    """A source's stub, and its memory over one transport. Event loop only.

    Owns the peer: forgets it at once when the source is lost (``close``), or when the
    last fetch under way has ended (``retire``).
    """

    def __init__(
        self,
        stub: "pb_grpc.KVSourceAsyncStub",
        transport: str,
        peer: Peer,
        close_peer: Callable[[], None],
        way: Way = _UNSAID,
    ) -> None:
        self.stub = stub
        self.transport = transport
        self.peer = peer
        self.way = way
        self._close_peer = close_peer
        self._num_fetches = 0
        self._retired = False
        self._closed = False

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """While open, the link may be retired and still be used."""
        self._num_fetches += 1
        try:
            yield
        finally:
            self._num_fetches -= 1
            self._close_if_done()

    def retire(self) -> None:
        """Nobody begins another fetch over it."""
        self._retired = True
        self._close_if_done()

    def close(self) -> None:
        """Forget the peer: fetches under way fail with their next read. Idempotent."""
        if not self._closed:
            self._closed = True
            self._close_peer()

    def _close_if_done(self) -> None:
        if self._retired and not self._num_fetches:
            self.close()


class RefusedLinks:
    """Links to a source that go a way they must not go, kept for the next try of that transport.

    Event loop only. UCX keeps a TCP connection that one side gave up for as long as both agents
    live, so each that is made in vain would cost both of them a file.
    """

    def __init__(self) -> None:
        self._links: dict[str, tuple[kv_source_pb2.MemoryDescriptor, Link]] = {}  # by transport

    def keep(self, link: Link, memory: kv_source_pb2.MemoryDescriptor) -> None:
        """``memory``: as the source described it when the link was opened."""
        before = self._links.pop(link.transport, None)
        if before is not None:
            before[1].close()
        self._links[link.transport] = memory, link

    def take(self, transport: str, memory: kv_source_pb2.MemoryDescriptor) -> Link | None:
        """The one over ``transport``, which is the caller's from now on; None: another is needed.

        It is closed where an agent has ended, or the source has another one.
        """
        kept = self._links.pop(transport, None)
        if kept is None:
            return None
        known, link = kept
        if known == memory and link.peer.usable:
            return link
        link.close()
        return None

    def close(self) -> None:
        """Nobody reads the source any more."""
        for _, link in self._links.values():
            link.close()
        self._links.clear()


class ProvenLink(NamedTuple):
    """Random blocks came over it, twice."""

    link: Link
    bytes_per_s: float  # of the second time
    shortfall: str = ""  # why there is no way over the transports that are wanted more
