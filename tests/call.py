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
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    sent_at: float = 0.0
    started: inference_pb2.Started = field(default_factory=inference_pb2.Started)
    finished: inference_pb2.ChoiceFinished = field(default_factory=inference_pb2.ChoiceFinished)
    summary: inference_pb2.Summary = field(default_factory=inference_pb2.Summary)
    error: DiptychError | None = None

    @property
    def timing(self) -> inference_pb2.Timing:
        return self.summary.timing

    @property
    def usage(self) -> inference_pb2.Usage:
        return self.summary.usage

    @property
    def finish_reason(self) -> int:
        return self.finished.reason

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
    emitted: Sequence[int] = (),
) -> inference_pb2.GenerateRequest:
    """A request for the continuation of token ids, greedy unless said otherwise."""
    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(ids=token_ids),
        sampling=inference_pb2.SamplingOptions(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            return_margins=True,
        ),
        cache_salt=salt,
        request_id=request_id,
        emitted_token_ids=emitted,
    )


async def generate(
    channel: grpc.aio.Channel,
    request: inference_pb2.GenerateRequest,
    *,
    timeout_s: float | None = 120.0,
    cancel_after_tokens: int | None = None,
) -> Answer:
    """Call Generate and collect the answer; a failed call's error is in ``answer.error``.

    Checks on the way what every stream promises: one Started first, positions without
    gaps, one end of the choice, and usage and timing last.
    """
    answer = Answer(sent_at=time.monotonic())
    num_before, kinds = len(request.emitted_token_ids), [""]
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=timeout_s)
    try:
        async for response in call:
            kind = response.WhichOneof("event") or "unset"
            assert kind in _FOLLOWS[kinds[-1]], f"{kind} after {kinds[-1]}"
            kinds.append(kind)
            _collect(answer, response, num_before)
            if cancel_after_tokens is not None and len(answer.token_ids) >= cancel_after_tokens:
                call.cancel()
                return answer
    except grpc.aio.AioRpcError as error:
        answer.error = from_rpc_error(error)
        return answer
    assert kinds[-1] == "summary", f"the stream ended OK with {kinds[-1]}"
    assert answer.finish_reason, "a choice ended without a reason"
    return answer


_FOLLOWS = {
    "": {"started"},
    "started": {"prompt_logprobs", "delta", "choice_finished"},
    "prompt_logprobs": {"prompt_logprobs", "delta"},
    "delta": {"delta", "choice_finished"},
    "choice_finished": {"summary"},
    "summary": set[str](),
}


def _collect(answer: Answer, response: inference_pb2.GenerateResponse, num_before: int) -> None:
    match response.WhichOneof("event"):
        case "started":
            answer.started = response.started
        case "prompt_logprobs":
            part = response.prompt_logprobs
            assert part.position == 1 + len(answer.prompt_logprobs), "told twice, or not"
            answer.prompt_logprobs += part.logprobs
        case "delta":
            delta = response.delta
            answer.text += delta.text
            if delta.token_ids:
                at = num_before + len(answer.token_ids)
                assert delta.position == at, "tokens skipped or repeated"
                answer.token_ids += delta.token_ids
                answer.margins += delta.margins
                answer.logprobs += delta.logprobs
                answer.times.append(time.monotonic())
        case "choice_finished":
            answer.finished = response.choice_finished
        case "summary":
            answer.summary = response.summary
