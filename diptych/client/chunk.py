"""An answer's events, as a client sees them: parts of a text, and what the last one adds. Pure."""

from dataclasses import dataclass

from diptych.finish_reason import FinishReason
from diptych.token_logprobs import TokenLogprobs
from diptych.v1 import inference_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of an answer.

    ``finish_reason``, what matched, ``usage`` and ``timing`` are in the last one only.
    ``seed`` and all ``token_ids`` so far continue the answer elsewhere, should it
    break off (``emitted_token_ids`` of the next request).
    """

    request_id: str
    model: str
    seed: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    position: int = 0  # in the output, of token_ids[0]
    margins: tuple[float, ...] = ()  # if return_margins
    logprobs: tuple[TokenLogprobs, ...] = ()  # if logprobs
    prompt_token_ids: tuple[int, ...] = ()  # if return_prompt_token_ids
    finish_reason: FinishReason | None = None
    stop_match: str = ""
    stop_token_id: int | None = None
    usage: inference_pb2.Usage | None = None
    timing: inference_pb2.Timing | None = None


class ChunkReader:
    """Makes the chunks of one answer from the stream's messages. One per call."""

    def __init__(self) -> None:
        self._started = inference_pb2.Started()
        self._finished = inference_pb2.ChoiceFinished()
        self._num_tokens = 0

    def read(self, response: inference_pb2.GenerateResponse) -> Chunk | None:
        """The chunk that this message completes, if it does."""
        match response.WhichOneof("event"):
            case "started":
                self._started = response.started
            case "delta":
                return self._part(response.delta)
            case "choice_finished":
                self._finished = response.choice_finished
            case "summary":
                return self._last(response.summary)
        return None

    def _part(self, delta: inference_pb2.Delta) -> Chunk:
        started = self._started
        self._num_tokens = delta.position + len(delta.token_ids)
        return Chunk(
            request_id=started.request_id,
            model=started.model,
            seed=started.seed,
            prompt_token_ids=tuple(started.prompt_token_ids),
            text=delta.text,
            token_ids=tuple(delta.token_ids),
            position=delta.position,
            margins=tuple(delta.margins),
            logprobs=tuple(map(TokenLogprobs.from_proto, delta.logprobs)),
        )

    def _last(self, summary: inference_pb2.Summary) -> Chunk:
        started, finished = self._started, self._finished
        by_token = finished.HasField("stop_token_id")
        return Chunk(
            request_id=started.request_id,
            model=started.model,
            seed=started.seed,
            prompt_token_ids=tuple(started.prompt_token_ids),
            position=self._num_tokens,
            finish_reason=FinishReason(finished.reason),
            stop_match=finished.stop,
            stop_token_id=finished.stop_token_id if by_token else None,
            usage=summary.usage,
            timing=summary.timing,
        )
