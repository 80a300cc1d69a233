"""An answer as OpenAI's Responses API has it: an object, or typed events that end so. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from diptych.finish_reason import FinishReason
from router.frontend.http.answer_form import timing_content, typed_sse
from router.frontend.http.answer_writer import Answered, StreamWriter, WholeWriter
from router.frontend.http.asked import Asked
from router.frontend.http.errors import ErrorAnswer
from router.frontend.http.logprob_form import ChatLogprobs
from router.frontend.http.response_output import Entries, Event, ResponseOutput
from router.frontend.validation import chosen_option
from router.generation.answer import ChoiceFinished, Delta, GenerationEvent, Started, Summary, Usage

_CUT_OFF: Final = "max_output_tokens"
_OPTIONS: Final = ("frequency_penalty", "presence_penalty", "temperature", "top_p")
_TOO_MANY: Final = 429  # clients know a few codes of failures, of which two can be meant


class _Response:
    """The object, of which both kinds of answers are made."""

    def __init__(self, asked: Asked, answered: Answered) -> None:
        self._asked, self._answered = asked, answered
        self._output = ResponseOutput(answered.request_id)
        self._logprobs: ChatLogprobs | None = None
        if asked.request.sampling.logprobs is not None:
            self._logprobs = ChatLogprobs(answered.text)
        self._status = "completed"

    def take(self, event: GenerationEvent) -> Iterable[Event]:
        """What the next event of the answer adds to the output."""
        match event:
            case Delta():
                return self._output.add(event, self._entries(event))
            case ChoiceFinished():
                is_cut_off = event.reason is FinishReason.LENGTH
                self._status = "incomplete" if is_cut_off else "completed"
                return self._output.finish(self._status)
        return ()

    def begun(self) -> Mapping[str, object]:
        """Before there is any output."""
        return self._content("in_progress")

    def ended(self, summary: Summary) -> Mapping[str, object]:
        """With all output."""
        ended = self._content(self._status)
        ended["usage"] = self._usage(summary.usage)
        if self._status == "incomplete":
            ended["incomplete_details"] = {"reason": _CUT_OFF}
        else:
            ended["completed_at"] = self._answered.created_s + int(summary.timing.total_s)
        if self._asked.tells_timing:
            ended["timing"] = timing_content(summary.timing)
        return ended

    def failed(self, answer: ErrorAnswer) -> Mapping[str, object]:
        """With the items that were done before it failed."""
        code = "rate_limit_exceeded" if answer.status == _TOO_MANY else "server_error"
        error = {"code": code, "message": f"{answer.code}: {answer.message}"}
        return {**self._content("failed"), "error": error}

    @property
    def status(self) -> str:
        """How it ended."""
        return self._status

    def _entries(self, delta: Delta) -> Entries:
        if self._logprobs is None:
            return ()
        self._logprobs.add(delta.token_ids, delta.logprobs)
        return self._logprobs.take_entries()

    def _content(self, status: str) -> dict[str, object]:
        answered, given = self._answered, self._asked.request.sampling
        return {
            "id": f"resp_{answered.request_id}",
            "object": "response",
            "created_at": answered.created_s,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "max_tool_calls": None,
            "model": answered.model,
            "output": list(self._output.items),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **{name: chosen_option(name, given, answered.recommended) for name in _OPTIONS},
            **self._asked.repeated,
        }

    def _usage(self, usage: Usage) -> Mapping[str, object]:
        num_reasoning = min(self._output.num_reasoning_tokens, usage.num_output_tokens)
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }


class WholeResponse:
    """Implements ``WholeWriter``."""

    def __init__(self, asked: Asked, answered: Answered) -> None:
        self._response = _Response(asked, answered)
        self._summary: Summary | None = None

    def add(self, event: GenerationEvent) -> None:
        for _ in self._response.take(event):
            pass
        if isinstance(event, Summary):
            self._summary = event

    def content(self) -> Mapping[str, object]:
        assert self._summary is not None
        return self._response.ended(self._summary)


class StreamedResponse:
    """Implements ``StreamWriter``. Every event has a number, one after the other."""

    def __init__(self, asked: Asked, answered: Answered) -> None:
        self._response = _Response(asked, answered)
        self._num_sent = 0

    def send(self, event: GenerationEvent) -> bytes:
        return "".join(self.parts(event)).encode()

    def parts(self, event: GenerationEvent) -> Iterator[str]:
        match event:
            case Started():
                begun = self._response.begun()
                for kind in ("response.created", "response.in_progress"):
                    yield from self._written({"type": kind, "response": begun})
            case Summary():
                kind, ended = f"response.{self._response.status}", self._response.ended(event)
                yield from self._written({"type": kind, "response": ended})
            case _:
                for each in self._response.take(event):
                    yield from self._written(each)

    def fail(self, answer: ErrorAnswer) -> Iterator[str]:
        failed = self._response.failed(answer)
        return self._written({"type": "response.failed", "response": failed})

    def _written(self, event: Event) -> Iterator[str]:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        return typed_sse({**event, "sequence_number": number})


class ResponseWriters:
    """Implements ``AnswerWriters``."""

    operation = "chat"
    repeats_all = True

    def whole(self, asked: Asked, answered: Answered) -> WholeWriter:
        return WholeResponse(asked, answered)

    def stream(self, asked: Asked, answered: Answered) -> StreamWriter:
        return StreamedResponse(asked, answered)
