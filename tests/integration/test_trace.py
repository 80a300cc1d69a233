"""One request is one trace over all processes, and its stages explain the time to first token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from diptych.rpc.channel import open_channel
from diptych.telemetry import attributes
from diptych.telemetry.stages import TTFT_STAGES, Stage
from diptych.v1 import inference_pb2, inference_pb2_grpc
from tests.call import token_request
from tests.cluster import running_cluster
from tests.waiting import until

TRACE_ID = "5b8efff798038103d269b633813fc60c"
TRACEPARENT = f"00-{TRACE_ID}-eee19b7ec3c1b174-01"
UNSET, ERROR = 0, 2  # opentelemetry.proto.trace.v1.Status
FLAGS = {"num-blocks": "64", "max-model-len": "256"}


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what arrives by OTLP: (service, span) pairs."""

    spans: list[tuple[str, Any]] = field(default_factory=list)

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            marks = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(marks["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def names(self) -> set[str]:
        """Of the trace's spans; the model's name is left out."""
        return {span.name.partition(" ")[0] for _, span in self.of_trace()}

    def of_trace(self) -> list[tuple[str, Any]]:
        return [(s, span) for s, span in self.spans if span.trace_id.hex() == TRACE_ID]


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    collector, server = Collector(), grpc.aio.server()
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # untyped
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def traced(address: str, request: inference_pb2.GenerateRequest) -> inference_pb2.Timing:
    """Call Generate under the client's own trace; the answer's timing."""
    timing = inference_pb2.Timing()
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(request, timeout=60, metadata=(("traceparent", TRACEPARENT),))
        async for response in call:
            if response.HasField("summary"):
                timing = response.summary.timing
    return timing


async def test_a_retry_leaves_the_spans_of_both_tries(tiny_llama: Path, tmp_path: Path) -> None:
    """The source refuses the first ticket: it came damaged."""
    faults = {"transfer.allow-faults": "", "transfer.faults": '[{"at": "open", "do": "corrupt"}]'}
    async with collecting() as (collector, endpoint):
        with running_cluster(
            tmp_path,
            str(tiny_llama),
            worker_flags={**FLAGS, "otlp-endpoint": endpoint, "transfer.transports": "inline"},
            decode_flags=faults,
            router_flags={"local-prefill-below-tokens": "0", "otlp-endpoint": endpoint},
        ) as cluster:
            await cluster.wait_ready()
            timing = await traced(cluster.router.address, token_request(range(3, 99), max_tokens=8))
            assert timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED
            await until(
                lambda: {"text_completion", Stage.DECODE_RUN.span_name} <= collector.names(),
                within_s=15,
                what="the spans come",
            )
    spans = [span for _, span in collector.of_trace()]
    (root,) = [span for span in spans if span.name.startswith("text_completion")]
    failed, proven = sorted(
        (span for span in spans if span.name == Stage.TRANSFER.span_name),
        key=lambda span: span.start_time_unix_nano,
    )
    assert failed.parent_span_id == proven.parent_span_id == root.span_id
    assert (failed.status.code, failed.status.message) == (ERROR, "TICKET_INVALID")
    assert proven.status.code == root.status.code == UNSET
    (retry,) = root.events
    marks = {a.key: a.value.string_value for a in retry.attributes}
    assert retry.name == "retry"
    assert marks == {
        attributes.FALLBACK: "rebind",
        attributes.ERROR_TYPE: "KV_TRANSFER_INTERRUPTED",
    }


async def test_one_trace_explains_the_time_to_first_token(tiny_llama: Path, tmp_path: Path) -> None:
    async with collecting() as (collector, endpoint):
        with running_cluster(
            tmp_path,
            str(tiny_llama),
            worker_flags={**FLAGS, "otlp-endpoint": endpoint},
            router_flags={"local-prefill-below-tokens": "0", "otlp-endpoint": endpoint},
        ) as cluster:
            await cluster.wait_ready()
            request = token_request(range(3, 150), max_tokens=8, request_id="the-request")
            timing = await traced(cluster.router.address, request)
            assert timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED
            wanted = {stage.span_name for stage in (*TTFT_STAGES, Stage.TRANSFER, Stage.DECODE)}
            async with asyncio.timeout(15):
                while wanted - {span.name for _, span in collector.of_trace()}:
                    await asyncio.sleep(0.1)
            await asyncio.sleep(1.0)  # the slowest exporter's period
        spans = collector.of_trace()

    services = {service for service, _ in spans}
    assert services == {"diptych-router", "diptych-prefill", "diptych-decode"}
    ids = {span.span_id for _, span in spans}
    orphans = [span.name for _, span in spans if span.parent_span_id not in ids]
    assert len(orphans) == 1, f"only the request's span has a parent outside: {orphans}"

    lengths = {s.name: (s.end_time_unix_nano - s.start_time_unix_nano) / 1e9 for _, s in spans}
    explained_s = sum(lengths[stage.span_name] for stage in TTFT_STAGES)
    assert explained_s == pytest.approx(timing.ttft_s, rel=0.05)
    for stage in TTFT_STAGES:
        told_s = getattr(timing, f"{stage}_s")
        assert lengths[stage.span_name] == pytest.approx(told_s, rel=0.05, abs=1e-4)

    root = next(span for _, span in spans if span.name in orphans)
    marks = {a.key: a.value for a in root.attributes}
    assert marks[attributes.INPUT_TOKENS].int_value == 147
    assert marks[attributes.OUTPUT_TOKENS].int_value == 8
    assert marks[attributes.TIME_TO_FIRST_TOKEN].double_value == pytest.approx(timing.ttft_s)
    (transfer,) = [span for _, span in spans if span.name == Stage.TRANSFER.span_name]
    marks = {a.key: a.value for a in transfer.attributes}
    assert marks[attributes.TRANSFER_BYTES].int_value == timing.transfer.num_bytes
    assert marks[attributes.TRANSPORT].string_value == timing.transfer.transport
