"""A model step that never ends: the worker says so and goes, and costs one request its time."""

import asyncio
from pathlib import Path

import grpc
import pytest

from diptych.rpc.channel import open_channel
from diptych.timers import Timers
from diptych.v1 import worker_pb2, worker_pb2_grpc
from tests.call import generate
from tests.chaos.expected import Expected
from tests.chaos.load import FLAGS, ROUTER_FLAGS, jobs
from tests.cluster import Process, running_cluster
from tests.hanging import hang_later, hung_pid

GONE_S = Timers().lost_peer_s + 5.0
WORK = jobs(12, seed=3, max_tokens=8)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.timeout(400)
async def test_one_request_waits_and_no_other_does(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    flag = hang_later(monkeypatch, f"{role}-", tmp_path)
    with running_cluster(
        tmp_path / "cluster",
        str(tiny_model),
        num_prefill=1 + (role == "prefill"),
        num_decode=1 + (role == "decode"),
        worker_flags=FLAGS,
        router_flags=ROUTER_FLAGS,
    ) as cluster:
        await cluster.wait_ready()
        pool = cluster.prefill if role == "prefill" else cluster.decode
        async with open_channel(cluster.router.address) as channel, asyncio.TaskGroup() as tasks:
            expected = await Expected.learn(cluster, WORK)
            watched = {
                worker.pid: tasks.create_task(last_state(worker), name="watch") for worker in pool
            }
            flag.touch()
            async with asyncio.timeout(GONE_S):  # one bound for all of it, from the hang on
                unlucky = await generate(channel, WORK[0].request(salt="meets it"))
                assert unlucky.error is None, unlucky.error
                assert unlucky.timing.num_attempts == 2
                answers = [await generate(channel, job.request()) for job in WORK]
                (victim,) = (worker for worker in pool if worker.pid == hung_pid(flag))
                state = await watched.pop(victim.pid)
                await cluster.eventually(lambda: not victim.alive, GONE_S, "the worker has gone")
            (survivor,) = watched.values()
            survivor.cancel()
            expected.check_all(answers)
            assert [answer.timing.num_attempts for answer in answers] == [1] * len(WORK)
            assert state.state == worker_pb2.SERVING_STATE_FAILED
            assert "the model thread is stuck" in state.message
        await expected.settle(cluster)
        assert victim.stop() == 1, victim.log_tail()


async def last_state(worker: Process) -> worker_pb2.WorkerState:
    """What Watch says before it ends."""
    said = worker_pb2.WorkerState()
    async with open_channel(worker.address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest())
        try:
            async for state in call:
                said = state
        except grpc.RpcError:  # the process went
            pass
    return said
