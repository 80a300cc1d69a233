"""A client that has its request traced, and what it can say of the spans by its own clock."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diptych.rpc.channel import open_channel
from diptych.telemetry.stages import REQUEST_STAGES, Stage
from diptych.v1 import inference_pb2, inference_pb2_grpc
from tests.trace_collector import CLIENT_SPAN


@dataclass
class Heard:
    """What a client saw of its answer; ns since 1970, as spans have it."""

    sent_ns: int
    first_ns: int = 0  # its first token
    ended_ns: int = 0
    num_tokens: int = 0
    timing: inference_pb2.Timing = field(default_factory=inference_pb2.Timing)


async def traced(
    address: str,
    request: inference_pb2.GenerateRequest,
    trace_id: str,
    *,
    timeout_s: float = 60.0,
    cancel_after: int | None = None,
    on_token: Callable[[int], None] = lambda num_tokens: None,
) -> Heard:
    """Call Generate under the client's own trace.

    ``cancel_after`` so many responses the client leaves.
    """
    heard, num_read = Heard(time.time_ns()), 0
    metadata = (("traceparent", f"00-{trace_id}-{CLIENT_SPAN.hex()}-01"),)
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(request, timeout=timeout_s, metadata=metadata)
        async for response in call:
            num_read += 1
            if response.HasField("delta") and response.delta.token_ids:
                heard.first_ns = heard.first_ns or time.time_ns()
                heard.num_tokens += len(response.delta.token_ids)
                on_token(heard.num_tokens)
            if num_read == cancel_after:
                call.cancel()
                break
            if response.HasField("summary"):
                heard.timing = response.summary.timing
    heard.ended_ns = time.time_ns()
    return heard


def check_within(heard: Heard, spans: Mapping[str, Any]) -> None:
    """The router's spans lie between what the client did and saw, whatever the router says."""
    root = spans[""]
    assert heard.sent_ns <= root.start_time_unix_nano
    assert root.end_time_unix_nano <= heard.ended_ns
    for stage in REQUEST_STAGES:
        span = spans[stage.value]
        assert heard.sent_ns <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    assert spans[Stage.PREFILL.value].end_time_unix_nano <= heard.first_ns
