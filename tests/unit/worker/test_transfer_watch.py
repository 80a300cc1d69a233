"""A worker whose transfer thread is stuck says so, comes back with it, or ends.

One whose pool's device is lost ends.
"""

import asyncio

import pytest

from diptych.errors import DeviceLostError
from diptych.timers import Timers
from diptych.v1 import worker_pb2
from diptych.worker.status import WorkerStatus
from diptych.worker.transfer_watch import TransferStuckError, TransferWatch
from kvtransfer.memory import HostMemory

SOON_S = 1.0


class Rig:
    """A watch over a thread that is as stuck as ``stuck_s`` says."""

    def __init__(self, drain_s: float) -> None:
        self.stuck_s = 0.0
        status = WorkerStatus(worker_pb2.WORKER_ROLE_PREFILL)
        timers = Timers(heartbeat_s=0.002, read_progress_s=5, drain_s=drain_s)
        self.memory = HostMemory(bytearray(4), 4)
        self.watch = TransferWatch(lambda: self.stuck_s, self.memory, timers, status)
        self._status = status

    async def told(self) -> str:
        """The problem after the next change."""
        with self._status.watching() as changed:
            async with asyncio.timeout(SOON_S):
                await changed.wait()
        return self.watch.problem


async def test_a_thread_that_comes_back_is_forgiven() -> None:
    rig = Rig(drain_s=10)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(rig.watch.run())
        rig.stuck_s = 4.9  # busy
        await asyncio.sleep(0.01)
        assert rig.watch.problem == ""
        for _ in range(2):
            rig.stuck_s = 5.1
            assert "stuck" in await rig.told()
            rig.stuck_s = 0.0
            assert await rig.told() == ""
        running.cancel()


async def test_a_thread_that_was_stopped_with_its_process_is_not_blamed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    looks, is_over = iter([0.0, 30.0]), asyncio.Event()  # at the second one it has just gone on

    def stuck_s() -> float:
        for look in looks:
            return look
        is_over.set()
        return 0.0

    status = WorkerStatus(worker_pb2.WORKER_ROLE_PREFILL)
    timers = Timers(heartbeat_s=0.002, read_progress_s=5)
    watch = TransferWatch(stuck_s, HostMemory(bytearray(4), 4), timers, status)
    async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watch.run())
        await is_over.wait()
        running.cancel()
    assert not caplog.records


async def test_one_that_does_not_ends_the_worker() -> None:
    rig = Rig(drain_s=0.02)
    rig.stuck_s = 5.1
    with pytest.raises(TransferStuckError, match=r"stuck for 5\.1 s"):
        async with asyncio.timeout(SOON_S):
            await rig.watch.run()


@pytest.mark.parametrize("stuck_s", [0.0, 5.1])
async def test_a_lost_device_ends_the_worker_at_once(stuck_s: float) -> None:
    rig = Rig(drain_s=10)
    rig.stuck_s = stuck_s
    rig.memory.lost = DeviceLostError("broken")
    with pytest.raises(DeviceLostError, match="broken"):
        async with asyncio.timeout(SOON_S):
            await rig.watch.run()
    assert rig.watch.problem == "the device of the KV pool is lost"
