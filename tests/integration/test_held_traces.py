"""Of a trace that is kept workers send what they hold, whoever of the two leaves first."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.errors import WorkerDrainingError
from diptych.timers import Timers
from diptych.v1 import decode_pb2, worker_pb2
from router.cluster import trace_link
from router.cluster.trace_link import TraceLink
from router.placement.views import WorkerId
from tests.integration import router_rig, worker_rig
from tests.integration.fake_workers import FakeWorker
from tests.prompts import prompt
from tests.trace_collector import CLIENT_SPAN, collecting

HOLD = 0xABC
TRACE_ID = "c" * 32
HELD = {
    "traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN.hex()}-01",
    "tracestate": f"diptych={HOLD:016x}",
}
SETTINGS = {
    "num_blocks": 64,
    "max_model_len": 256,
    "block_size": worker_rig.BLOCK_SIZE,
    "max_batched_tokens": 64,
    "transfer": worker_rig.INLINE,
}


@pytest.mark.parametrize("drain_s", [20.0, 0.1], ids=["ends", "is-cut-off"])
async def test_a_worker_that_drains_waits_for_the_word_on_what_it_holds(
    tiny_llama: Path, tmp_path: Path, drain_s: float
) -> None:
    async with (
        collecting() as (collector, endpoint),
        worker_rig.decode_worker(
            tiny_llama,
            tmp_path,
            SETTINGS,
            timers=Timers(drain_s=drain_s),
            otlp_endpoint=endpoint,
        ) as worker,
        asyncio.TaskGroup() as tasks,
    ):
        there = WorkerId(worker.address, (await worker.state()).incarnation)
        watch = SimpleNamespace(worker=there, channel=worker.channel)
        link = TraceLink(cast(Any, watch), time.time)
        words = tasks.create_task(link.run())
        router = worker_rig.Router(worker)
        await router.open()
        await run_held(router)
        worker.stop.set()
        with suppress(WorkerDrainingError):  # where it is cut off
            await router.until_ended(1)
        link.tell(there, HOLD, keep=True)
        await asyncio.wait([worker.serving])
        words.cancel()
    assert {span.name for _, span in collector.spans} >= {"diptych.decode_run"}


async def run_held(router: worker_rig.Router) -> None:
    """Start a sequence of a trace that is held; it has the id 1."""
    router.said[1] = worker_rig.Said()
    spec = worker_rig.spec(prompt(20, 1), max_tokens=200)
    await router.send(reserve=decode_pb2.Reserve(sequence_id=1, spec=spec, trace_context=HELD))
    await router.next("reserved")
    start = decode_pb2.Start(sequence_id=1, compute_missing=True, trace_context=HELD)
    await router.send(start=start)


async def test_a_router_that_ends_says_what_was_unsaid(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[FakeWorker] = []

    async def hear(
        self: FakeWorker, request: worker_pb2.EndTracesRequest, context: object
    ) -> worker_pb2.EndTracesResponse:
        heard.extend(self for _ in request.keep)
        return worker_pb2.EndTracesResponse(time_s=time.time())

    monkeypatch.setattr(FakeWorker, "EndTraces", hear)
    monkeypatch.setattr(trace_link, "_REST_S", 600.0)  # nothing is said on the way
    tracing: dict[str, Any] = {
        "trace_sample_ratio": 0.0,
        "trace_caller_per_s": 0.0,
        "trace_slow_s": 1e-9,
    }
    async with (
        collecting() as (_, endpoint),
        router_rig.running(tiny_llama, 1, 1, otlp_endpoint=endpoint, **tracing) as cluster,
    ):
        await cluster.generate()
        assert not heard
        await cluster.stopped()
        assert set(heard) == {*cluster.prefill, *cluster.decode}
