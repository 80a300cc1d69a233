"""One request is one trace over all processes, and its stages explain the time to first token."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.telemetry import attributes
from diptych.telemetry.stages import TTFT_STAGES
from diptych.v1 import inference_pb2
from tests import metrics
from tests.call import token_request
from tests.cluster import Cluster, Process, another_router, running_cluster
from tests.trace_collector import Collector, collecting, marks_of
from tests.traced import Heard, check_within, traced
from tests.waiting import until

TESTS = Path(__file__).parents[1]
UNSET, ERROR = 0, 2  # opentelemetry.proto.trace.v1.Status
FLAGS = {"num-blocks": "64", "max-model-len": "640"}

LEASE = {"prefill/attempt 1/prefill_wait", "prefill/attempt 1/prefill_compute"}
FIRST_TOKEN = {"", "queue", "prefill", "prefill/attempt 1", "first_write", *LEASE}
RUN = {"handoff", "decode", "decode/decode_run"}


def prompt(first: int, num_tokens: int, max_tokens: int = 8) -> inference_pb2.GenerateRequest:
    """Of a length that names what goes wrong with it; no two share a prefix."""
    ids = range(first, first + num_tokens)
    return token_request(ids, max_tokens=max_tokens, request_id="the-request")


async def test_each_attempt_has_its_spans_however_the_request_ends(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """One cluster; what fails is chosen by the prompt's length."""
    faults = [
        {"at": "open", "do": "corrupt", "num_tokens": 64},
        {"at": "range", "do": "corrupt", "num_tokens": 80, "times": 2},
        {"at": "read", "do": "hang", "num_tokens": 96, "times": None},
        {"at": "range", "do": "corrupt", "num_tokens": 112},  # the prompt is computed by then
    ]
    allowed = {
        "transfer.allow-faults": "",
        "transfer.faults": json.dumps(faults),
        "timers.read-progress-s": "60",  # what ends the read is the request's deadline
    }
    async with collecting() as (collector, endpoint):
        with running_cluster(
            tmp_path,
            str(tiny_llama),
            worker_flags={**FLAGS, "otlp-endpoint": endpoint, "transfer.transports": "inline"},
            decode_flags=allowed,
            router_flags={"local-prefill-below-tokens": "0", "otlp-endpoint": endpoint},
        ) as cluster:
            await cluster.wait_ready()
            address = cluster.router.address
            await check_rebind(collector, address)
            await check_fail_over(collector, address)
            await check_deadline(collector, address)
            await check_cancel(collector, address)
            unsampled = {
                "local-prefill-below-tokens": "0",
                "otlp-endpoint": endpoint,
                "trace-sample-ratio": "0",
                "trace-caller-per-s": "0",
                "trace-slow-s": "1000000",
                "max-attempts": "1",
            }
            with another_router(cluster, tmp_path, tiny_llama, unsampled) as other:
                await other.wait_ready()
                await check_unsampled(collector, other)
                check_metrics(other, cluster)


async def check_rebind(collector: Collector, address: str) -> None:
    """The source refuses the first ticket: it came damaged."""
    trace_id = "1" * 32
    timing = (await traced(address, prompt(3, 64), trace_id)).timing
    assert timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED
    spans = await collector.whole(
        trace_id,
        FIRST_TOKEN
        | RUN
        | {"prefill/attempt 1/transfer"}
        | {(second := "later/attempt 2"), f"{second}/transfer"}
        | {f"{second}/transfer/transfer_exposed"},
    )
    refused, proven = spans["prefill/attempt 1/transfer"], spans[f"{second}/transfer"]
    assert (refused.status.code, refused.status.message) == (ERROR, "TICKET_INVALID")
    assert proven.status.code == spans[""].status.code == spans[second].status.code == UNSET
    first = spans["prefill/attempt 1"]
    assert (first.status.code, first.status.message) == (ERROR, "KV_TRANSFER_INTERRUPTED")
    (link,), (run,) = spans[second].links, spans["decode/decode_run"].links
    assert link.span_id == first.span_id
    assert run.span_id == spans[second].span_id
    (event,) = spans[""].events
    assert event.name == "retry"
    for told in (event, link):
        assert {key: value.string_value for key, value in marks_of(told).items()} == {
            attributes.FALLBACK: "rebind",
            attributes.ERROR_TYPE: "KV_TRANSFER_INTERRUPTED",
        }


