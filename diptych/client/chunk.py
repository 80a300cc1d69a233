"""A part of an answer, as a client sees it. Pure."""

from dataclasses import dataclass

from diptych.finish_reason import FinishReason
from diptych.token_logprobs import TokenLogprobs
from diptych.v1 import inference_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of an answer.

    ``finish_reason``, what matched, ``usage`` and ``timing`` are in the last one only;
    those two are of the last call, where an answer took several. Of several choices each has
    a last one with its ``finish_reason``; ``usage`` and ``timing`` come behind all.

    ``seed``, ``model_digest``, ``now_unix_s`` and all ``token_ids`` so far continue the answer
    in another program, should this one end (``emitted_token_ids`` of the next request).
    """

    request_id: str
    model: str
    seed: int
    model_digest: str = ""  # of the weights that answer; empty: the workers do not say
    now_unix_s: int = 0  # what the chat's template took for now
    choice: int = 0  # which of n
    text: str = ""
    reasoning: str = ""  # what the model thought, of a chat whose answer is taken apart
    tool_calls: tuple[inference_pb2.ToolCall, ...] = ()  # each whole
    token_ids: tuple[int, ...] = ()
    position: int = 0  # in the output, of token_ids[0]
    margins: tuple[float, ...] = ()  # if return_margins
    logprobs: tuple[TokenLogprobs, ...] = ()  # if logprobs
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # if asked for, in the first; from position 1
    prompt_token_ids: tuple[int, ...] = ()  # if return_prompt_token_ids
    finish_reason: FinishReason | None = None  # in the last one: one that has no name here
    stop_match: str = ""
    stop_token_id: int | None = None
    usage: inference_pb2.Usage | None = None
    timing: inference_pb2.Timing | None = None
