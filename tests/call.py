"""Calling a router over plain gRPC stubs, as a client that we did not write would."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from diptych.errors import DiptychError
from diptych.rpc.status import from_rpc_error
from diptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc


@dataclass
class Answer:
    """What one Generate call brought; ``times`` are arrivals on the monotonic clock."""

    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    sent_at: float = 0.0
    last: inference_pb2.GenerateResponse = field(default_factory=inference_pb2.GenerateResponse)
    error: DiptychError | None = None

    @property
    def timing(self) -> inference_pb2.Timing:
        return self.last.timing

    @property
    def finish_reason(self) -> int:
        return self.last.finish_reason

    @property
    def longest_gap_s(self) -> float:
        moments = [self.sent_at, *self.times]
        return max(later - earlier for earlier, later in itertools.pairwise(moments))


def token_request(
    token_ids: Sequence[int],
    *,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    seed: int | None = None,
    ignore_eos: bool = True,
    salt: str = "",
    request_id: str = "",
) -> inference_pb2.GenerateRequest:
    """A request for the continuation of token ids, greedy unless said otherwise."""
    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(ids=token_ids),
        sampling=common_pb2.SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            return_margins=True,
        ),
        cache_salt=salt,
        request_id=request_id,
    )


async def generate(
    channel: grpc.aio.Channel,
    request: inference_pb2.GenerateRequest,
    *,
    timeout_s: float | None = 120.0,
    cancel_after_tokens: int | None = None,
) -> Answer:
    """Call Generate and collect the answer; a failed call's error is in ``answer.error``.

    Checks on the way what every stream promises: positions without gaps, and
    usage and timing in the last response only.
    """
    answer = Answer(sent_at=time.monotonic())
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=timeout_s)
    try:
        async for response in call:
            assert not answer.last.finish_reason, "a response after the last"
            answer.last = response
            answer.text += response.text
            if response.token_ids:
                assert response.position == len(answer.token_ids), "tokens skipped or repeated"
                answer.token_ids += response.token_ids
                answer.margins += response.margins
                answer.times.append(time.monotonic())
            if cancel_after_tokens is not None and len(answer.token_ids) >= cancel_after_tokens:
                call.cancel()
                return answer
    except grpc.aio.AioRpcError as error:
        answer.error = from_rpc_error(error)
        return answer
    assert answer.last.finish_reason, "the stream ended OK without a finish reason"
    return answer
