"""A model step that never ends: the worker says so and goes, and costs one request its time."""

import asyncio
import itertools
from pathlib import Path

import grpc
import pytest

from diptych.rpc.channel import open_channel
from diptych.timers import Timers
from diptych.v1 import worker_pb2, worker_pb2_grpc
from tests.call import Answer, generate
from tests.chaos.expected import Expected
from tests.chaos.load import FLAGS, ROUTER_FLAGS, Job, jobs
from tests.cluster import Process, running_cluster
from tests.hanging import hang_later

GONE_S = Timers().lost_peer_s + 5.0
WORK = jobs(12, seed=3, max_tokens=8)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.timeout(400)
async def test_one_request_waits_and_no_other_does(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    flag = hang_later(monkeypatch, f"{role}-0.port.json", tmp_path)
    with running_cluster(
        tmp_path / "cluster",
        str(tiny_model),
        num_prefill=1 + (role == "prefill"),
        num_decode=1 + (role == "decode"),
        worker_flags=FLAGS,
        router_flags=ROUTER_FLAGS,
    ) as cluster:
        await cluster.wait_ready()
        victim = (cluster.prefill if role == "prefill" else cluster.decode)[0]
        async with open_channel(cluster.router.address) as channel, asyncio.TaskGroup() as tasks:
            expected = await Expected.learn(cluster, WORK)
            watched = tasks.create_task(last_state(victim), name="watch")
            flag.touch()
            async with asyncio.timeout(GONE_S):  # one bound for all of it, from the hang on
                salts = itertools.count()  # the last of these meets it
                while await num_attempts(channel, WORK[0], salt=str(next(salts))) == 1:
                    pass
                answers = [await generate(channel, job.request()) for job in WORK]
                state = await watched
                await cluster.eventually(lambda: not victim.alive, GONE_S, "the worker has gone")
            expected.check_all(answers)
            assert [answer.timing.num_attempts for answer in answers] == [1] * len(WORK)
            assert state.state == worker_pb2.SERVING_STATE_FAILED
            assert "the model thread is stuck" in state.message
        await expected.settle(cluster)
        assert victim.stop() == 1, victim.log_tail()


async def num_attempts(channel: grpc.aio.Channel, job: Job, salt: str) -> int:
    answer: Answer = await generate(channel, job.request(salt=salt))
    assert answer.error is None, answer.error
    return answer.timing.num_attempts


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
