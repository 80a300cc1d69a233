"""What a router does when workers refuse, fail, die or leave."""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.client import (
    DiptychClient,
)
from diptych.errors import (
    BlocksExhaustedError,
    LogitsError,
    NoWorkerError,
    TransferInterruptedError,
)
from diptych.v1 import inference_pb2, worker_pb2
from tests import metrics
from tests.call import generate, token_request
from tests.integration.fake_workers import FakeDecode, FakePrefill, FakeWorker
from tests.integration.router_rig import (
    EVENTUALLY_S,
    PROMPT,
    eventually,
    expected,
    running,
)


async def test_a_pair_proven_at_another_address_is_not_used(wide_model: Path) -> None:
    """Two routers may know one worker by two addresses; the reader reaches only one of them."""
    async with running(wide_model, 1, 1) as cluster, DiptychClient(cluster.address) as client:
        (pair,) = cluster.decode[0].pairs
        pair.source_address = "10.0.0.1:7"
        deadline = time.monotonic() + EVENTUALLY_S
        while (await client.models())[0].ready:
            assert time.monotonic() < deadline, "still placed on"
            await asyncio.sleep(0.02)


async def test_where_no_pair_can_be_proven_decode_workers_compute_prompts(
    wide_model: Path,
) -> None:
    """As amid an update after which KV lies otherwise in memory, of all of one pool."""
    async with running(wide_model, 1, 1) as cluster, DiptychClient(cluster.address) as client:
        (pair,) = cluster.decode[0].pairs
        pair.state = worker_pb2.PAIR_STATE_FAILED
        async with asyncio.timeout(EVENTUALLY_S):
            num_before = -1
            while len(cluster.prefill[0].specs) != num_before:  # the router was not told yet
                num_before = len(cluster.prefill[0].specs)
                assert await cluster.generate() == expected(6)
        assert (await client.models())[0].ready


