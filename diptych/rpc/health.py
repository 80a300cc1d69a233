"""``grpc.health.v1``: who takes requests, for those who ask once and those who watch."""

import asyncio
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.rpc.server import Context

_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # absent in the stubs
    """The status of each service. Event loop only.

    Unlike the library's own, ``set`` waits for nobody: a watcher who does not read holds up
    neither it nor the others, and reads the newest status later.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, health_pb2.HealthCheckResponse.ServingStatus] = {}
        self._change = asyncio.Event()  # set when any status changes, and replaced

    def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """From now on."""
        self._statuses[service] = status
        self._change.set()
        self._change = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Its status now; NOT_FOUND: there is no such service."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Its status now, and after each change."""
        told = None
        while True:
            change = self._change
            status = self._statuses.get(request.service, _UNKNOWN)
            if status == told:
                await change.wait()
            else:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
