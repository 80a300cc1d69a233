"""What the client still has to be sent, and when things happened. Pure; clock passed in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych.text.detokenizer import Detokenizer
from diptych.v1 import common_pb2, inference_pb2
from router.request.emitted_tokens import RequestShape


@dataclass(slots=True)
class Moments:
    """When a request passed each point (monotonic clock, s); None: not yet."""

    received_s: float
    placed_s: float | None = None
    first_token_s: float | None = None
    first_written_s: float | None = None
    second_written_s: float | None = None
    last_written_s: float | None = None
    ended_s: float | None = None


class Answer:
    """Turns emitted tokens into responses; what is not taken in time joins into one.

    ``sink`` is the request machine's token sink. Responses carry consecutive output
    positions. The one owner is the request's session.
    """

    def __init__(
        self,
        request_id: str,
        shape: RequestShape,
        detokenizer: Detokenizer,
        *,
        received_s: float,
        clock: Callable[[], float],
        max_unsent: int,
    ) -> None:
        """``max_unsent`` bounds how many batches of tokens may wait to be taken."""
        self.moments = Moments(received_s)
        self.num_output_tokens = 0
        self.stop_match = ""
        self._request_id = request_id
        self._shape = shape
        self._detokenizer = detokenizer
        self._clock = clock
        self._max_unsent = max_unsent
        self._unsent: inference_pb2.GenerateResponse | None = None
        self._num_unsent = 0
        self._num_written = 0

    @property
    def has_unsent(self) -> bool:
        """Whether ``take`` has a response."""
        return self._unsent is not None

    @property
    def is_overfull(self) -> bool:
        """Whether the client is too slow."""
        return self._num_unsent > self._max_unsent

    def placed(self) -> None:
        """Workers were chosen (the first time counts)."""
        if self.moments.placed_s is None:
            self.moments.placed_s = self._clock()

    def sink(self, token_ids: Sequence[int], margins: Sequence[float]) -> bool:
        """See :data:`router.request.emitted_tokens.TokenSink`."""
        if self.moments.first_token_s is None:
            self.moments.first_token_s = self._clock()
        num_before = self.num_output_tokens
        shown = len(token_ids)
        is_stop = token_ids[-1] in self._shape.stop_token_ids
        if is_stop and num_before + shown >= self._shape.min_tokens:
            shown -= 1  # it ends the output and has no text
        delta = self._detokenizer.push(token_ids[:shown])
        used = len(token_ids)
        if delta.stop_match is not None:
            self.stop_match = delta.stop_match
            used = delta.num_tokens_used
        unsent = self._unsent
        if unsent is None:
            self._unsent = unsent = inference_pb2.GenerateResponse(
                request_id=self._request_id, position=num_before
            )
        unsent.text += delta.text
        unsent.token_ids.extend(token_ids[:used])
        unsent.margins.extend(margins[:used])
        self.num_output_tokens += used
        self._num_unsent += 1
        return delta.stop_match is not None

    def take(self) -> inference_pb2.GenerateResponse | None:
        """The next response to write."""
        taken, self._unsent, self._num_unsent = self._unsent, None, 0
        return taken

    def written(self, num_tokens: int) -> float | None:
        """A response with this many tokens was written; the gap to the one before, s."""
        now, moments = self._clock(), self.moments
        before, gap_s = self._num_written, None
        self._num_written += num_tokens
        if moments.last_written_s is not None:
            gap_s = now - moments.last_written_s
        if before == 0 and num_tokens:
            moments.first_written_s = now
        if before < 2 <= self._num_written:
            moments.second_written_s = now
        moments.last_written_s = now
        return gap_s

    def flush(self) -> str:
        """The text that was still held back; broken characters may yet complete a stop string."""
        if self.stop_match:
            return ""
        delta = self._detokenizer.flush()
        self.stop_match = delta.stop_match or ""
        return delta.text

    def last_response(
        self, reason: int, text: str, usage: inference_pb2.Usage, timing: inference_pb2.Timing
    ) -> inference_pb2.GenerateResponse:
        """The response that ends the stream."""
        return inference_pb2.GenerateResponse(
            request_id=self._request_id,
            text=text,
            position=self.num_output_tokens,
            finish_reason=common_pb2.FinishReason.Name(reason),
            stop_match=self.stop_match,
            usage=usage,
            timing=timing,
        )

    def timing(self) -> inference_pb2.Timing:
        """The stages so far; those of the time to first token tile it."""
        m, now = self.moments, self._clock()
        timing = inference_pb2.Timing(total_s=now - m.received_s)
        if m.placed_s is not None:
            timing.queue_s = m.placed_s - m.received_s
            if m.first_token_s is not None:
                timing.prefill_s = m.first_token_s - m.placed_s
        if m.first_written_s is not None and m.first_token_s is not None:
            timing.first_write_s = m.first_written_s - m.first_token_s
            timing.ttft_s = m.first_written_s - m.received_s
            if m.second_written_s is not None and m.last_written_s is not None:
                timing.handoff_gap_s = m.second_written_s - m.first_written_s
                timing.decode_s = m.last_written_s - m.second_written_s
        return timing
