"""What a role adds to a worker, and what the roles of one process share. Event loop only.

A worker has one engine and one pool, whichever roles it has; each role has an end of the
transfers of its own, over the same memory.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import grpc

from diptych.errors import DiptychError
from diptych.rpc.server import Context
from diptych.v1 import worker_pb2
from diptych.worker.engine_parts import EngineParts
from diptych.worker.step_metrics import StepMetrics
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.memory import ScratchBlocks
from kvtransfer.reader.pairs import LinkInterceptor
from kvtransfer.source.lease_table import LeaseTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoleParts:
    """What a role is given once the engine is loaded.

    All but ``endpoint`` and ``scratch`` is the others' too.

    ``links`` and ``fetches`` stand between transfers and their two ends in a worker that tests
    may break; None in service.
    """

    parts: EngineParts
    metrics: StepMetrics
    endpoint: TransferEndpoint
    scratch: ScratchBlocks  # for the probes of this role alone
    links: LinkInterceptor | None = None
    fetches: Callable[[Context, LeaseTable], Context] | None = None


class Role(Protocol):
    """One role of a worker: its services, and what runs by them."""

    @property
    def role(self) -> worker_pb2.WorkerRole:
        """Which it is."""
        ...

    @property
    def services(self) -> Sequence[str]:
        """Full names of what it serves, for health and reflection."""
        ...

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the services, before the server starts."""

    def attached(self, shared: RoleParts) -> AbstractAsyncContextManager[None]:
        """Everything that needs the engine; inside the context the role can serve."""

    def describe(self, state: worker_pb2.WorkerState) -> None:
        """Fill in what Watch tells of this role alone; called once it is attached."""

    def ready(self) -> bool:
        """Whether requests may come, given that the engine is loaded."""

    def unfinished_block_ids(self) -> Collection[int]:
        """Local blocks that reads without a pull may still write."""

    def num_active(self) -> int:
        """What has to finish before a drain is done."""

    def num_streams(self) -> int:
        """Streams whose handler has not returned."""

    def end_all(self, error: DiptychError) -> None:
        """End every stream, soon."""
