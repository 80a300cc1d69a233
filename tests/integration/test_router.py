"""The router over real gRPC, against workers that do as the test says: its answers."""

import asyncio
import gc
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from diptych.client import (
    BlockingClient,
    Chunk,
    DiptychClient,
    FinishReason,
    SamplingOptions,
    build_request,
)
from diptych.errors import (
    DeadlineUnreachableError,
    DiptychError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    WorkerLostError,
)
from diptych.step_model import StepCost, StepModel
from diptych.v1 import inference_pb2, inference_pb2_grpc
from router.frontend.write_watch import WriteWatch
from router.request.attempt import Attempt
from router.request.machine import RequestMachine
from router.request.response_builder import ResponseBuilder
from router.request.session import Session
from tests import metrics
from tests.call import generate, token_request
from tests.integration.fake_workers import FakePrefill
from tests.integration.router_rig import (
    PROMPT,
    Cluster,
    eventually,
    expected,
    failure_of,
    running,
)


async def collect(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


async def test_the_plain_path(wide_model: Path) -> None:
    async with running(wide_model, 1, 1) as cluster:
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
        assert timing.num_computed_prompt_tokens == 2
        assert timing.prefill_worker == cluster.prefill[0].address
        assert timing.decode_worker == cluster.decode[0].address
        bind = cluster.decode[0].ended_reservations[0].binds[0]
        assert bind.source_incarnation == cluster.prefill[0].incarnation


async def test_client_yields_chunks_and_typed_errors(wide_model: Path) -> None:
    async with running(wide_model, 1, 1) as cluster, DiptychClient(cluster.address) as client:
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


async def test_the_router_alone_names_the_model(wide_model: Path) -> None:
    async with (
        running(wide_model, 1, 1, served_model_name="a-name") as cluster,
        DiptychClient(cluster.address) as client,
    ):
        assert [model.name for model in await client.models()] == ["a-name"]
        request = token_request(PROMPT, max_tokens=1)
        request.model = "a-name"
        assert (await generate(cluster.channel, request)).error is None
        request.model = wide_model.name
        refused = (await generate(cluster.channel, request)).error
        assert isinstance(refused, ModelNotFoundError)


async def test_one_token_needs_no_decode_worker(wide_model: Path) -> None:
    async with running(wide_model, 1, 1) as cluster:
        answer = await generate(cluster.channel, token_request(PROMPT, max_tokens=1))
        assert answer.token_ids == expected(1)
        assert answer.timing.kv_path == inference_pb2.KV_PATH_PREFILL_ONLY
        assert cluster.decode[0].specs == []


async def test_short_prompts_are_computed_by_decode(wide_model: Path) -> None:
    async with running(wide_model, 1, 1, local_prefill_below_tokens=64) as cluster:
        answer = await generate(cluster.channel, token_request(PROMPT, max_tokens=4))
        assert answer.token_ids == expected(4)
        assert answer.timing.kv_path == inference_pb2.KV_PATH_LOCAL
        assert cluster.prefill[0].specs == []


async def test_a_prefix_that_a_worker_has_forgotten_is_prefilled_again(wide_model: Path) -> None:
    """The fake decode worker never has anything cached, whatever the router remembers."""
    async with running(wide_model, 1, 1, local_prefill_below_tokens=64) as cluster:
        for num_requests in (1, 2, 3):
            request = token_request(PROMPT * 10, max_tokens=4)
            answer = await generate(cluster.channel, request)
            assert answer.error is None
            assert answer.timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED
            assert len(cluster.prefill[0].specs) == num_requests
        starts = [held.start for held in cluster.decode[0].ended_reservations]
        assert not any(start is None or start.compute_missing for start in starts)


async def test_what_a_prefill_worker_has_cached_leaves_room_for_others(wide_model: Path) -> None:
    """Of each prompt of 20 tokens it has 3; all 40 would be more than may wait on it, and so are
    34, so that the third is kept waiting.
    """
    async with running(wide_model, 1, 1, max_pending_prefill_tokens=18) as cluster:
        prefill = cluster.prefill[0]
        prefill.behaviour.first_token_s, prefill.behaviour.tells_pending = 60.0, True
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(cluster.generate()) for _ in range(3)]
            await eventually(lambda: len(prefill.leases) == 2, "the second was kept waiting")
            await asyncio.sleep(10 * prefill.watch_gap_s)
            assert len(prefill.leases) == 2, "the third has no room"
            for task in asking:
                task.cancel()


