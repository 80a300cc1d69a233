"""A transport of a worker's ranks: each has an agent of its own, beside its own pool.

A read of blocks is as many reads as there are pairs of ranks that share heads; it is over
when all of them are, and fails if one does. Transfer thread only.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from diptych.v1 import kv_source_pb2
from kvtransfer.block_shares import Pieces, moves
from kvtransfer.digest import descriptor_digest
from kvtransfer.errors import AgentLostError, TransportError, UndeadAgentError
from kvtransfer.transports.base import Copy, Peer, SilentPeer, Transport


class RankTransport(Transport, Protocol):
    """One rank's agent."""

    def descriptor(self) -> kv_source_pb2.MemoryDescriptor: ...

    def connect(
        self,
        descriptor: kv_source_pb2.MemoryDescriptor,
        block_bytes: int | None = None,
        pieces: Pieces | None = None,
    ) -> Peer:
        """block_bytes: of the source rank's blocks; None: as many as ours have.

        pieces: what all reads of this peer take of each block; None: its first bytes.
        """
        ...


class RankTransports:
    """Those of all ranks as one. Implements ``Transport``."""

    def __init__(
        self, parts: Sequence[RankTransport], block_bytes: int, stretch_bytes: int
    ) -> None:
        """parts: of one library, in the order of the ranks; at least one.

        Both sizes are those of whole blocks.
        """
        self.parts = tuple(parts)
        self.name = parts[0].name
        self._block_bytes, self._stretch_bytes = block_bytes, stretch_bytes

    @property
    def ready(self) -> bool:
        return all(part.ready for part in self.parts)

    @property
    def problem(self) -> str:
        return next((part.problem for part in self.parts if part.problem), "")

    @property
    def retiring(self) -> bool:
        return any(part.retiring for part in self.parts)

    @property
    def undead(self) -> UndeadAgentError | None:
        return next((part.undead for part in self.parts if part.undead is not None), None)

    def descriptor(self) -> kv_source_pb2.MemoryDescriptor:
        if len(self.parts) == 1:
            return self.parts[0].descriptor()
        descriptor = kv_source_pb2.MemoryDescriptor(
            ranks=[part.descriptor() for part in self.parts]
        )
        descriptor.digest = descriptor_digest(descriptor)
        return descriptor

    def connect(self, descriptor: kv_source_pb2.MemoryDescriptor) -> Peer:
        sources = descriptor.ranks or [descriptor]
        if len(sources) == len(self.parts) == 1:
            return self.parts[0].connect(sources[0])
        if descriptor.ranks and descriptor.digest != descriptor_digest(descriptor):
            raise TransportError("the source's memory descriptors were damaged on their way")
        try:
            planned = moves(len(sources), len(self.parts), self._stretch_bytes)
        except ValueError as error:
            raise TransportError(f"the source's ranks: {error}") from error
        if not self.ready:  # UCX would keep the connections that the others make in vain
            raise AgentLostError(f"the {self.name} agent of a rank is being rebuilt")
        links: list[RankLink] = []
        try:
            for move in planned:
                peer = self.parts[move.reader_rank].connect(
                    sources[move.source_rank], self._block_bytes // len(sources), move.pieces
                )
                links.append(RankLink(peer, move.num_bytes))
        except BaseException:
            for link in links:
                link.peer.close()
            raise
        return RankPeer(links, self._block_bytes, self._stretch_bytes)

    def serve(self, active: bool) -> None:
        for part in self.parts:
            part.serve(active)

    def rebuild(self) -> None:
        for part in self.parts:
            part.rebuild()

    def close(self) -> None:
        for part in self.parts:
            part.close()


class RankLink(NamedTuple):
    """A rank of the source, as one of ours reads it."""

    peer: Peer
    stretch_bytes: int  # that it reads of each stretch


class RankPeer(SilentPeer):
    """A source's ranks as ours reach them. Implements ``Peer``."""

    def __init__(self, links: Sequence[RankLink], block_bytes: int, stretch_bytes: int) -> None:
        self._links = links
        self._block_bytes, self._stretch_bytes = block_bytes, stretch_bytes

    @property
    def usable(self) -> bool:
        return all(link.peer.usable for link in self._links)

    def read(
        self,
        source_block_ids: tuple[int, ...],
        local_block_ids: tuple[int, ...],
        num_bytes: int | None = None,
    ) -> "RankCopy":
        num_stretches = (num_bytes or self._block_bytes) // self._stretch_bytes
        copies = []
        for link in self._links:
            num_own = num_stretches * link.stretch_bytes
            copy = link.peer.read(source_block_ids, local_block_ids, num_own)
            assert copy is not None, "what has a descriptor is read"
            copies.append(copy)
        return RankCopy(copies)

    def check_lane(self) -> None:
        for link in self._links:
            link.peer.check_lane()

    def close(self) -> None:
        for link in self._links:
            link.peer.close()


class RankCopy:
    """Reads of several ranks. Terminal, well or not, when all of them are.

    Of several errors it raises the first; but where that only knows that our agent is gone, the one
    that says why it went.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.wakes = all(copy.wakes for copy in copies)
        self._open = list(copies)
        self._error: Exception | None = None  # the one to raise, of those so far

    def post(self) -> bool:
        return self._advance((copy, copy.post) for copy in self._open)

    def poll(self) -> bool:
        return self._advance((copy, copy.poll) for copy in self._open)

    def _advance(self, steps: Iterable[tuple[Copy, Callable[[], bool]]]) -> bool:
        still_open = []
        for copy, step in steps:
            try:
                if not step():
                    still_open.append(copy)
            except Exception as error:  # noqa: BLE001 - raised once nothing writes any more
                if self._error is None or _says_why(error, self._error):
                    self._error = error
        self._open = still_open
        if still_open:
            return False
        if self._error is not None:
            raise self._error
        return True


def _says_why(error: Exception, other: Exception) -> bool:
    """Whether ``error`` may have ended the agent over which the read of ``other`` was lost."""
    is_lost = isinstance(other, AgentLostError) and not isinstance(error, AgentLostError)
    return is_lost and isinstance(error, TransportError)
