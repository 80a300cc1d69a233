"""Of a request whose decode worker is lost in mid-stream the router leaves one whole trace."""

import asyncio
from pathlib import Path
from typing import Any

from diptych.telemetry import attributes
from diptych.telemetry.stages import REQUEST_STAGES
from tests.call import token_request
from tests.integration.router_rig import PROMPT, eventually, running
from tests.trace_collector import Collector, collecting, marks_of
from tests.traced import Heard, check_within, traced

UNSET, ERROR = 0, 2  # opentelemetry.proto.trace.v1.Status
TRACE_ID = "7" * 32
NUM_TOKENS = 40


async def killed_in_mid_stream(model: Path, endpoint: str) -> tuple[Heard, dict[str, str]]:
    """What the client heard; the addresses of the worker that was killed and of the other."""
    async with running(model, 1, 2, otlp_endpoint=endpoint) as cluster:
        for worker in cluster.decode:
            worker.behaviour.step_s = 0.02
        is_amid = asyncio.Event()

        def see(num_tokens: int) -> None:
            if num_tokens >= 4:
                is_amid.set()

        async with asyncio.TaskGroup() as tasks:
            request = token_request(PROMPT, max_tokens=NUM_TOKENS)
            call = traced(cluster.address, request, TRACE_ID, on_token=see)
            answer = tasks.create_task(call)
            await is_amid.wait()
            lost, other = sorted(cluster.decode, key=lambda worker: not worker.reservations)
            await lost.kill()
        return answer.result(), {"lost": lost.address, "other": other.address}


async def test_the_attempt_that_failed_is_there_and_the_retry_is_linked_to_it(
    wide_model: Path,
) -> None:
    async with collecting() as (collector, endpoint):
        heard, addresses = await killed_in_mid_stream(wide_model, endpoint)
        await eventually(lambda: bool(collector.trace(TRACE_ID)), "nothing was sent")
    spans = collector.trace(TRACE_ID)
    assert heard.num_tokens == NUM_TOKENS
    first, second = "prefill/attempt 1", "decode/attempt 2"
    assert spans.keys() == {"", first, second, *(stage.value for stage in REQUEST_STAGES)}
    check_roots(collector)
    assert (spans[first].status.code, spans[first].status.message) == (ERROR, "WORKER_LOST")
    assert spans[second].status.code == spans[""].status.code == UNSET
    assert worker_of(spans[first]) == addresses["lost"]
    assert worker_of(spans[second]) == addresses["other"]
    (link,), (event,) = spans[second].links, spans[""].events
    assert (link.span_id, event.name) == (spans[first].span_id, "retry")
    assert marks_of(link)[attributes.ERROR_TYPE].string_value == "WORKER_LOST"
    check_within(heard, spans)


def check_roots(collector: Collector) -> None:
    """There is one, and every other span has its parent."""
    spans = [span for _, span in collector.spans]
    ids = {span.span_id for span in spans}
    assert sum(span.parent_span_id not in ids for span in spans) == 1


def worker_of(span: Any) -> str:
    address: str = marks_of(span)[attributes.DECODE_WORKER].string_value
    return address