async def check_fail_over(collector: Collector, address: str) -> None:
    """What was computed comes damaged twice: the decode worker computes the prompt itself."""
    trace_id = "2" * 32
    timing = (await traced(address, prompt(73, 80), trace_id)).timing
    assert timing.kv_path == inference_pb2.KV_PATH_RECOMPUTED
    spans = await collector.whole(
        trace_id,
        FIRST_TOKEN
        | RUN
        | {"prefill/attempt 1/transfer"}
        | {"later/attempt 2", "later/attempt 2/transfer"}
        | {"later/attempt 3", "later/attempt 3/recompute"},
    )
    last = spans["later/attempt 3"]
    assert (
        marks_of(last)[attributes.DECODE_WORKER]
        == marks_of(spans["prefill/attempt 1"])[attributes.DECODE_WORKER]
    )
    assert [link.span_id for link in last.links] == [spans["later/attempt 2"].span_id]
    assert (last.status.code, spans[""].status.code) == (UNSET, UNSET)


async def check_deadline(collector: Collector, address: str) -> None:
    """A read never ends, so the second token does not come in time."""
    trace_id = "3" * 32
    with pytest.raises(grpc.aio.AioRpcError):
        await traced(address, prompt(153, 96), trace_id, timeout_s=4)
    spans = await collector.whole(trace_id, FIRST_TOKEN | {"prefill/attempt 1/transfer", "handoff"})
    ended = {path: spans[path].status.message for path in ("", "prefill/attempt 1", "handoff")}
    assert ended == {
        "": "DEADLINE_EXCEEDED",
        "prefill/attempt 1": "DEADLINE_EXCEEDED",
        "handoff": "unfinished",
    }
    assert spans["prefill/attempt 1/transfer"].status.message == "CANCELLED"


async def check_cancel(collector: Collector, address: str) -> None:
    """The client leaves in the middle of the answer."""
    trace_id = "4" * 32
    request = prompt(150, 48, max_tokens=500)
    await traced(address, request, trace_id, cancel_after=4)
    transfer = "prefill/attempt 1/transfer"
    wanted = FIRST_TOKEN | RUN | {transfer, f"{transfer}/transfer_exposed"}
    spans = await collector.whole(trace_id, wanted)
    assert marks_of(spans[""])[attributes.OUTCOME].string_value == "cancelled"
    assert {span.status.code for span in spans.values()} == {UNSET}


async def check_unsampled(collector: Collector, cluster: Cluster) -> None:
    """Nothing is sampled: what failed is sent by all processes, what went well by none."""
    address = cluster.router.address
    quick = [f"{i:032x}" for i in range(1, 6)]
    for i, trace_id in enumerate(quick):
        await traced(address, prompt(20 * i + 3, 48), trace_id)
    failed = "f" * 32
    with pytest.raises(grpc.aio.AioRpcError):
        await traced(address, prompt(120, 112), failed)
    transfer = "prefill/attempt 1/transfer"
    wanted = {"", "queue", "prefill", "prefill/attempt 1", transfer, *LEASE}
    await until(lambda: wanted <= collector.trace(failed).keys(), within_s=15)
    root = collector.trace(failed)[""]
    assert root.status.message == "KV_TRANSFER_INTERRUPTED"
    assert collector.senders(failed) == {"diptych-router", "diptych-prefill", "diptych-decode"}
    for process in cluster.processes:
        await until(partial(holds_nothing, process), within_s=15, what="words came")
        assert process.metric("diptych_trace_spans_forgotten") == 0
    assert all(not collector.trace(trace_id) for trace_id in quick)


async def check_many(collector: Collector, address: str) -> None:
    """Fifty, eight at once: each has one root, every stage, right parents over all processes.

    And the spans of its stages sum to the time to first token, and lie within what the client
    saw. A worker that is full may have
    been asked twice.
    """
    answers: dict[str, Heard] = {}
    trace_ids = [f"{number:032x}" for number in range(1, 51)]
    left = enumerate(trace_ids)

    async def client() -> None:
        for number, trace_id in left:
            request = prompt(number, 48, max_tokens=3)
            request.cache_salt = trace_id  # none has another's prompt in the cache
            answers[trace_id] = await traced(address, request, trace_id)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(client())
    transfer = "prefill/attempt 1/transfer"
    wanted = FIRST_TOKEN | RUN | {transfer, f"{transfer}/transfer_exposed"}
    for trace_id in trace_ids:
        found = partial(collector.trace, trace_id)
        await until(lambda found=found: wanted <= found().keys(), within_s=30)  # type: ignore[misc]
        assert not [path for path in found() if path.startswith("?") or path == " again"]
        explained_s = sum(length_s(found()[stage.value]) for stage in TTFT_STAGES)
        assert explained_s == pytest.approx(answers[trace_id].timing.ttft_s, rel=0.05)
        check_within(answers[trace_id], found())


