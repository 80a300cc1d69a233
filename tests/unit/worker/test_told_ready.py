"""Health follows what makes a worker ready, and no step of its engine. No sockets."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from diptych.v1 import worker_pb2
from diptych.worker.status import WorkerStatus
from diptych.worker.worker import WorkerLife


class FakeServing:
    """Counts who asks."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.services = frozenset[str]()

    def ready_services(self) -> frozenset[str]:
        self.num_asked += 1
        return self.services


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_steps_of_the_engine_wake_nobody_who_tells_whether_the_worker_is_ready() -> None:
    status = WorkerStatus(worker_pb2.WORKER_ROLE_DECODE)
    host, serving, watch = MagicMock(), FakeServing(), SimpleNamespace(problem="")
    made: Any = (None, host, status, serving)
    worker = WorkerLife(*made)
    async with asyncio.TaskGroup() as tasks:
        telling = tasks.create_task(worker._tell_ready(watch))  # type: ignore[arg-type]
        await settled()
        num_asked = serving.num_asked
        for _ in range(10):
            status.load_changed()
            await settled()
        assert serving.num_asked == num_asked
        serving.services = frozenset({"decode"})
        status.changed()  # as where a pair is proven
        await settled()
        assert status.state == worker_pb2.SERVING_STATE_READY
        host.set_serving_only.assert_called_once_with({"decode"})
        watch.problem = "the transfer thread is stuck"
        status.changed()
        await settled()
        assert status.state == worker_pb2.SERVING_STATE_STARTING
        host.set_serving_only.assert_called_with(frozenset())
        telling.cancel()