async def test_queue_is_bounded(wide_model: Path) -> None:
    async with running(wide_model, 1, 1, max_concurrent=1, max_queue=1) as cluster:
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


async def test_stop_string_releases_the_decode_worker(wide_model: Path) -> None:
    async with running(wide_model, 1, 1) as cluster:
        plain = await generate(cluster.channel, token_request(PROMPT, max_tokens=40))
        stop = plain.text[len(plain.text) // 2 :][:3]
        request = token_request(PROMPT, max_tokens=40)
        request.sampling.stop.append(stop)
        answer = await generate(cluster.channel, request)
        assert answer.text == plain.text[: plain.text.index(stop)]
        assert answer.finished.stop == stop
        assert len(answer.token_ids) < 40
        assert answer.usage.num_output_tokens == len(answer.token_ids)


async def test_metrics_tell_outcomes_and_fallbacks(wide_model: Path, tmp_path: Path) -> None:
    ports = tmp_path / "ports.json"
    async with running(wide_model, 2, 1, metrics_port=0, port_file=ports) as cluster:
        await cluster.generate()
        cluster.decode[0].behaviour.pull_failures = 1
        await cluster.generate()
        with pytest.raises(InvalidRequestError):
            await cluster.generate(max_tokens=0)
        unread = token_request(PROMPT)
        unread.adapter = "mine"
        assert (await generate(cluster.channel, unread)).error is not None
        address = json.loads(ports.read_text())["metrics_address"]
        samples = await asyncio.to_thread(metrics.scrape, address)
        assert samples['diptych_requests_total{outcome="ok"}'] == 2
        assert samples['diptych_requests_total{outcome="REQUEST_INVALID"}'] == 2
        assert samples['diptych_retries_total{action="rebind"}'] == 1
        assert samples['diptych_requests_by_kv_path_total{kv_path="disaggregated"}'] == 2
        assert samples["diptych_router_proven_pairs"] == 2
        assert samples["diptych_router_requests_placed"] == 0
        labels = (
            'gen_ai_operation_name="text_completion",gen_ai_provider_name="diptych",'
            f'gen_ai_request_model="{wide_model.name}"'
        )
        assert samples[f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}}"] == 2
        assert samples[f"gen_ai_server_time_per_output_token_seconds_count{{{labels}}}"] == 2
        duration = "gen_ai_server_request_duration_seconds_count"
        assert samples[f'{duration}{{error_type="",{labels}}}'] == 2
        assert samples[f'{duration}{{error_type="REQUEST_INVALID",{labels}}}'] == 2
        assert samples["diptych_inter_token_latency_seconds_count"] == 10


@pytest.mark.usefixtures("no_collector")
async def test_no_token_leaves_anything_to_the_collector(wide_model: Path) -> None:
    """Or a router would have to look for it more often than it does."""
    async with running(wide_model, 1, 1) as cluster:
        left = []
        for num_tokens in (10, 10, 300):
            await cluster.generate(num_tokens)
            left.append(gc.collect())
        assert left[2] < left[1] + 100


