"""The router over real gRPC, against workers that do as the test says."""

import asyncio
import json
import logging
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.client import (
    BlockingClient,
    Chunk,
    DiptychClient,
    FinishReason,
    SamplingOptions,
    build_request,
)
from diptych.errors import (
    BlocksExhaustedError,
    DiptychError,
    InvalidRequestError,
    LogitsError,
    NoWorkerError,
    QueueFullError,
    SlowClientError,
    TransferInterruptedError,
)
from diptych.rpc.channel import open_channel
from diptych.rpc.status import from_rpc_error
from diptych.timers import Timers
from diptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from router.app import serve
from router.config import RouterConfig
from router.request.attempt import Attempt
from tests import metrics
from tests.call import generate, token_request
from tests.integration.fake_workers import FakeDecode, FakePrefill, FakeWorker, token_at
from tests.waiting import until

PROMPT = list(range(30, 50))
SERVICE = "diptych.v1.Inference"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
TIMERS = Timers(
    heartbeat_s=0.1, lost_peer_s=0.6, accept_s=0.25, no_worker_s=1.5, unsent_s=2.0, drain_s=2.0
)
EVENTUALLY_S = 5.0


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tokenizer with a context that no test fills."""
    folder = tmp_path_factory.mktemp("wide") / "tiny"
    shutil.copytree(tiny_llama, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = 1_000_000
    path.write_text(json.dumps(config))
    return folder


@dataclass
class Cluster:
    """A router in this process and its fake workers."""

    address: str
    prefill: list[FakePrefill]
    decode: list[FakeDecode]
    stop: asyncio.Event
    channel: grpc.aio.Channel
    served: "asyncio.Task[None]"

    async def generate(self, max_tokens: int = 6, timeout_s: float = 20.0) -> list[int]:
        """The tokens of one answer; raises its error."""
        request = token_request(PROMPT, max_tokens=max_tokens)
        answer = await generate(self.channel, request, timeout_s=timeout_s)
        if answer.error is not None:
            raise answer.error
        assert answer.token_ids == expected(max_tokens)
        return answer.token_ids

    async def preferred(self, role: str) -> FakeWorker:
        """The worker that this router places on where all are alike."""
        await self.generate()
        workers: list[FakeWorker] = getattr(self, role)
        return next(worker for worker in workers if worker.specs)

    async def stopped(self) -> None:
        """End the router and wait for it."""
        self.stop.set()
        await asyncio.wait([self.served])

    async def generate_for_ever(self) -> None:
        """One short answer after another; raises the first error."""
        while True:
            await self.generate(max_tokens=1)

    def held(self) -> int:
        return sum(len(p.leases) for p in self.prefill) + sum(len(d.seats) for d in self.decode)

    async def wait_free(self) -> None:
        await eventually(lambda: self.held() == 0, "leases or seats are still held")


def expected(num_tokens: int) -> list[int]:
    return [token_at(len(PROMPT) + i) for i in range(num_tokens)]


async def eventually(condition: Callable[[], bool], what: str) -> None:
    await until(condition, EVENTUALLY_S, what)


@asynccontextmanager
async def running(
    model: Path, num_prefill: int = 2, num_decode: int = 2, **settings: object
) -> AsyncIterator[Cluster]:
    """Everything up and every pair proven; at the end nothing may be held."""
    prefill = [FakePrefill() for _ in range(num_prefill)]
    decode = [FakeDecode() for _ in range(num_decode)]
    workers: Sequence[FakeWorker] = [*prefill, *decode]
    for worker in workers:
        await worker.start()
    config = RouterConfig.model_validate(
        {
            "listen": "127.0.0.1:0",
            "model": str(model),
            "prefill": [worker.address for worker in prefill],
            "decode": [worker.address for worker in decode],
            "local_prefill_below_tokens": 0,
            "timers": TIMERS,
            **settings,
        }
    )
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        served = tasks.create_task(serve(config, stop, port.set_result))
        address = f"127.0.0.1:{await port}"
        async with open_channel(address) as channel:
            cluster = Cluster(address, prefill, decode, stop, channel, served)
            async with DiptychClient(address) as client:
                await wait_ready(client, cluster)
            yield cluster
            await cluster.wait_free()
        stop.set()
        await served
    for worker in workers:
        await worker.kill()


async def wait_ready(client: DiptychClient, cluster: Cluster) -> None:
    deadline = time.monotonic() + EVENTUALLY_S
    while not (await client.models())[0].ready or any(
        len(d.pairs) < len(cluster.prefill) for d in cluster.decode
    ):
        assert time.monotonic() < deadline, "never ready"
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)  # the last Watch messages


async def collect(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


async def test_the_plain_path(model: Path) -> None:
    async with running(model, 1, 1) as cluster:
        answer = await generate(cluster.channel, token_request(PROMPT, max_tokens=6))
        assert answer.error is None
        assert answer.token_ids == expected(6)
        timing, usage = answer.timing, answer.usage
        assert (usage.num_prompt_tokens, usage.num_output_tokens) == (len(PROMPT), 6)
        assert usage.num_cached_tokens == 3
        parts = timing.queue_s + timing.prefill_s + timing.first_write_s
        assert parts == pytest.approx(timing.ttft_s)
        assert timing.total_s >= timing.ttft_s + timing.handoff_gap_s + timing.decode_s
        assert timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED
        assert timing.transfer.num_bytes == 1000
        assert (timing.num_attempts, timing.num_preemptions) == (1, 1)
        assert timing.prefill_worker == cluster.prefill[0].address
        assert timing.decode_worker == cluster.decode[0].address
        bind = cluster.decode[0].ended_seats[0].binds[0]
        assert bind.source_incarnation == cluster.prefill[0].incarnation


async def test_a_pair_proven_at_another_address_is_not_used(model: Path) -> None:
    """Two routers may know one worker by two addresses; the reader reaches only one of them."""
    async with running(model, 1, 1) as cluster, DiptychClient(cluster.address) as client:
        (pair,) = cluster.decode[0].pairs
        pair.source_address = "10.0.0.1:7"
        deadline = time.monotonic() + EVENTUALLY_S
        while (await client.models())[0].ready:
            assert time.monotonic() < deadline, "still placed on"
            await asyncio.sleep(0.02)


async def test_client_yields_chunks_and_typed_errors(model: Path) -> None:
    async with running(model, 1, 1) as cluster, DiptychClient(cluster.address) as client:
        options = SamplingOptions(max_tokens=3, ignore_eos=True)
        chunks = await collect(client.generate(token_ids=PROMPT, options=options))
        assert [t for chunk in chunks for t in chunk.token_ids] == expected(3)
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert chunks[-1].usage is not None
        assert all(chunk.finish_reason is None for chunk in chunks[:-1])
        with pytest.raises(InvalidRequestError) as caught:
            await collect(client.generate("hello", options=SamplingOptions(top_p=2.0)))
        assert caught.value.field == "sampling.top_p"
        text = await collect(client.generate("hello there", options=options))
        assert text[-1].finish_reason is FinishReason.LENGTH


async def test_one_token_needs_no_decode_worker(model: Path) -> None:
    async with running(model, 1, 1) as cluster:
        answer = await generate(cluster.channel, token_request(PROMPT, max_tokens=1))
        assert answer.token_ids == expected(1)
        assert answer.timing.kv_path == inference_pb2.KV_PATH_PREFILL_ONLY
        assert cluster.decode[0].specs == []


async def test_short_prompts_are_computed_by_decode(model: Path) -> None:
    async with running(model, 1, 1, local_prefill_below_tokens=64) as cluster:
        answer = await generate(cluster.channel, token_request(PROMPT, max_tokens=4))
        assert answer.token_ids == expected(4)
        assert answer.timing.kv_path == inference_pb2.KV_PATH_LOCAL
        assert cluster.prefill[0].specs == []


async def test_a_prefix_that_a_worker_has_forgotten_is_prefilled_again(model: Path) -> None:
    """The fake decode worker never has anything cached, whatever the router remembers."""
    async with running(model, 1, 1, local_prefill_below_tokens=64) as cluster:
        for num_requests in (1, 2, 3):
            request = token_request(PROMPT * 10, max_tokens=4)
            answer = await generate(cluster.channel, request)
            assert answer.error is None
            assert answer.timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED
            assert len(cluster.prefill[0].specs) == num_requests
        starts = [seat.start for seat in cluster.decode[0].ended_seats]
        assert not any(start is None or start.compute_missing for start in starts)


async def test_what_a_prefill_worker_has_cached_leaves_room_for_others(model: Path) -> None:
    """Of each prompt of 20 tokens it has 3; all 40 would be more than may wait on it."""
    async with running(model, 1, 1, max_pending_prefill_tokens=18) as cluster:
        prefill = cluster.prefill[0]
        prefill.behaviour.first_token_s = 60.0
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(cluster.generate()) for _ in range(3)]
            await eventually(lambda: len(prefill.leases) == 2, "the second was kept waiting")
            for task in asking:
                task.cancel()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_refusal_goes_to_another(model: Path, role: str) -> None:
    async with running(model) as cluster:
        refusing = await cluster.preferred(role)
        refusing.behaviour.refuse = BlocksExhaustedError("full")
        for number in range(1, 4):
            assert await cluster.generate()
            assert len(refusing.specs) > number


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_scores_that_are_no_numbers_are_tried_once_elsewhere(model: Path, role: str) -> None:
    async with running(model) as cluster:
        one, other = getattr(cluster, role)
        one.behaviour.refuse = LogitsError("not numbers")
        for _ in range(3):
            assert await cluster.generate()
        other.behaviour.refuse = LogitsError("not numbers")
        num_before = len(one.specs) + len(other.specs)
        with pytest.raises(LogitsError):
            await cluster.generate()
        assert len(one.specs) + len(other.specs) == num_before + 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_no_answer_in_time_goes_to_another(model: Path, role: str) -> None:
    async with running(model) as cluster:
        (await cluster.preferred(role)).behaviour.accepts = False
        for _ in range(2):
            assert await cluster.generate()


async def test_all_refuse_for_long_is_a_typed_error(model: Path) -> None:
    async with running(model, 1, 1) as cluster:
        cluster.decode[0].behaviour.refuse = BlocksExhaustedError("full", retry_after_s=0.5)
        before = time.monotonic()
        with pytest.raises(BlocksExhaustedError) as caught:
            await cluster.generate()
        assert caught.value.retry_after_s == pytest.approx(0.5)
        assert time.monotonic() - before < TIMERS.no_worker_s + 1
        assert 3 <= len(cluster.decode[0].specs) < 30, "asked again, with pauses"


async def test_full_for_a_while_only_waits(model: Path) -> None:
    async with running(model, 1, 1) as cluster, asyncio.TaskGroup() as tasks:
        cluster.decode[0].behaviour.refuse = BlocksExhaustedError("full")
        task = tasks.create_task(cluster.generate())
        await asyncio.sleep(0.3)
        cluster.decode[0].behaviour.refuse = None
        assert await task == expected(6)


async def test_queue_is_bounded(model: Path) -> None:
    async with running(model, 1, 1, max_concurrent=1, max_queue=1) as cluster:
        cluster.decode[0].behaviour.step_s = 0.05
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(cluster.generate(max_tokens=10))
            await eventually(lambda: cluster.held() > 0, "never placed")
            second = tasks.create_task(cluster.generate(max_tokens=2))
            await asyncio.sleep(0.1)
            with pytest.raises(QueueFullError) as caught:
                await cluster.generate()
            assert caught.value.retry_after_s is not None
        assert first.result() == expected(10)
        assert second.result() == expected(2)


@pytest.mark.parametrize("stage", ["accept", "first token", "pull", "decode"])
async def test_cancel_frees_both_sides_at_once(model: Path, stage: str) -> None:
    async with running(model, 1, 1) as cluster:
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
        cancelled_at = time.monotonic()
        await cluster.wait_free()
        assert time.monotonic() - cancelled_at < 0.5


async def test_deadline_frees_both_sides(model: Path) -> None:
    async with running(model, 1, 1) as cluster:
        cluster.decode[0].behaviour.step_s = 0.05
        with pytest.raises(DiptychError) as caught:
            await cluster.generate(max_tokens=1000, timeout_s=0.4)
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await cluster.wait_free()


async def test_deadline_in_the_queue(model: Path) -> None:
    async with running(model, 1, 1) as cluster:
        cluster.decode[0].behaviour.refuse = BlocksExhaustedError("full")
        with pytest.raises(DiptychError) as caught:
            await cluster.generate(timeout_s=0.3)
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_stop_string_releases_the_decode_worker(model: Path) -> None:
    async with running(model, 1, 1) as cluster:
        plain = await generate(cluster.channel, token_request(PROMPT, max_tokens=40))
        stop = plain.text[len(plain.text) // 2 :][:3]
        request = token_request(PROMPT, max_tokens=40)
        request.sampling.stop.append(stop)
        answer = await generate(cluster.channel, request)
        assert answer.text == plain.text[: plain.text.index(stop)]
        assert answer.finished.stop == stop
        assert len(answer.token_ids) < 40
        assert answer.usage.num_output_tokens == len(answer.token_ids)


async def test_failed_pull_is_bound_again_then_prefilled_elsewhere(model: Path) -> None:
    async with running(model, 2, 1) as cluster:
        cluster.decode[0].behaviour.pull_failures = 1
        answer = await generate(cluster.channel, token_request(PROMPT, max_tokens=6))
        assert answer.token_ids == expected(6)
        assert answer.timing.num_attempts == 2
        assert sum(len(p.specs) for p in cluster.prefill) == 1
        cluster.decode[0].behaviour.pull_failures = 2
        answer = await generate(cluster.channel, token_request(PROMPT, max_tokens=6))
        assert answer.token_ids == expected(6)
        assert answer.timing.num_attempts == 3
        assert sum(len(p.specs) for p in cluster.prefill) == 3
        again = [p.specs[-1] for p in cluster.prefill if len(p.specs[-1].token_ids) > len(PROMPT)]
        assert list(again[0].token_ids) == PROMPT + expected(1)
        assert again[0].num_prompt_tokens == len(PROMPT)


async def test_pulls_that_keep_failing_are_a_typed_error(model: Path, tmp_path: Path) -> None:
    ports = tmp_path / "ports.json"
    settings = {"allow_recompute": False, "metrics_port": 0, "port_file": ports}
    async with running(model, 1, 1, **settings) as cluster:
        cluster.decode[0].behaviour.pull_failures = 100
        with pytest.raises(TransferInterruptedError):
            await cluster.generate()
        address = json.loads(ports.read_text())["metrics_address"]
        samples = await asyncio.to_thread(metrics.scrape, address)
        assert samples['diptych_retries_total{action="fail"}'] == 1


async def test_recompute_where_no_other_prefill_worker_is(model: Path) -> None:
    async with running(model, 1, 1) as cluster:
        cluster.decode[0].behaviour.pull_failures = 100
        answer = await generate(cluster.channel, token_request(PROMPT, max_tokens=6))
        assert answer.token_ids == expected(6)
        assert answer.timing.kv_path == inference_pb2.KV_PATH_RECOMPUTED
        assert not answer.timing.HasField("transfer")


@pytest.mark.parametrize("how", ["killed", "silent", "stalled"])
async def test_lost_prefill_worker(model: Path, how: str) -> None:
    async with running(model, 2, 1) as cluster, asyncio.TaskGroup() as tasks:
        for worker in cluster.prefill:
            worker.behaviour.first_token_s = 30
        task = tasks.create_task(cluster.generate())
        await eventually(lambda: any(p.leases for p in cluster.prefill), "never placed")
        await asyncio.sleep(0.1)
        victim, other = sorted(cluster.prefill, key=lambda p: not p.leases)
        other.behaviour.first_token_s = 0
        before = time.monotonic()
        await disturb(victim, how)
        assert await task == expected(6)
        assert time.monotonic() - before < 2 * TIMERS.lost_peer_s + 0.5
        victim.behaviour.silent = victim.behaviour.stalled = False


@pytest.mark.parametrize("how", ["killed", "silent", "stalled", "failing"])
async def test_lost_decode_worker_mid_stream(model: Path, how: str) -> None:
    async with running(model, 2, 2) as cluster, asyncio.TaskGroup() as tasks:
        for worker in cluster.decode:
            worker.behaviour.step_s = 0.02
        task = tasks.create_task(cluster.generate(max_tokens=30))
        await eventually(
            lambda: any(s.start for d in cluster.decode for s in d.seats.values()), "never ran"
        )
        await asyncio.sleep(0.1)
        victim, other = sorted(cluster.decode, key=lambda d: not d.seats)
        await disturb(victim, how)
        assert await task == expected(30)
        resumed = other.specs[-1]
        assert resumed.num_prompt_tokens == len(PROMPT)
        assert len(resumed.token_ids) > len(PROMPT)
        victim.behaviour.silent = victim.behaviour.stalled = False


async def disturb(victim: FakeWorker, how: str) -> None:
    if how == "killed":
        await victim.kill()
    elif how == "failing":
        assert isinstance(victim, FakeDecode)
        victim.fail_all()
    else:
        setattr(victim.behaviour, how, True)


async def test_restarted_worker_is_another_incarnation(model: Path) -> None:
    async with running(model, 1, 1) as cluster:
        assert await cluster.generate()
        for worker in (cluster.prefill[0], cluster.decode[0]):
            await worker.kill()
            await asyncio.sleep(0.05)
            await worker.start()
        decode = cluster.decode[0]
        await eventually(
            lambda: [p.incarnation for p in decode.peers] == [cluster.prefill[0].incarnation],
            "the new peer was not announced",
        )
        assert await cluster.generate()
        bind = decode.ended_seats[-1].binds[-1]
        assert bind.source_incarnation == cluster.prefill[0].incarnation


async def test_no_prefill_alive_computes_locally(model: Path) -> None:
    async with running(model, 1, 1) as cluster:
        await cluster.prefill[0].kill()
        await eventually(lambda: not cluster.decode[0].peers, "still announced")
        answer = await generate(cluster.channel, token_request(PROMPT, max_tokens=6))
        assert answer.token_ids == expected(6)
        assert answer.timing.kv_path == inference_pb2.KV_PATH_LOCAL


async def test_no_worker_at_all(model: Path) -> None:
    async with running(model, 0, 1) as cluster:
        await cluster.decode[0].kill()
        await asyncio.sleep(0.2)
        with pytest.raises(NoWorkerError):
            await cluster.generate()


async def test_draining_worker_gets_nothing_new(model: Path) -> None:
    async with running(model, 1, 2) as cluster:
        cluster.decode[0].state = worker_pb2.SERVING_STATE_DRAINING
        await asyncio.sleep(0.1)
        for _ in range(3):
            await cluster.generate()
        assert cluster.decode[0].specs == []


async def test_slow_client_loses_only_its_own_request(model: Path) -> None:
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with (
        running(model, 1, 1, client_buffer_messages=16) as cluster,
        grpc.aio.insecure_channel(cluster.address, options=small_window) as channel,
    ):
        behaviour = cluster.decode[0].behaviour
        behaviour.step_s, behaviour.tokens_per_step = 0.001, 64
        stub = inference_pb2_grpc.InferenceStub(channel)
        slow = stub.Generate(token_request(PROMPT, max_tokens=900_000))
        await eventually(lambda: bool(cluster.decode[0].seats), "never placed")
        await cluster.wait_free()
        behaviour.step_s, behaviour.tokens_per_step = 0.002, 1
        assert await cluster.generate()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in slow:
                pass
        assert isinstance(from_rpc_error(caught.value), SlowClientError)


async def health(channel: grpc.aio.Channel, service: str = SERVICE) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return int((await health_pb2_grpc.HealthStub(channel).Check(request)).status)


async def test_router_is_ready_once_it_saw_a_worker(model: Path) -> None:
    decode = FakeDecode()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        decode.address = f"127.0.0.1:{taken.getsockname()[1]}"
    config = RouterConfig(model=str(model), decode=[decode.address], timers=TIMERS)
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(config, stop, port.set_result))
        async with open_channel(f"127.0.0.1:{await port}") as channel:
            assert (await health(channel, ""), await health(channel)) == (SERVING, NOT_SERVING)
            await decode.start()
            async with asyncio.timeout(EVENTUALLY_S):
                while await health(channel) != SERVING:
                    await asyncio.sleep(0.01)
            await decode.kill()
        stop.set()


async def test_a_finished_answer_to_a_stalled_client_ends(model: Path) -> None:
    timers = TIMERS.model_copy(update={"client_write_s": 0.3})
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with (
        running(model, 1, 1, timers=timers, client_buffer_messages=100_000) as cluster,
        grpc.aio.insecure_channel(cluster.address, options=small_window) as channel,
    ):
        cluster.decode[0].behaviour.tokens_per_step = 5000
        stub = inference_pb2_grpc.InferenceStub(channel)
        stalled = stub.Generate(token_request(PROMPT, max_tokens=200_000))
        await eventually(lambda: bool(cluster.decode[0].specs), "never placed")
        await cluster.wait_free()
        await asyncio.sleep(2 * timers.client_write_s)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stalled:
                pass
        error = from_rpc_error(caught.value)
        assert isinstance(error, SlowClientError)
        assert "did not take a response" in error.message


async def test_router_drains(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not ready, then a while in which all is served, then nothing new; and nobody is alarmed."""
    async with running(model, 1, 1) as cluster, asyncio.TaskGroup() as tasks:
        cluster.decode[0].behaviour.step_s = 0.05
        task = tasks.create_task(cluster.generate(max_tokens=30))
        await eventually(lambda: bool(cluster.decode[0].seats), "never placed")
        cluster.stop.set()
        async with asyncio.timeout(EVENTUALLY_S):
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