async def test_a_worker_of_another_protocol_is_named_once_and_never_used(
    wide_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process of a version that shares no protocol with ours has an address of ours."""
    with caplog.at_level(logging.ERROR, "router"):
        async with running(wide_model, 2, 1) as cluster:
            replaced = await cluster.preferred("prefill")
            await replaced.kill()
            num_before, foreign, asked = len(replaced.specs), Foreign(), "/diptych.v1.Worker/Watch"
            server = grpc.aio.server()
            server.add_generic_rpc_handlers((foreign,))
            assert server.add_insecure_port(replaced.address)
            await server.start()
            await eventually(lambda: foreign.asked.count(asked) >= 2, "Watch was not tried again")
            for _ in range(3):
                await cluster.generate()
            assert set(foreign.asked) == {asked}
            assert len(replaced.specs) == num_before
            await server.stop(None)
    (named,) = [r for r in caplog.records if r.message == "no worker of this protocol: not used"]
    assert vars(named)["worker"] == replaced.address


class Foreign(grpc.GenericRpcHandler):  # type: ignore[type-arg] # none at run time
    """Has none of our methods."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def service(self, details: grpc.HandlerCallDetails) -> None:
        self.asked.append(details.method)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_refusal_goes_to_another(wide_model: Path, role: str) -> None:
    async with running(wide_model) as cluster:
        refusing = await cluster.preferred(role)
        refusing.behaviour.refuse = BlocksExhaustedError("full")
        for number in range(1, 4):
            assert await cluster.generate()
            assert len(refusing.specs) > number


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_scores_that_are_no_numbers_are_tried_once_elsewhere(
    wide_model: Path, role: str
) -> None:
    async with running(wide_model) as cluster:
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
async def test_no_answer_in_time_goes_to_another(wide_model: Path, role: str) -> None:
    async with running(wide_model) as cluster:
        (await cluster.preferred(role)).behaviour.accepts = False
        for _ in range(2):
            assert await cluster.generate()


async def test_all_refuse_for_long_is_a_typed_error(wide_model: Path) -> None:
    async with running(wide_model, 1, 1) as cluster:
        cluster.decode[0].behaviour.refuse = BlocksExhaustedError("full", retry_after_s=0.5)
        with pytest.raises(BlocksExhaustedError) as caught:
            await cluster.generate()
        assert caught.value.retry_after_s == pytest.approx(0.5)
        assert 3 <= len(cluster.decode[0].specs) < 30, "asked again, with pauses"


async def test_full_for_a_while_only_waits(wide_model: Path) -> None:
    async with running(wide_model, 1, 1) as cluster, asyncio.TaskGroup() as tasks:
        cluster.decode[0].behaviour.refuse = BlocksExhaustedError("full")
        task = tasks.create_task(cluster.generate())
        await asyncio.sleep(0.3)
        cluster.decode[0].behaviour.refuse = None
        assert await task == expected(6)


async def test_failed_pull_is_bound_again_then_prefilled_elsewhere(wide_model: Path) -> None:
    async with running(wide_model, 2, 1) as cluster:
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


async def test_pulls_that_keep_failing_are_a_typed_error(wide_model: Path, tmp_path: Path) -> None:
    ports = tmp_path / "ports.json"
    settings: dict[str, Any]
    settings = {"allow_recompute": False, "metrics_port": 0, "port_file": ports}
    async with running(wide_model, 1, 1, **settings) as cluster:
        cluster.decode[0].behaviour.pull_failures = 100
        with pytest.raises(TransferInterruptedError):
            await cluster.generate()
        address = json.loads(ports.read_text())["metrics_address"]
        samples = await asyncio.to_thread(metrics.scrape, address)
        assert samples['diptych_retries_total{action="fail"}'] == 1


async def test_recompute_where_no_other_prefill_worker_is(wide_model: Path) -> None:
    async with running(wide_model, 1, 1) as cluster:
        cluster.decode[0].behaviour.pull_failures = 100
        answer = await generate(cluster.channel, token_request(PROMPT, max_tokens=6))
        assert answer.token_ids == expected(6)
        assert answer.timing.kv_path == inference_pb2.KV_PATH_RECOMPUTED
        assert not answer.timing.HasField("transfer")


@pytest.mark.parametrize("how", ["killed", "silent", "stalled"])
async def test_lost_prefill_worker(wide_model: Path, how: str) -> None:
    async with running(wide_model, 2, 1) as cluster, asyncio.TaskGroup() as tasks:
        for worker in cluster.prefill:
            worker.behaviour.first_token_s = 30
        task = tasks.create_task(cluster.generate())
        await eventually(lambda: cluster.decode[0].num_proven == 1, "never pulled")
        await asyncio.sleep(0.1)  # the router hears of it
        victim, other = sorted(cluster.prefill, key=lambda p: not p.leases)
        other.behaviour.first_token_s = 0
        await disturb(victim, how)
        assert await task == expected(6)
        start = cluster.decode[0].ended_reservations[-1].start
        assert start is not None
        assert start.compute_missing, "nobody waited for the lost one's token"
        victim.behaviour.silent = victim.behaviour.stalled = False


@pytest.mark.parametrize("how", ["killed", "silent", "stalled", "failing"])
async def test_lost_decode_worker_mid_stream(wide_model: Path, how: str) -> None:
    async with running(wide_model, 2, 2) as cluster, asyncio.TaskGroup() as tasks:
        for worker in cluster.decode:
            worker.behaviour.step_s = 0.02
        task = tasks.create_task(cluster.generate(max_tokens=30))
        await eventually(
            lambda: any(s.start for d in cluster.decode for s in d.reservations.values()),
            "never ran",
        )
        await asyncio.sleep(0.1)
        victim, other = sorted(cluster.decode, key=lambda d: not d.reservations)
        await disturb(victim, how)
        assert await task == expected(30)
        resumed = other.specs[-1]
        assert resumed.num_prompt_tokens == len(PROMPT)
        assert len(resumed.token_ids) > len(PROMPT)
        victim.behaviour.silent = victim.behaviour.stalled = False


async def test_who_waits_for_a_worker_that_is_away_keeps_no_slot_from_others(
    wide_model: Path,
) -> None:
    async with running(wide_model, 1, 1, max_concurrent=1) as cluster:
        decode = cluster.decode[0]
        decode.behaviour.step_s = 0.02
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(cluster.generate(max_tokens=30))
            await eventually(lambda: bool(decode.reservations), "never ran")
            await decode.kill()
            for _ in range(20):  # a prefill worker samples the only token
                assert await cluster.generate(max_tokens=1, timeout_s=5.0) == expected(1)
            assert not task.done()
            await decode.start()
        assert task.result() == expected(30)


async def disturb(victim: FakeWorker, how: str) -> None:
    if how == "killed":
        await victim.kill()
    elif how == "failing":
        assert isinstance(victim, FakeDecode)
        victim.fail_all()
    else:
        setattr(victim.behaviour, how, True)


async def test_restarted_worker_is_another_incarnation(wide_model: Path) -> None:
    async with running(wide_model, 1, 1) as cluster:
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
        bind = decode.ended_reservations[-1].binds[-1]
        assert bind.source_incarnation == cluster.prefill[0].incarnation


async def test_no_prefill_alive_computes_locally(wide_model: Path) -> None:
    async with running(wide_model, 1, 1) as cluster:
        await cluster.prefill[0].kill()
        await eventually(lambda: not cluster.decode[0].peers, "still announced")
        answer = await generate(cluster.channel, token_request(PROMPT, max_tokens=6))
        assert answer.token_ids == expected(6)
        assert answer.timing.kv_path == inference_pb2.KV_PATH_LOCAL


async def test_no_worker_at_all(wide_model: Path) -> None:
    async with running(wide_model, 0, 1) as cluster:
        await cluster.decode[0].kill()
        await asyncio.sleep(0.2)
        with pytest.raises(NoWorkerError):
            await cluster.generate()


async def test_who_wants_what_no_worker_there_can_do_did_not_wait_behind_others(
    wide_model: Path,
) -> None:
    async with running(wide_model, 1, 1) as cluster:
        await cluster.prefill[0].kill()
        await eventually(lambda: not cluster.decode[0].peers, "still announced")
        request = token_request(PROMPT, max_tokens=6)
        request.sampling.prompt_logprobs = 0
        error = (await generate(cluster.channel, request)).error
        assert isinstance(error, NoWorkerError)
        assert "prefill worker" in error.message
        assert await cluster.generate(max_tokens=6) == expected(6)


async def test_draining_worker_gets_nothing_new(wide_model: Path) -> None:
    async with running(wide_model, 1, 2) as cluster:
        draining = await cluster.preferred("decode")
        draining.state = worker_pb2.SERVING_STATE_DRAINING
        await asyncio.sleep(0.1)
        draining.specs.clear()
        for _ in range(3):
            await cluster.generate()
        assert draining.specs == []


async def test_worker_of_another_model_gets_nothing(wide_model: Path) -> None:
    async with running(wide_model, 1, 2) as cluster:
        other = await cluster.preferred("decode")
        other.model_digest = "another"
        await asyncio.sleep(0.2)
        other.specs.clear()
        for _ in range(3):
            await cluster.generate()
        assert other.specs == []


async def test_restarted_prefill_behind_a_lease_is_noticed(wide_model: Path) -> None:
    async with running(wide_model, 2, 1) as cluster:
        liar = await cluster.preferred("prefill")
        assert isinstance(liar, FakePrefill)
        (other,) = (worker for worker in cluster.prefill if worker is not liar)
        liar.accepts_as = "somebody else"
        liar.specs.clear()
        for _ in range(3):
            assert await cluster.generate()
        assert liar.specs, "it was asked, and what it said was noticed"
        assert len(other.specs) == 3
