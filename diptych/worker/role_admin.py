"""WorkerAdmin: the service by which an operator changes a worker's roles. Event loop only."""

from collections.abc import Callable

from diptych.errors import NoWorkerError, WorkerDrainingError
from diptych.rpc.server import Context
from diptych.v1 import worker_pb2, worker_pb2_grpc
from diptych.worker.status import WorkerStatus


class RoleAdmin(worker_pb2_grpc.WorkerAdminServicer):
    """Who may call it is decided before it is reached, by the caller's certificate."""

    def __init__(self, status: WorkerStatus, num_unfinished: Callable[[], int]) -> None:
        """``num_unfinished`` counts what runs of roles that the worker has not got now."""
        self._status = status
        self._num_unfinished = num_unfinished

    async def SetRoles(
        self, request: worker_pb2.SetRolesRequest, context: Context
    ) -> worker_pb2.SetRolesResponse:
        """Change them at once; nothing that runs is touched.

        Raises InvalidRequestError; WorkerDrainingError or NoWorkerError: the worker ends.
        """
        status = self._status
        if status.state == worker_pb2.SERVING_STATE_DRAINING:
            raise WorkerDrainingError("the worker shuts down")
        if status.state == worker_pb2.SERVING_STATE_FAILED:
            raise NoWorkerError(f"the worker failed: {status.message}")
        change = status.set_roles(request.roles)
        return worker_pb2.SetRolesResponse(
            before=change.before, roles=change.now, num_unfinished=self._num_unfinished()
        )