async def test_metrics_tell_outcomes_and_fallbacks(model: Path, tmp_path: Path) -> None:
    ports = tmp_path / "ports.json"
    async with running(model, 2, 1, metrics_port=0, port_file=ports) as cluster:
        await cluster.generate()
        cluster.decode[0].behaviour.pull_failures = 1
        await cluster.generate()
        with pytest.raises(InvalidRequestError):
            await cluster.generate(max_tokens=0)
        address = json.loads(ports.read_text())["metrics_address"]
        samples = await asyncio.to_thread(metrics.scrape, address)
        assert samples['diptych_requests_total{outcome="ok"}'] == 2
        assert samples['diptych_requests_total{outcome="REQUEST_INVALID"}'] == 1
        assert samples['diptych_retries_total{action="rebind"}'] == 1
        assert samples['diptych_requests_by_kv_path_total{kv_path="disaggregated"}'] == 2
        assert samples["diptych_router_proven_pairs"] == 2
        assert samples["diptych_router_requests_placed"] == 0
        assert samples["gen_ai_server_time_to_first_token_seconds_count"] == 2
        assert samples["diptych_inter_token_latency_seconds_count"] == 10


async def test_trace_context_reaches_both_workers(model: Path) -> None:
    traceparent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    async with running(model, 1, 1) as cluster, DiptychClient(cluster.address) as client:
        request = build_request(token_ids=PROMPT, options=SamplingOptions(max_tokens=3))
        await collect(client.stream(request, metadata=[("traceparent", traceparent)]))
        (at_decode,) = cluster.decode[0].ended_seats
        assert cluster.prefill[0].traceparents == [traceparent]
        assert at_decode.reserve.trace_context["traceparent"] == traceparent


