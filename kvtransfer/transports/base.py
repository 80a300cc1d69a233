"""The seam between a pull and what moves its bytes. Everything here runs on the transfer thread."""

from typing import NoReturn, Protocol, runtime_checkable

from diptych.v1 import kv_source_pb2
from kvtransfer.errors import TransportError, UndeadAgentError


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


@runtime_checkable
class PartedCopy(Copy, Protocol):
    """A copy that is done in parts, one after the other."""

    def stop(self) -> None:
        """Nobody wants it any more: it is terminal with the part under way. Idempotent."""
        ...


class Peer(Protocol):
    """A connected source's memory, as one transport reaches it."""

    @property
    def usable(self) -> bool:
        """Whether reads can be posted; never again, once not. Read on the event loop too."""
        ...

    def read(
        self,
        source_block_ids: tuple[int, ...],
        local_block_ids: tuple[int, ...],
        num_bytes: int | None = None,
    ) -> Copy | None:
        """A copy to post, or None where the source sends Data instead.

        num_bytes: of each block no others than the first so many, at least one; here and in
        ``write``. Raises TransportError where the source has no such block.
        """
        ...

    def write(
        self,
        local_block_ids: tuple[int, ...],
        offset: int,
        payload: bytes,
        num_bytes: int | None = None,
    ) -> Copy:
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


class SilentPeer:
    """Of a peer whose memory is read: it sends nothing."""

    def write(
        self,
        local_block_ids: tuple[int, ...],
        offset: int,
        payload: bytes,
        num_bytes: int | None = None,
    ) -> NoReturn:
        """See :meth:`Peer.write`."""
        raise TransportError("the source sent bytes that are read from its memory")


class Transport(Protocol):
    """One way to move blocks, for both roles."""

    # These are read on the event loop too.
    @property
    def name(self) -> str: ...
    @property
    def ready(self) -> bool:
        """Whether peers can be connected."""
        ...

    @property
    def problem(self) -> str:
        """Why it is not ready, if it failed; empty while it is (re)built."""
        ...

    @property
    def retiring(self) -> bool:
        """Whether an agent that is to end has not ended yet."""
        ...

    @property
    def undead(self) -> UndeadAgentError | None:
        """Set where an agent cannot be ended."""
        ...

    def descriptor(self) -> kv_source_pb2.MemoryDescriptor | None:
        """How peers read our memory; None where they need not know. Raises TransportError."""
        ...

    def connect(self, descriptor: kv_source_pb2.MemoryDescriptor) -> Peer:
        """Reach a source's memory. Raises TransportError, here or at the first read."""
        ...

    def serve(self, active: bool) -> None:
        """Progress reads that peers make of our memory, from now on or no more.

        Whoever looks for them less and less often does so often again when it is told again.
        """
        ...

    def rebuild(self) -> None:
        """Replace the agent; peers must be connected again. A start that fails is tried again.

        The next agent starts first. Then no read is posted over the old one any more; those
        under way may finish for a moment, and it is ended: whatever was posted over it is
        terminal by then, with AgentLostError where it had not finished.
        """
        ...

    def close(self) -> None:
        """Tear down: every copy posted is terminal afterwards, unless the agent is undead."""
        ...