def check_metrics(*clusters: Cluster) -> None:
    """Every metric that the code makes is other than 0 by now, or a test of its own moves it."""
    moved: set[str] = set()
    told: set[str] = set()
    for process in (process for cluster in clusters for process in cluster.processes):
        for name, is_unmoved in metrics.unmoved(process.metrics_address).items():
            told.add(name.removeprefix("diptych_"))
            if not is_unmoved:
                moved.add(name.removeprefix("diptych_"))
    made = metrics.made_in_code()
    assert len(made) > 60
    tests = [path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    left = {
        name
        for name in (told | made) - moved
        if not any(metrics.is_asserted(name, text) for text in tests)
    }
    assert not left


def length_s(span: Any) -> float:
    length: float = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    return length


def holds_nothing(process: Process) -> bool:
    return process.metric("diptych_trace_spans_held") == 0


async def test_one_trace_explains_the_time_to_first_token(tiny_llama: Path, tmp_path: Path) -> None:
    trace_id = "5b8efff798038103d269b633813fc60c"
    async with collecting() as (collector, endpoint):
        with running_cluster(
            tmp_path,
            str(tiny_llama),
            worker_flags={**FLAGS, "otlp-endpoint": endpoint},
            router_flags={"local-prefill-below-tokens": "0", "otlp-endpoint": endpoint},
        ) as cluster:
            await cluster.wait_ready()
            clocks = "diptych_router_worker_clock_uncertainty_seconds"
            await until(
                lambda: sum(key.startswith(clocks) for key in cluster.router.metrics()) == 2
            )
            await check_many(collector, cluster.router.address)
            heard = await traced(cluster.router.address, prompt(3, 147), trace_id)
            timing = heard.timing
            assert timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED
            transfer = "prefill/attempt 1/transfer"
            wanted = FIRST_TOKEN | RUN | {transfer, f"{transfer}/transfer_exposed"}
            spans = await collector.whole(trace_id, wanted)
    assert collector.senders(trace_id) == {"diptych-router", "diptych-prefill", "diptych-decode"}
    check_within(heard, spans)

    lengths = {path: length_s(span) for path, span in spans.items()}
    explained_s = sum(lengths[stage.value] for stage in TTFT_STAGES)
    assert explained_s == pytest.approx(timing.ttft_s, rel=0.05)
    for stage in TTFT_STAGES:
        told_s = getattr(timing, f"{stage}_s")
        assert lengths[stage.value] == pytest.approx(told_s, rel=0.05, abs=1e-4)

    marks = marks_of(spans[""])
    assert marks[attributes.INPUT_TOKENS].int_value == 147
    assert marks[attributes.OUTPUT_TOKENS].int_value == 8
    assert marks[attributes.TIME_TO_FIRST_TOKEN].double_value == pytest.approx(timing.ttft_s)
    marks = marks_of(spans[transfer])
    assert marks[attributes.TRANSFER_BYTES].int_value == timing.transfer.num_bytes
    assert marks[attributes.TRANSPORT].string_value == timing.transfer.transport
    marks = marks_of(spans["prefill/attempt 1"])
    assert marks[attributes.PREFILL_WORKER].string_value == cluster.prefill[0].address
    assert marks[attributes.DECODE_WORKER].string_value == cluster.decode[0].address
    assert marks[attributes.PLACEMENT].string_value == "paired"
    for kind, chosen in (
        (attributes.PREFILL_CANDIDATES, cluster.prefill[0]),
        (attributes.DECODE_CANDIDATES, cluster.decode[0]),
    ):
        (line,) = marks[kind].array_value.values
        assert line.string_value.startswith(f"{chosen.address} chosen work_tokens=")
    for role in (attributes.PREFILL_WORKER, attributes.DECODE_WORKER):  # on one machine
        offset_s = marks[f"{role}.{attributes.CLOCK_OFFSET_S}"].double_value
        uncertain_s = marks[f"{role}.{attributes.CLOCK_UNCERTAINTY_S}"].double_value
        assert uncertain_s > 0
        # A process that pauses while it reads its two clocks at start is off by that pause.
        assert abs(offset_s) < uncertain_s + 1.0
