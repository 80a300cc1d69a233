"""What the spans of one request take of the threads that serve it, and of the one that exports.

    python -m tests.bench.span_cost [--requests 300]        # 10 s

The twelve spans of a disaggregated request at its router and its two workers, as they are made
there, with the contexts that go between them; no sockets. Between two requests other memory is
gone through, as caches are cold there where models are computed: warm, all takes half as long.
Medians, of the serving thread's CPU time; the mean of the exporting thread's.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from diptych.telemetry import attributes, tracing
from diptych.telemetry.sampling import WHOLE, Sampling
from diptych.telemetry.stages import Stage
from diptych.telemetry.tracing import Tracing
from router.cluster.worker_clock import ClockOffset
from router.placement.views import WorkerId
from router.request.response_builder import Moments
from router.trace import RequestTrace

_PREFILL, _DECODE = WorkerId("10.0.0.1:50061", "p"), WorkerId("10.0.0.2:50061", "d")
_ASKED: Final = (("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),)
_CANDIDATES: Final = ["10.0.0.1:50061 0.1 s", "10.0.0.3:50061 0.2 s"]
_EDGE: Final = Sampling(1.0, caller_per_s=1.0)
_PAUSE_S: Final = 0.004


class Workers:
    """Of a router, who are told nothing."""

    def tell_trace(self, worker: WorkerId, hold: int, *, keep: bool) -> None: ...

    def clock_offset(self, worker: WorkerId) -> ClockOffset | None:
        return ClockOffset(0.001, 0.001)


class Encoder(SpanExporter):
    """Encodes spans and sends them to nobody. One thread exports."""

    def __init__(self) -> None:
        self.num_spans = 0
        self.num_bytes = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        sent = encode_spans(spans).SerializeToString()
        self.num_spans += len(spans)
        self.num_bytes += len(sent)
        return SpanExportResult.SUCCESS


class Taken(NamedTuple):
    """CPU time of one request, s."""

    router_s: float
    workers_s: float


def one_request(router: Tracing, worker: Tracing) -> Taken:
    """All that is done for the trace of one request."""
    began_s, now = time.thread_time(), time.monotonic()
    marks = {attributes.OPERATION_NAME: "chat", attributes.REQUEST_ID: "0123456789abcdef"}
    parent = tracing.extract_metadata(_ASKED)
    trace = RequestTrace(router, "chat m", parent, Workers(), received_s=now, marks=marks)
    trace.mark({attributes.REQUEST_CLASS: "standard", attributes.REQUEST_MAX_TOKENS: 16})
    if trace.is_recorded:
        trace.choose({attributes.PLACEMENT: "paired", attributes.PREFILL_CANDIDATES: _CANDIDATES})
    trace.ask(attributes.PREFILL_WORKER, _PREFILL)
    lease = tracing.inject_metadata(trace.attempt)
    trace.ask(attributes.DECODE_WORKER, _DECODE)
    run, pull = tracing.inject_map(trace.stage(Stage.DECODE)), tracing.inject_map(trace.attempt)
    trace.expect(Stage.DECODE)
    trace.mark({attributes.OUTPUT_TOKENS: 16, attributes.TIME_TO_FIRST_TOKEN: 0.1})
    trace.end(Moments(now, now, now, now, now, now, now), "ok", None)
    ended_s = time.thread_time()
    above = tracing.extract_metadata(lease)
    for stage in (Stage.PREFILL_WAIT, Stage.PREFILL_COMPUTE):
        worker.record(stage, above, now, now)
    above = tracing.extract_map(pull)
    facts: dict[str, tracing.AttributeValue] = {
        attributes.TRANSPORT: "nixl",
        attributes.TRANSFER_BYTES: 1 << 20,
    }
    whole = worker.record(Stage.TRANSFER, above, now, now, attributes=facts)
    worker.record(Stage.TRANSFER_EXPOSED, whole, now, now)
    links = tracing.links_to(above)
    worker.record(Stage.DECODE_RUN, tracing.extract_map(run), now, now, links=links)
    return Taken(ended_s - began_s, time.thread_time() - ended_s)


def measure(num_requests: int, *, is_traced: bool) -> str:
    """A line of figures."""
    encoders = Encoder(), Encoder()
    router, worker = (
        Tracing("bench", exporter=encoder if is_traced else None, sampled=sampled)
        for encoder, sampled in zip(encoders, (_EDGE, WHOLE), strict=True)
    )
    others, taken = np.zeros(1 << 22), []
    process_s, thread_s = time.process_time(), time.thread_time()
    for _ in range(num_requests):
        others += 1.0
        time.sleep(_PAUSE_S)
        taken.append(one_request(router, worker))
    for each in (router, worker):
        each.shutdown(timeout_s=60.0)
    thread_s = time.thread_time() - thread_s
    export_s = (time.process_time() - process_s - thread_s) / num_requests
    router_s, workers_s = (median(each) for each in zip(*taken, strict=True))
    num_spans, num_bytes = (
        sum(each) / num_requests
        for each in zip(*((one.num_spans, one.num_bytes) for one in encoders), strict=True)
    )
    return (
        f"{'traced' if is_traced else 'untraced':<9} router {1e6 * router_s:4.0f} us, workers "
        f"{1e6 * workers_s:4.0f} us, export {1e6 * export_s:4.0f} us, "
        f"{num_spans:.1f} spans, {num_bytes:.0f} bytes"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    num_requests = parser.parse_args().requests
    for is_traced in (False, True):
        print(measure(num_requests, is_traced=is_traced))  # noqa: T201