async def test_worker_of_another_model_gets_nothing(model: Path) -> None:
    async with running(model, 1, 2) as cluster:
        cluster.decode[1].model_digest = "another"
        await asyncio.sleep(0.2)
        for _ in range(3):
            await cluster.generate()
        assert cluster.decode[1].specs == []


async def test_blocking_client(model: Path) -> None:
    async with running(model, 1, 1) as cluster:

        def ask() -> tuple[list[int], bool]:
            with BlockingClient(cluster.address) as client:
                options = SamplingOptions(max_tokens=4, ignore_eos=True)
                chunks = list(client.generate(token_ids=PROMPT, options=options))
                ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
                return ids, client.models()[0].ready

        assert await asyncio.to_thread(ask) == (expected(4), True)


async def test_a_bug_ends_one_request_only(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(model, 1, 1) as cluster:
        honest = Attempt.proven

        def broken(*_: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(Attempt, "proven", broken)
        with pytest.raises(DiptychError) as caught:
            await cluster.generate()
        assert caught.value.reason == "INTERNAL"
        assert "a bug" not in caught.value.message
        await cluster.wait_free()
        monkeypatch.setattr(Attempt, "proven", honest)
        assert await cluster.generate()


async def test_restarted_prefill_behind_a_lease_is_noticed(model: Path) -> None:
    async with running(model, 2, 1) as cluster:
        liar = cluster.prefill[0]
        liar.accepts_as = "somebody else"
        for _ in range(3):
            assert await cluster.generate()
        assert cluster.prefill[1].specs


async def test_heartbeats_reach_a_lease(model: Path) -> None:
    async with running(model, 1, 1) as cluster:
        cluster.prefill[0].behaviour.first_token_s = 0.5
        await cluster.generate()
        assert cluster.prefill[0].num_heartbeats >= 3


def test_router_starts_without_torch() -> None:
    check = (
        "import router.app, router.__main__, diptych.client, sys;"
        "bad = {'torch', 'numpy', 'transformers', 'nixl'} & set(sys.modules);"
        "bad |= {m for m in sys.modules if m.startswith(('diptych.engine', 'kvtransfer'))};"
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