@pytest.mark.usefixtures("no_collector")
async def test_no_answer_and_no_error_leaves_its_session_to_the_collector(wide_model: Path) -> None:
    """A router would stop for all of many sessions at once. Nor do several choices."""
    several = token_request(PROMPT, max_tokens=6)
    several.sampling.n = 2
    async with running(wide_model, 1, 1, max_attempts=1) as cluster:
        ask = inference_pb2_grpc.InferenceStub(cluster.channel).Generate
        await cluster.generate()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                await cluster.generate()
                answered = [each async for each in ask(several)]
                assert answered[-1].summary.usage.num_output_tokens == 12
            cluster.decode[0].behaviour.pull_failures = 100
            for _ in range(3):
                answer = await generate(cluster.channel, token_request(PROMPT))
                assert answer.error is not None
                await failure_of(ask(several))
            gc.collect()
            left = Counter(type(each).__name__ for each in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        for kind in (Session, RequestMachine, WriteWatch, ResponseBuilder):
            assert left[kind.__name__] == 0, left.most_common(30)


async def test_metrics_count_only_what_a_resumed_answer_adds(
    wide_model: Path, tmp_path: Path
) -> None:
    ports = tmp_path / "ports.json"
    async with running(wide_model, 1, 1, metrics_port=0, port_file=ports) as cluster:
        whole = await generate(cluster.channel, token_request(PROMPT, max_tokens=8))
        for num_emitted in (7, 8):
            emitted = whole.token_ids[:num_emitted]
            request = token_request(PROMPT, max_tokens=8, emitted=emitted)
            assert (await generate(cluster.channel, request)).error is None
        request.sampling.stop.append(whole.text[:3])
        refused = await generate(cluster.channel, request)
        assert isinstance(refused.error, InvalidRequestError)
        address = json.loads(ports.read_text())["metrics_address"]
        samples = await asyncio.to_thread(metrics.scrape, address)
        assert samples["diptych_handoff_gap_seconds_count"] == 1
        assert samples["diptych_output_tokens_total"] == 9
        assert samples["diptych_input_tokens_total"] == 3 * len(PROMPT), "the refused has none"


async def test_trace_context_reaches_both_workers(wide_model: Path) -> None:
    traceparent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    async with running(wide_model, 1, 1) as cluster, DiptychClient(cluster.address) as client:
        request = build_request(token_ids=PROMPT, options=SamplingOptions(max_tokens=3))
        await collect(client.stream(request, metadata=[("traceparent", traceparent)]))
        (at_decode,) = cluster.decode[0].ended_reservations
        assert cluster.prefill[0].traceparents == [traceparent]
        assert at_decode.reserve.trace_context["traceparent"] == traceparent


async def test_blocking_client(wide_model: Path) -> None:
    async with running(wide_model, 1, 1) as cluster:

        def ask() -> tuple[list[int], bool]:
            with BlockingClient(cluster.address) as client:
                options = SamplingOptions(max_tokens=4, ignore_eos=True)
                chunks = list(client.generate(token_ids=PROMPT, options=options))
                ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
                return ids, client.models()[0].ready

        assert await asyncio.to_thread(ask) == (expected(4), True)


async def test_a_bug_ends_one_request_only(
    wide_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(wide_model, 1, 1) as cluster:
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


async def test_heartbeats_reach_a_lease(wide_model: Path) -> None:
    async with running(wide_model, 1, 1) as cluster:
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


async def test_what_only_prefill_workers_tell_is_refused_where_there_are_none(
    wide_model: Path,
) -> None:
    async with running(wide_model, 0, 1) as cluster:
        request = token_request(PROMPT, max_tokens=2)
        assert (await generate(cluster.channel, request)).error is None
        request.sampling.prompt_logprobs = 0
        refused = (await generate(cluster.channel, request)).error
        assert isinstance(refused, InvalidRequestError)
        assert refused.field == "sampling.prompt_logprobs"


async def test_a_worker_that_tells_nothing_of_the_prompt_gives_no_answer(wide_model: Path) -> None:
    """One of an older version, say: what was asked is never left out."""
    async with running(wide_model, 2, 1) as cluster:
        for worker in cluster.prefill:
            worker.behaviour.tells_prompts = False
        request = token_request(PROMPT, max_tokens=2)
        request.sampling.prompt_logprobs = 0
        answer = await generate(cluster.channel, request)
        assert isinstance(answer.error, WorkerLostError)
        assert answer.token_ids == []


async def num_foretold(address: str) -> float:
    samples = await asyncio.to_thread(metrics.scrape, address)
    return samples["diptych_router_ttft_foretold_ratio_count"]


async def test_the_worker_of_the_fastest_steps_is_chosen_and_what_came_true_is_told(
    wide_model: Path, tmp_path: Path
) -> None:
    ports = tmp_path / "ports.json"
    settings: dict[str, Any] = {"placement": "predicted", "metrics_port": 0, "port_file": ports}
    async with running(wide_model, 2, 2, **settings) as cluster:
        slow, fast = cluster.prefill
        slow.step_model = StepModel(prefill=StepCost(5.0, num_steps=100))
        fast.step_model = StepModel(prefill=StepCost(0.1, num_steps=100))
        near, far = cluster.decode
        near.step_model = StepModel(decode=StepCost(0.01, num_steps=100))
        far.step_model = StepModel(decode=StepCost(0.5, num_steps=100))
        address = json.loads(ports.read_text())["metrics_address"]
        while not await num_foretold(address):  # until the workers have said so
            await cluster.generate()
        workers, known = (fast, near, slow, far), await num_foretold(address)
        before = [len(worker.specs) for worker in workers]
        for _ in range(3):
            await cluster.generate()
        more = [len(worker.specs) - num for worker, num in zip(workers, before, strict=True)]
        assert more == [3, 3, 0, 0]
        assert await num_foretold(address) == known + 3
        await assert_refused_by_what_is_foretold(cluster, address, fast)


async def test_unless_told_otherwise_requests_with_objectives_are_placed_by_what_is_foretold(
    wide_model: Path, tmp_path: Path
) -> None:
    ports = tmp_path / "ports.json"
    async with running(wide_model, 2, 1, metrics_port=0, port_file=ports) as cluster:
        slow, fast = cluster.prefill
        slow.step_model = StepModel(prefill=StepCost(5.0, num_steps=100))
        fast.step_model = StepModel(prefill=StepCost(2.0, num_steps=100))
        cluster.decode[0].step_model = StepModel(decode=StepCost(0.01, num_steps=100))
        address = json.loads(ports.read_text())["metrics_address"]
        request = token_request(PROMPT, max_tokens=3)
        request.ttft_ms = 60_000
        while not await num_foretold(address):  # until the workers have said so
            assert (await generate(cluster.channel, request)).error is None
        await assert_refused_by_what_is_foretold(cluster, address, fast)
        known = await num_foretold(address)
        for _ in range(4):
            await cluster.generate()
        assert await num_foretold(address) == known, "nobody asked"
        num_specs = len(fast.specs)
        answer = await generate(cluster.channel, token_request(PROMPT, max_tokens=3), timeout_s=1.0)
        assert isinstance(answer.error, DeadlineUnreachableError)
        assert "deadline: the answer is wanted within" in answer.error.message
        assert len(fast.specs) == num_specs


async def assert_refused_by_what_is_foretold(
    cluster: Cluster, address: str, fast: FakePrefill
) -> None:
    """A prompt takes 0.1 s or more: who wants its first token sooner costs no worker anything."""
    request, num_specs = token_request(PROMPT, max_tokens=3), len(fast.specs)
    request.ttft_ms = 60_000
    assert (await generate(cluster.channel, request)).error is None
    assert len(fast.specs) == num_specs + 1
    request.ttft_ms = 50
    request.priority = inference_pb2.PRIORITY_BATCH
    answer = await generate(cluster.channel, request)
    assert isinstance(answer.error, DeadlineUnreachableError)
    assert answer.error.retry_after_s is None, "idle workers would be late, too"
    assert len(fast.specs) == num_specs + 1
    samples = await asyncio.to_thread(metrics.scrape, address)
    assert samples['diptych_router_unreachable_total{class="batch"}'] == 1
    assert samples['diptych_router_class_engine_seconds_total{class="standard"}'] > 0
