"""Answers as OpenAI's JSON: in one piece, or as the events of a stream. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from json.encoder import encode_basestring
from typing import Final, NamedTuple

from diptych.finish_reason import FinishReason
from diptych.text.token_text import TokenText
from diptych.token_logprobs import PromptLogprobs
from router.frontend.http.errors import ErrorAnswer
from router.frontend.http.json_parts import encode, in_one_line, json_parts
from router.frontend.http.logprob_form import CompletionLogprobs, LogprobWriter
from router.frontend.http.prompt_form import PromptForm
from router.generation.answer import (
    CalledTool,
    ChoiceFinished,
    Delta,
    GenerationEvent,
    Said,
    Started,
    Summary,
    Timing,
    Usage,
)

_REASONS: Final[Mapping[FinishReason, str]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
}
_END: Final = "data: [DONE]\n\n"
STREAM_END: Final = _END.encode()
_TEXT: Final = Said("\0")  # where a piece's own comes; nothing else in it is like that


class Progress(NamedTuple):
    """What was said before, in a stream."""

    is_begun: bool = False
    num_calls: int = 0


class Form(NamedTuple):
    """How one of the two kinds of answers is written."""

    operation: str  # as GenAI names it
    id_prefix: str
    whole: str  # the name of an answer in one piece
    chunk: str  # and of a piece of it
    whole_of: Callable[[Said], Mapping[str, object]]
    """The members of a choice that hold all that was said."""
    pieces_of: Callable[[Said, "Progress"], Sequence[Mapping[str, object]]]
    """Those of the pieces of a stream, one at least, that say this."""
    has_prompt_in_choice: bool
    """What is told of the prompt is in the choice, rather than beside the choices."""
    logprobs_of: Callable[[TokenText], LogprobWriter]
    """What writes the log probabilities of one answer."""


COMPLETION: Final = Form(
    operation="text_completion",
    id_prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    whole_of=lambda said: {"text": said.text},
    pieces_of=lambda said, before: [{"text": said.text}],
    has_prompt_in_choice=True,
    logprobs_of=CompletionLogprobs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What every piece of one answer says alike."""

    form: Form
    request_id: str
    model: str
    created_s: int  # Unix time
    index: int = 0
    """Of the choice that it heads."""
    stop_token_ids: frozenset[int] = frozenset()
    """Those that the client named: that one of these came is news to it."""

    def head(self, kind: str) -> dict[str, object]:
        """The first members of an answer or of a piece of one."""
        return {
            "id": f"{self.form.id_prefix}{self.request_id}",
            "object": kind,
            "created": self.created_s,
            "model": self.model,
        }

    def choice(
        self,
        members: Mapping[str, object],
        finished: ChoiceFinished | None,
        logprobs: LogprobWriter | None,
    ) -> dict[str, object]:
        """A choice with its reason to end, which is null until it has one."""
        told = None if logprobs is None else logprobs.take()
        made = {"index": self.index, **members, "logprobs": told}
        made |= {"finish_reason": None, "stop_reason": None}
        if finished is not None:
            made["finish_reason"] = _REASONS[finished.reason]
            made["stop_reason"] = self._stop_reason(finished.matched)
        return made

    def _stop_reason(self, matched: str | int | None) -> str | int | None:
        """The stop string or token of the client's that ended it; null for the model's own end."""
        is_asked = isinstance(matched, str) or matched in self.stop_token_ids
        return matched if is_asked else None


