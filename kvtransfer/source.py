"""KVSource: the gRPC shell around the leases of a source."""

from collections.abc import Callable

from diptych.timers import Timers
from diptych.v1 import common_pb2
from diptych.v1 import kv_source_pb2_grpc as pb_grpc
from kvtransfer.counters import SourceCounters
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.lease import LeaseTable
from kvtransfer.memory import ScratchBlocks


class KVSourceServicer(pb_grpc.KVSourceServicer):
    """Serves Connect and Fetch; add it to the worker's server.

    Computes digests of what ``leases`` announce, on the transfer thread.
    ``progress`` returns the engine's progress for heartbeats.
    """

    counters: SourceCounters

    def __init__(
        self,
        endpoint: TransferEndpoint,
        leases: LeaseTable,
        *,
        scratch: ScratchBlocks,
        timers: Timers,
        progress: Callable[[], common_pb2.EngineProgress] | None = None,
    ) -> None:
        raise NotImplementedError
