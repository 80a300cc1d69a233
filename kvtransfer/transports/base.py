"""The seam between a pull and what moves its bytes. Everything here runs on the transfer thread."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # not in an agent's process
    from diptych.v1 import kv_source_pb2


class TransportError(Exception):
    """A read or a connection failed for good; the message says how."""


class SourceLostError(TransportError):
    """The process that was read from is gone."""


class AgentLostError(TransportError):
    """Our own end of the transport is gone, and its reads with it; it is being rebuilt."""


class Copy(Protocol):
    """One posted movement of bytes into local blocks.

    Terminal once ``post`` or ``poll`` returned True or raised TransportError: only
    then are the local blocks safe to reuse. ``post`` is called once. Where ``wakes``,
    its end wakes the transfer thread, so that it need not be polled by time.
    """

    @property
    def wakes(self) -> bool: ...

    def post(self) -> bool: ...

    def poll(self) -> bool: ...


class Peer(Protocol):
    """A connected source's memory, as one transport reaches it."""

    def read(
        self, source_block_ids: tuple[int, ...], local_block_ids: tuple[int, ...]
    ) -> Copy | None:
        """A copy to post, or None where the source sends Data instead.

        Raises TransportError where the source has no such block.
        """
        ...

    def write(self, local_block_ids: tuple[int, ...], offset: int, payload: bytes) -> Copy:
        """A copy of bytes that the source sent, from ``offset`` in the first block on.

        Raises TransportError where the source has none to send.
        """
        ...

    def check_lane(self) -> None:
        """After reads were made: raise TransportError if they went a forbidden way."""
        ...

    def close(self) -> None:
        """Forget the peer. Copies already posted stay unfinished until they end."""
        ...


class Transport(Protocol):
    """One way to move blocks, for both roles."""

    name: str
    ready: bool  # whether peers can be connected; read on the event loop too
    problem: str  # why it is not, if it failed; empty while it is (re)built

    def descriptor(self) -> "kv_source_pb2.MemoryDescriptor | None":
        """How peers read our memory; None where they need not know. Raises TransportError."""
        ...

    def connect(self, descriptor: "kv_source_pb2.MemoryDescriptor") -> Peer:
        """Reach a source's memory. Raises TransportError, here or at the first read."""
        ...

    def serve(self, active: bool) -> None:
        """Progress reads that peers make of our memory, from now on or no more."""
        ...

    def rebuild(self) -> None:
        """Tear down and start anew; peers must be connected again.

        Every copy posted is terminal soon, with AgentLostError. A start that fails is tried again.
        """
        ...

    def close(self) -> None:
        """Tear down: every copy posted is terminal afterwards."""
        ...
