"""The inline transport: bytes travel as Data messages of the Fetch stream itself."""

from diptych.v1 import kv_source_pb2
from kvtransfer.memory import BlockMemory


class InlineWrite:
    """Copies one message's payload into the local blocks it belongs to."""

    wakes = False

    def __init__(
        self,
        memory: BlockMemory,
        local_block_ids: tuple[int, ...],
        offset: int,
        payload: bytes,
        num_bytes: int | None,
    ) -> None:
        self._memory = memory
        self._num_bytes = num_bytes  # of each block
        self._local_block_ids = local_block_ids
        self._offset = offset  # in the first block
        self._payload = payload

    def post(self) -> bool:
        """Copy; terminal when it returns."""
        self._memory.write(self._local_block_ids, self._offset, self._payload, self._num_bytes)
        return True

    def poll(self) -> bool:
        return True


class InlinePeer:
    """A source that sends."""

    usable = True

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory

    def read(
        self,
        source_block_ids: tuple[int, ...],
        local_block_ids: tuple[int, ...],
        num_bytes: int | None = None,
    ) -> None:
        """Nothing to post: the source sends Data."""

    def write(
        self,
        local_block_ids: tuple[int, ...],
        offset: int,
        payload: bytes,
        num_bytes: int | None = None,
    ) -> InlineWrite:
        return InlineWrite(self._memory, local_block_ids, offset, payload, num_bytes)

    def check_lane(self) -> None:
        """The gRPC channel is the lane."""

    def close(self) -> None:
        """Holds nothing."""


class InlineTransport:
    """Works between any two workers that have a channel."""

    name = "inline"
    ready = True
    problem = ""
    retiring = False
    undead = None

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory

    def descriptor(self) -> None:
        """Peers reach no memory."""

    def connect(self, descriptor: kv_source_pb2.MemoryDescriptor | None) -> InlinePeer:
        return InlinePeer(self._memory)

    def serve(self, active: bool) -> None:
        """The Fetch handler sends."""

    def rebuild(self) -> None:
        """Nothing here can hang."""

    def close(self) -> None:
        """Holds nothing."""
