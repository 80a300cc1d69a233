"""Watch tells of load a little later than of what decides about placements."""

import asyncio
from typing import cast

import pytest

from diptych.rpc.server import Context
from diptych.telemetry.tracing import Tracing
from diptych.v1 import worker_pb2
from diptych.worker import status as status_module
from diptych.worker.status import WatchServicer, WorkerStatus


@pytest.mark.parametrize("is_load", [True, False])
async def test_load_alone_waits_for_its_turn(
    monkeypatch: pytest.MonkeyPatch, is_load: bool
) -> None:
    monkeypatch.setattr(status_module, "_LEAST_GAP_S", 0.0)
    monkeypatch.setattr(status_module, "LOAD_GAP_S", 60.0)
    monkeypatch.setattr(status_module, "_LONGEST_GAP_S", 120.0)
    status = WorkerStatus(worker_pb2.WORKER_ROLE_DECODE)
    stream = WatchServicer(status, Tracing("test")).Watch(
        worker_pb2.WatchRequest(), cast(Context, None)
    )
    await anext(stream)

    async def told() -> worker_pb2.WorkerState:
        return await anext(stream)

    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(told())
        await turns()
        (status.load_changed if is_load else status.changed)()
        await turns()
        assert following.done() is not is_load
        following.cancel()
    await stream.aclose()  # type: ignore[attr-defined]


async def turns() -> None:
    """Let the loop run until nothing is ready."""
    for _ in range(20):
        await asyncio.sleep(0)