@dataclass(slots=True)
class WholeAnswer:
    """Collects the events of an answer that is sent in one piece."""

    heading: Heading
    logprobs: LogprobWriter | None = None
    """None where nobody asks for log probabilities."""
    prompt: PromptForm | None = None
    """None where nothing is told of the prompt."""
    tells_timing: bool = False
    _text: bytearray = field(default_factory=bytearray)  # an object for each token takes far more
    _reasoning: bytearray = field(default_factory=bytearray)
    _calls: list[CalledTool] = field(default_factory=list)
    _finished: ChoiceFinished | None = None
    _summary: Summary | None = None

    def add(self, event: GenerationEvent) -> None:
        """Take the next event."""
        match event:
            case Delta() if not _is_left_out(self.prompt):
                self._text += event.text.encode()
                self._reasoning += event.reasoning.encode()
                self._calls += event.tool_calls
                if self.logprobs is not None:
                    self.logprobs.add(event.token_ids, event.logprobs)
            case ChoiceFinished():
                self._finished = _ending(event, self.prompt)
            case Summary():
                self._summary = event
            case Started() if self.prompt is not None:
                self.prompt.begin(event.prompt_token_ids)
                self._text += self.prompt.echoed.encode()
            case PromptLogprobs() if self.prompt is not None:
                self.prompt.add(event)
            case _:
                pass

    def content(self) -> Mapping[str, object]:
        """The answer, once every event was taken."""
        assert self._summary is not None
        form, told = self.heading.form, {} if self.prompt is None else self.prompt.members()
        return {
            **self.heading.head(form.whole),
            "choices": [self.choice()],
            **({} if form.has_prompt_in_choice else told),
            "usage": usage_content(counted(self._summary.usage, self.prompt)),
            **({"timing": timing_content(self._summary.timing)} if self.tells_timing else {}),
        }

    def choice(self) -> Mapping[str, object]:
        """The choice, once every event was taken."""
        form, told = self.heading.form, {} if self.prompt is None else self.prompt.members()
        said = Said(self._text.decode(), self._reasoning.decode(), tuple(self._calls))
        members = form.whole_of(said)
        choice = self.heading.choice(members, self._finished, self.logprobs)
        return {**choice, **told} if form.has_prompt_in_choice else choice


