"""What the client still has to be sent, and when things happened. Pure; clock passed in."""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych.errors import InvalidRequestError
from diptych.finish_reason import FinishReason
from diptych.telemetry.stages import Stage
from diptych.text.detokenizer import Detokenizer, TextDelta
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs
from diptych.v1 import common_pb2
from router.generation.answer import ChoiceFinished, Delta, Said, Timing
from router.request.answer_split import AnswerSplit
from router.request.emitted_tokens import RequestShape
from router.request.prompt_told import ToldPart

_BEHIND: Final = 16  # batches that were not taken
_TOKEN_BYTES: Final = 128  # that are kept of one with its margin and text, about
_LIKELY_BYTES: Final = 80  # of each log probability

# Told of new tokens: how many, and how long after those before, s (None: the first).
OnEmitted = Callable[[int, float | None], None]


def kept_bytes(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> int:
    """What is kept of these tokens, about."""
    num_likely = len(logprobs) * (1 + len(logprobs[0].top_token_ids)) if logprobs else 0
    return len(token_ids) * _TOKEN_BYTES + num_likely * _LIKELY_BYTES


class StageTimes(NamedTuple):
    """When a stage was entered and left (monotonic clock, s); None: it was not left."""

    stage: Stage
    start_s: float
    stop_s: float | None


@dataclass(slots=True)
class Moments:
    """When a request passed each point (monotonic clock, s); None: not yet."""

    received_s: float
    placed_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    first_written_s: float | None = None
    second_written_s: float | None = None
    last_written_s: float | None = None

    @property
    def stages(self) -> list[StageTimes]:
        """Those that were entered, in order; only the last may not have been left."""
        points = (
            (Stage.QUEUE, self.received_s, self.placed_s),
            (Stage.PREFILL, self.placed_s, self.first_token_s),
            (Stage.FIRST_WRITE, self.first_token_s, self.first_written_s),
            (Stage.HANDOFF, self.first_written_s, self.second_written_s),
            (Stage.DECODE, self.second_written_s, self.last_written_s),
        )
        return [
            StageTimes(stage, start, stop) for stage, start, stop in points if start is not None
        ]

    @property
    def awaited(self) -> Stage:
        """The stage that what workers are asked for now takes part in."""
        if self.first_token_s is None:
            return Stage.PREFILL
        return Stage.HANDOFF if self.second_written_s is None else Stage.DECODE


class ResponseBuilder:
    """Turns emitted tokens into deltas; what is not taken in time joins into one.

    Where the answer is split, thoughts do not join with what is beside them, so that a delta's
    tokens are those of what it says, nor does text with calls before it, so that the order stays.

    ``sink`` is the request machine's token sink. Deltas carry consecutive output
    positions. The first ``num_resumed`` tokens the client has already: they set the
    state of the text and are not sent. The first token that is sent is due at once, later ones
    once there are ``interval`` of them. The one owner is the request's session.
    """

    __slots__ = (
        "_behind_at",
        "_clock",
        "_detokenizer",
        "_includes_stop",
        "_interval",
        "_last_token_id",
        "_max_unsent",
        "_num_due",
        "_num_resumed",
        "_num_unsent",
        "_num_written",
        "_on_emitted",
        "_prompt_parts",
        "_shape",
        "_split",
        "_unsent_ids",
        "_unsent_logprobs",
        "_unsent_margins",
        "_unsent_parts",
        "_unsent_said",
        "_unsent_text",
        "moments",
        "num_output_tokens",
        "states",
        "stop_match",
    )

    def __init__(
        self,
        shape: RequestShape,
        detokenizer: Detokenizer,
        *,
        received_s: float,
        clock: Callable[[], float],
        max_unsent: int,
        num_resumed: int = 0,
        interval: int = 1,
        includes_stop: bool = False,
        split: AnswerSplit | None = None,
        on_emitted: OnEmitted = lambda num_tokens, gap_s: None,
    ) -> None:
        """``max_unsent`` bounds how many batches of tokens may be due and not taken.

        ``includes_stop``: the text ends with the stop string, or the text of the stop
        token, that ended the output. ``split`` takes the text apart; None: it is whole.
        """
        self.moments = Moments(received_s)
        self.num_output_tokens = 0
        self.stop_match: str | None = None
        self.states: array[float] = array("f")  # of the prompt, if they were wanted
        self._shape = shape
        self._detokenizer = detokenizer
        self._clock = clock
        self._max_unsent = max_unsent
        self._behind_at = 0
        self._see_behind(0)
        self._num_resumed = num_resumed
        self._interval = interval
        self._num_due = 1  # as many tokens as are sent at once
        self._includes_stop = includes_stop
        self._split = split
        self._on_emitted = on_emitted
        self._last_token_id: int | None = None
        self._prompt_parts: deque[common_pb2.PromptLogprobs] = deque()  # smaller than plain ones
        self._unsent_ids: list[int] = []
        self._unsent_margins: list[float] = []
        self._unsent_logprobs: list[TokenLogprobs] = []
        self._unsent_text = ""
        self._unsent_said: Said | None = None  # where the answer is split, instead of the text
        self._unsent_parts: deque[Delta] = deque()  # before that
        self._num_unsent = 0  # batches, since they are due
        self._num_written = 0

    @property
    def is_due(self) -> bool:
        """Whether what ``take`` has is to be sent now, though more may come."""
        return len(self._unsent_ids) >= self._num_due or bool(self._unsent_parts)

    @property
    def is_behind(self) -> bool:
        """Whether so much was not taken that ``tell_behind`` says more than before."""
        return self._num_unsent >= self._behind_at

    def tell_behind(self) -> int:
        """``num_unsent_bytes``, of which there is no more to tell until some more batches came."""
        self._see_behind(self._num_unsent)
        return self.num_unsent_bytes

    def _see_behind(self, num_unsent: int) -> None:
        self._behind_at = min(num_unsent + _BEHIND, self._max_unsent + 1)

    @property
    def num_unsent_bytes(self) -> int:
        """What is kept of what was not taken yet, about."""
        of_parts = sum(kept_bytes(part.token_ids, part.logprobs) for part in self._unsent_parts)
        of_prompt = sum(part.ByteSize() for part in self._prompt_parts)
        return of_parts + kept_bytes(self._unsent_ids, self._unsent_logprobs) + of_prompt

    @property
    def is_overfull(self) -> bool:
        """Whether the client is too slow."""
        return self._num_unsent > self._max_unsent

    def placed(self) -> None:
        """Workers were chosen (the first time counts)."""
        if self.moments.placed_s is None:
            self.moments.placed_s = self._clock()

    def sink(
        self,
        token_ids: Sequence[int],
        margins: Sequence[float],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> bool:
        """See :data:`router.request.emitted_tokens.TokenSink`."""
        before = self.num_output_tokens
        if self._split is None or before < self._num_resumed:
            has_ended = self._add(token_ids, margins, logprobs)
        else:
            has_ended = self._add_singly(token_ids, margins, logprobs)
        if before >= self._num_resumed:
            self._emitted(self.num_output_tokens - before)
        return has_ended

    def _add_singly(
        self,
        token_ids: Sequence[int],
        margins: Sequence[float],
        logprobs: Sequence[TokenLogprobs],
    ) -> bool:
        """See ``_add``; so that the text of each token that is sent is told apart."""
        for at in range(len(token_ids)):
            now = slice(at, at + 1)
            if self._add(token_ids[now], margins[now], logprobs[now]):
                return True
        return False

    def _add(
        self,
        token_ids: Sequence[int],
        margins: Sequence[float],
        logprobs: Sequence[TokenLogprobs],
    ) -> bool:
        """Whether a stop string ended the output."""
        position, used = self.num_output_tokens, len(token_ids)
        shape, shown = self._shape, token_ids
        ends = token_ids[-1] in shape.stop_token_ids and position + used >= shape.min_tokens
        if ends and not self._includes_stop:
            shown = token_ids[:-1]  # it ends the output and has no text
        delta = self._detokenizer.push(shown)
        if delta.stop_match is not None:
            self.stop_match, used = delta.stop_match, delta.num_tokens_used
            token_ids, margins, logprobs = token_ids[:used], margins[:used], logprobs[:used]
        self._last_token_id = token_ids[-1]
        self.num_output_tokens = position + used
        text = self._with_stop(delta)
        said = None if self._split is None else self._split.add(text)
        if position >= self._num_resumed:
            if said is not None and not self._joins(said):
                self._unsent_parts.append(self._unsent(position))
            self._unsent_ids += token_ids
            self._unsent_margins += margins
            self._unsent_logprobs += logprobs
            if said is None:
                self._unsent_text += text
            else:
                before = self._unsent_said
                self._unsent_said = said if before is None else before.followed_by(said)
        return delta.stop_match is not None

    def _joins(self, said: Said) -> bool:
        """Whether it goes on with what is not sent yet: of a delta text comes before calls."""
        before = self._unsent_said
        if before is None:
            return True
        is_cut = (
            (before.reasoning and (said.text or said.tool_calls))
            or (said.reasoning and (before.text or before.tool_calls))
            or (before.tool_calls and said.text)
        )
        return not is_cut

    def prompt_sink(self, part: ToldPart) -> None:
        """See :data:`router.request.prompt_told.ToldSink`."""
        if isinstance(part, common_pb2.PromptLogprobs):
            self._prompt_parts.append(part)
        else:
            self.states = array("f", part.values)

    def take_prompt(self) -> PromptLogprobs | None:
        """What was told next of the prompt's tokens; None: there is no more."""
        parts = self._prompt_parts
        return PromptLogprobs.from_proto(parts.popleft()) if parts else None

    def check_resumed(self) -> None:
        """Once ``sink`` had what is resumed. Raises InvalidRequestError: it had ended before."""
        if self.num_output_tokens < self._num_resumed:
            raise InvalidRequestError(
                "comes after a stop string, which ended the output",
                field=f"emitted_token_ids[{self.num_output_tokens}]",
            )

    def take(self) -> Delta | None:
        """The next delta to write: all tokens that were not taken yet and join, due or not."""
        if self._unsent_parts:
            taken = self._unsent_parts.popleft()
        elif self._unsent_ids:
            taken = self._unsent(self.num_output_tokens)
        else:
            return None
        if self._num_unsent >= _BEHIND:
            self._see_behind(0)
        self._num_unsent = 0
        self._num_due = self._interval
        return taken

    def _unsent(self, end: int) -> Delta:
        """What joined since it was last called, up to that position."""
        token_ids = self._unsent_ids
        delta = Delta(
            self._unsent_text,
            token_ids,
            end - len(token_ids),
            self._unsent_margins,
            tuple(self._unsent_logprobs),
        )
        if self._unsent_said is not None:
            delta = delta.saying(self._unsent_said)
            self._unsent_said = None
        self._unsent_ids, self._unsent_margins, self._unsent_text = [], [], ""
        if self._unsent_logprobs:
            self._unsent_logprobs = []
        return delta

    def written(self, num_tokens: int) -> float | None:
        """A delta with this many tokens was written; the gap to the one before, s."""
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

    def finish(self, reason: FinishReason) -> tuple[Delta | None, ChoiceFinished]:
        """The text that was still held back, and the end.

        Broken characters may yet complete a stop string.
        """
        text = ""
        if self.stop_match is None:
            held = self._detokenizer.flush()
            self.stop_match = held.stop_match
            text = self._with_stop(held)
        if self.stop_match is not None:
            reason = FinishReason.STOP
        said = Said(text)
        if self._split is not None:
            said = self._split.add(text)
            is_whole = reason is FinishReason.STOP and self.stop_match is None
            said = said.followed_by(self._split.finish(is_whole=is_whole))
            if reason is FinishReason.STOP and self._split.has_calls:
                reason = FinishReason.TOOL_CALLS
        rest = None
        if any(said):
            rest = Delta("", [], self.num_output_tokens, []).saying(said)
        if self.stop_match is not None:
            return rest, ChoiceFinished(reason, self.stop_match)
        matched = None if reason is FinishReason.LENGTH else self._last_token_id
        return rest, ChoiceFinished(reason, matched)

    def timing(self) -> Timing:
        """The stages so far; those of the time to first token tile it."""
        m = self.moments
        total_s = self._clock() - m.received_s
        if m.placed_s is None:
            return Timing(total_s=total_s)
        queue_s = m.placed_s - m.received_s
        if m.first_token_s is None:
            return Timing(total_s=total_s, queue_s=queue_s)
        prefill_s = m.first_token_s - m.placed_s
        if m.first_written_s is None:
            return Timing(total_s=total_s, queue_s=queue_s, prefill_s=prefill_s)
        has_second = m.second_written_s is not None and m.last_written_s is not None
        second_s, last_s = m.second_written_s or 0.0, m.last_written_s or 0.0
        return Timing(
            total_s=total_s,
            queue_s=queue_s,
            prefill_s=prefill_s,
            first_write_s=m.first_written_s - m.first_token_s,
            ttft_s=m.first_written_s - m.received_s,
            handoff_gap_s=second_s - m.first_written_s if has_second else 0.0,
            decode_s=last_s - second_s if has_second else 0.0,
        )

    def _with_stop(self, delta: TextDelta) -> str:
        is_added = self._includes_stop and delta.stop_match is not None
        return f"{delta.text}{delta.stop_match}" if is_added else delta.text

    def _emitted(self, num_tokens: int) -> None:
        now, moments = self._clock(), self.moments
        if moments.first_token_s is None:
            moments.first_token_s = now
        last_s, moments.last_token_s = moments.last_token_s, now
        self._on_emitted(num_tokens, None if last_s is None else now - last_s)
        if len(self._unsent_ids) >= self._num_due:
            self._num_unsent += 1
