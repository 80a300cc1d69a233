"""The staged transport: nixl between host memories, beside each pool that is on a device.

On a device, its agent has the staging blocks only, so it is in a process of its own, where
nothing is done on the device. In host memory it is the agent that reads the pool anyway. Transfer
thread only.
"""

from diptych.v1 import kv_source_pb2
from kvtransfer.errors import UndeadAgentError
from kvtransfer.transports.base import Peer, Transport
from kvtransfer.transports.staging import Stage, StagedPeer


class StagedTransport:
    """What a transport of host memory offers, to and from a pool on a device as well."""

    name = "staged"

    def __init__(self, carrier: Transport, stage: Stage | None) -> None:
        """``carrier`` moves the blocks between host memories: of ``stage``, or of the pool where
        there is none. It may be a transport of its own besides."""
        self.stage = stage
        self._carrier = carrier

    @property
    def ready(self) -> bool:
        return self._carrier.ready

    @property
    def problem(self) -> str:
        return self._carrier.problem

    @property
    def retiring(self) -> bool:
        return self._carrier.retiring

    @property
    def undead(self) -> UndeadAgentError | None:
        return self._carrier.undead

    def descriptor(self) -> kv_source_pb2.MemoryDescriptor | None:
        return self._carrier.descriptor()

    def connect(self, descriptor: kv_source_pb2.MemoryDescriptor) -> Peer:
        peer = self._carrier.connect(descriptor)
        return peer if self.stage is None else StagedPeer(self.stage, peer)

    def serve(self, active: bool) -> None:
        self._carrier.serve(active)

    def rebuild(self) -> None:
        self._carrier.rebuild()

    def close(self) -> None:
        self._carrier.close()