@dataclass(slots=True)
class StreamedAnswer:
    """Turns each event of an answer into what is sent of it, in server-sent events.

    The first piece comes with the first token. All that ends the stream goes out at
    once, and the usage, where it is asked for, in a piece of its own without choices.
    """

    heading: Heading
    includes_usage: bool
    counts_along: bool = False
    """Whether each piece says how many tokens there are so far."""
    logprobs: LogprobWriter | None = None
    """None where nobody asks for log probabilities; those of tokens without a piece of their own
    come with the next one."""
    prompt: PromptForm | None = None
    """None where nothing is told of the prompt."""
    tells_timing: bool = False
    """Whether the last event before the end says where the time went."""
    _before: Progress = field(default_factory=Progress)
    _num_prompt_tokens: int = 0
    _num_output_tokens: int = 0
    _finished: ChoiceFinished | None = None
    _head: str = field(init=False)  # what all pieces begin with, written once
    _around: tuple[str, str] | None = None  # the text of a piece that says nothing else

    def __post_init__(self) -> None:
        written = encode(self.heading.head(self.heading.form.chunk))
        self._head = f'data: {written[:-1]},"choices":['

    def send(self, event: GenerationEvent) -> bytes:
        """See ``StreamWriter``."""
        plain = self._plain(event)
        return ("".join(self.parts(event)) if plain is None else plain).encode()

    def parts(self, event: GenerationEvent) -> Iterator[str]:
        """See ``StreamWriter``."""
        plain = self._plain(event)
        if plain is not None:
            yield plain
            return
        match event:
            case Started():
                self._num_prompt_tokens = len(event.prompt_token_ids)
                if self.prompt is not None:
                    self.prompt.begin(event.prompt_token_ids)
            case PromptLogprobs() if self.prompt is not None:
                self.prompt.add(event)
            case Delta() if not _is_left_out(self.prompt):
                self._num_output_tokens = event.position + len(event.token_ids)
                if self.logprobs is not None:
                    self.logprobs.add(event.token_ids, event.logprobs)
                said = event.said
                if any(said) or not self._before.is_begun:
                    yield from self._pieces(said, None)
            case ChoiceFinished():
                self._finished = _ending(event, self.prompt)
            case Summary():
                yield from self.last_piece()
                yield from self.end(event)

    def fail(self, answer: ErrorAnswer) -> Iterable[str]:
        """See ``StreamWriter``."""
        return failed_stream(answer)

    def last_piece(self) -> Iterator[str]:
        """What says why the choice has ended."""
        return self._pieces(Said(), self._finished)

    def end(self, summary: Summary) -> Iterator[str]:
        """What comes behind the last piece."""
        told: dict[str, object] = {}
        if self.includes_usage:
            told["usage"] = usage_content(counted(summary.usage, self.prompt))
        if self.tells_timing:
            told["timing"] = timing_content(summary.timing)
        if told:
            yield f"{self._head}],{encode(told)[1:]}\n\n"
        yield _END

    def _pieces(self, said: Said, finished: ChoiceFinished | None) -> Iterator[str]:
        before = self._before
        if self.prompt is not None and not before.is_begun:
            said = said._replace(text=f"{self.prompt.echoed}{said.text}")
        self._before = Progress(is_begun=True, num_calls=before.num_calls + len(said.tool_calls))
        for members in self.heading.form.pieces_of(said, before):
            yield self._head
            yield from json_parts(self.heading.choice(members, finished, self.logprobs))
            yield f"]{self._count()}}}\n\n"
        if self.logprobs is None and not self.counts_along and not _is_left_out(self.prompt):
            self._around = self._around or self._write_around()

    def _plain(self, event: GenerationEvent) -> str | None:
        """The piece of an event that says nothing but text, once there was one."""
        if self._around is None or not isinstance(event, Delta) or not event.is_plain:
            return None
        before, behind = self._around
        return f"{before}{in_one_line(encode_basestring(event.text))}{behind}"

    def _write_around(self) -> tuple[str, str]:
        (members,) = self.heading.form.pieces_of(_TEXT, self._before)
        choice = encode(self.heading.choice(members, None, None))
        before, _, behind = choice.partition(encode(_TEXT.text))
        return f"{self._head}{before}", f"{behind}]{self._count()}}}\n\n"

    def _count(self) -> str:
        """The usage that a piece with a choice tells, as a further member."""
        if not self.includes_usage:
            return ""
        if not self.counts_along:
            return ',"usage":null'
        so_far = _counts(self._num_prompt_tokens, self._num_output_tokens)
        return f',"usage":{encode(so_far)}'


def _is_left_out(prompt: PromptForm | None) -> bool:
    """Whether the answer's own text is not wanted."""
    return prompt is not None and prompt.wish.is_all


def _ending(finished: ChoiceFinished, prompt: PromptForm | None) -> ChoiceFinished:
    """Why it ended: that of no tokens does not end by the one that was drawn."""
    if not _is_left_out(prompt):
        return finished
    return finished._replace(reason=FinishReason.LENGTH, matched=None)


def counted(usage: Usage, prompt: PromptForm | None) -> Usage:
    """What of it counts: nothing of an answer that is not wanted."""
    return replace(usage, num_output_tokens=0) if _is_left_out(prompt) else usage


def typed_sse(content: Mapping[str, object]) -> Iterator[str]:
    """One server-sent event that is named as its ``type`` is, in parts."""
    yield f"event: {content['type']}\ndata: "
    yield from json_parts(content)
    yield "\n\n"


def failed_stream(answer: ErrorAnswer) -> Iterable[str]:
    """The last events of a stream that broke off."""
    return (f"data: {encode(answer.content)}\n\n", _END)


def usage_content(usage: Usage) -> Mapping[str, object]:
    """The counts under OpenAI's names."""
    return {
        **_counts(usage.num_prompt_tokens, usage.num_output_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def timing_content(timing: Timing) -> Mapping[str, object]:
    """Where the time went, under the names of ``Timing`` in inference.proto; null: no transfer."""
    return {**asdict(timing), "kv_path": timing.kv_path.name.lower()}


def _counts(num_prompt_tokens: int, num_output_tokens: int) -> Mapping[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }
