"""How requests end before their time, and how a router begins and ends."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.errors import (
    BlocksExhaustedError,
    DeadlineExceededError,
    DiptychError,
    SlowClientError,
    WorkerDrainingError,
)
from diptych.rpc.channel import open_channel
from diptych.v1 import inference_pb2, inference_pb2_grpc
from router.app import serve
from router.config import RouterConfig
from tests.call import token_request
from tests.integration.fake_workers import FakeDecode
from tests.integration.router_rig import (
    EVENTUALLY_S,
    PROMPT,
    TIMERS,
    Cluster,
    eventually,
    expected,
    failure_of,
    running,
)
from tests.waiting import within

SERVICE = "diptych.v1.Inference"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
WRITE_S = 0.3  # after which a client that takes nothing is given up


async def health(channel: grpc.aio.Channel, service: str = SERVICE) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return int((await health_pb2_grpc.HealthStub(channel).Check(request)).status)


@pytest.mark.parametrize("stage", ["accept", "first token", "pull", "decode"])
async def test_cancel_frees_both_sides_at_once(wide_model: Path, stage: str) -> None:
    async with running(wide_model, 1, 1) as cluster:
        prefill, decode = cluster.prefill[0].behaviour, cluster.decode[0].behaviour
        if stage == "accept":
            prefill.accepts = False
        elif stage == "first token":
            prefill.first_token_s = 30
        elif stage == "pull":
            decode.pull_s = 30
        decode.step_s = 0.05
        stub = inference_pb2_grpc.InferenceStub(cluster.channel)
        call = stub.Generate(token_request(PROMPT, max_tokens=1000))
        await eventually(lambda: cluster.held() > 0, "never placed")
        await asyncio.sleep(0.15)
        call.cancel()
        await cluster.wait_free()
        for worker in (cluster.prefill[0], cluster.decode[0]):
            assert worker.num_released == len(worker.specs) > 0, "nothing was left to be noticed"


async def test_deadline_frees_both_sides(wide_model: Path) -> None:
    async with running(wide_model, 1, 1) as cluster:
        cluster.decode[0].behaviour.step_s = 0.05
        with pytest.raises(DeadlineExceededError) as caught:
            await cluster.generate(max_tokens=1000, timeout_s=0.4)
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await cluster.wait_free()


async def test_deadline_in_the_queue(wide_model: Path) -> None:
    async with running(wide_model, 1, 1) as cluster:
        cluster.decode[0].behaviour.refuse = BlocksExhaustedError("full")
        with pytest.raises(DeadlineExceededError) as caught:
            await cluster.generate(timeout_s=0.3)
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_slow_client_loses_only_its_own_request(wide_model: Path) -> None:
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with (
        running(wide_model, 1, 1, client_buffer_messages=16) as cluster,
        grpc.aio.insecure_channel(cluster.address, options=small_window) as channel,
    ):
        behaviour = cluster.decode[0].behaviour
        behaviour.step_s, behaviour.tokens_per_step = 0.001, 64
        stub = inference_pb2_grpc.InferenceStub(channel)
        slow = stub.Generate(token_request(PROMPT, max_tokens=900_000))
        await eventually(lambda: bool(cluster.decode[0].reservations), "never placed")
        await cluster.wait_free()
        behaviour.step_s, behaviour.tokens_per_step = 0.002, 1
        assert await cluster.generate()
        assert isinstance(await failure_of(slow), SlowClientError)


async def test_tokens_wait_for_each_other_but_not_at_either_end(wide_model: Path) -> None:
    async with running(wide_model, 1, 1, stream_interval=4) as cluster:
        stub = inference_pb2_grpc.InferenceStub(cluster.channel)
        call = stub.Generate(token_request(PROMPT, max_tokens=11))
        came = [list(each.delta.token_ids) async for each in call if each.HasField("delta")]
        assert [len(each) for each in came] == [1, 4, 4, 2]
        assert [each for together in came for each in together] == expected(11)


@asynccontextmanager
async def stalled_call(
    wide_model: Path, *, max_tokens: int
) -> AsyncIterator[tuple[Cluster, grpc.aio.UnaryStreamCall[Any, Any]]]:
    """A call of a client that reads nothing, once a worker answers it, many tokens a step."""
    timers = TIMERS.model_copy(update={"client_write_s": WRITE_S})
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with (
        running(wide_model, 1, 1, timers=timers, client_buffer_messages=100_000) as cluster,
        grpc.aio.insecure_channel(cluster.address, options=small_window) as channel,
    ):
        cluster.decode[0].behaviour.tokens_per_step = 5000
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(token_request(PROMPT, max_tokens=max_tokens))
        await eventually(lambda: bool(cluster.decode[0].specs), "never placed")
        yield cluster, call


async def test_a_finished_answer_to_a_stalled_client_ends(wide_model: Path) -> None:
    async with stalled_call(wide_model, max_tokens=200_000) as (cluster, stalled):
        await cluster.wait_free()
        await asyncio.sleep(2 * WRITE_S)
        error = await failure_of(stalled)
        assert isinstance(error, SlowClientError)
        assert "did not take a response" in error.message


async def test_who_was_given_up_may_leave_before_hearing_so(
    wide_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no error of the router's that the reason could not be sent."""
    caplog.set_level(logging.DEBUG, "diptych.rpc.server")
    async with stalled_call(wide_model, max_tokens=900_000) as (_, stalled):
        await eventually(lambda: "rpc refused" in caplog.messages, "never given up")
        stalled.cancel()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_router_is_ready_once_it_saw_a_worker(wide_model: Path) -> None:
    decode = FakeDecode()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        decode.address = f"127.0.0.1:{taken.getsockname()[1]}"
    config = RouterConfig(model=str(wide_model), decode=[decode.address], timers=TIMERS, http=False)
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(config, stop, port.set_result))
        async with open_channel(f"127.0.0.1:{await port}") as channel:
            assert (await health(channel, ""), await health(channel)) == (SERVING, NOT_SERVING)
            await decode.start()
            async with within(EVENTUALLY_S):
                while await health(channel) != SERVING:
                    await asyncio.sleep(0.01)
            await decode.kill()
        stop.set()


async def test_router_drains(wide_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not ready, then a while in which all is served, then nothing new; and nobody is alarmed."""
    timers = TIMERS.model_copy(update={"lame_duck_s": 0.25})
    async with (
        running(wide_model, 1, 1, timers=timers) as cluster,
        asyncio.TaskGroup() as tasks,
    ):
        cluster.decode[0].behaviour.step_s = 0.05
        task = tasks.create_task(cluster.generate(max_tokens=30))
        await eventually(lambda: bool(cluster.decode[0].reservations), "never placed")
        cluster.stop.set()
        async with within(EVENTUALLY_S):
            while await health(cluster.channel) != NOT_SERVING:
                await asyncio.sleep(0.01)
        assert await cluster.generate(max_tokens=1), "a balancer has yet to look away"
        with pytest.raises(DiptychError) as caught:
            await cluster.generate_for_ever()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert await task == expected(30)
        with caplog.at_level(logging.WARNING, "router"):
            await cluster.stopped()
    assert [record.message for record in caplog.records if record.name.startswith("router")] == []


async def test_what_outlasts_the_drain_is_told_so(
    wide_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router")
    timers = TIMERS.model_copy(update={"drain_s": 0.1})
    async with running(wide_model, 1, 1, timers=timers) as cluster:
        stub = inference_pb2_grpc.InferenceStub(cluster.channel)
        asked = token_request(PROMPT, max_tokens=900_000)
        calls = [aiter(stub.Generate(asked)) for _ in range(2)]
        for call in calls:
            assert (await anext(call)).HasField("started")
        cluster.stop.set()
        for call in calls:
            error = await failure_of(call)
            assert isinstance(error, WorkerDrainingError)
            assert error.retry_after_s == 1.0
        await cluster.stopped()
    ends = [each for each in caplog.records if each.message == "request ended"]
    assert [vars(each)["outcome"] for each in ends] == ["WORKER_DRAINING"] * 2


async def test_a_drain_waits_for_an_answer_that_its_client_takes_slowly(wide_model: Path) -> None:
    """It is made, and gRPC has it: of what it has kept for the client nothing is cut off."""
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    timers = TIMERS.model_copy(update={"drain_s": 60.0})
    async with (
        running(wide_model, 1, 1, timers=timers) as cluster,
        grpc.aio.insecure_channel(cluster.address, options=small_window) as channel,
    ):
        asked = inference_pb2.DetokenizeRequest(token_ids=PROMPT * 20_000)
        call = channel.unary_stream(  # so that it is taken when it is asked for
            f"/{SERVICE}/Detokenize",
            request_serializer=inference_pb2.DetokenizeRequest.SerializeToString,
            response_deserializer=inference_pb2.DetokenizeResponse.FromString,
        )(asked)
        assert await call.initial_metadata() is not None
        cluster.stop.set()
        async with within(EVENTUALLY_S):
            while channel.get_state() is grpc.ChannelConnectivity.READY:
                await asyncio.sleep(0.01)
        answer = await call.read()
        assert isinstance(answer, inference_pb2.DetokenizeResponse)
        assert len(answer.text) == 400_000
        assert await call.code() is grpc.StatusCode.OK
        await cluster.stopped()
