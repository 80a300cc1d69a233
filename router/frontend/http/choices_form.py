"""The choices of one prompt as one answer: each is written as if it were alone. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from router.frontend.http.answer_form import (
    Form,
    Heading,
    StreamedAnswer,
    WholeAnswer,
    failed_stream,
)
from router.frontend.http.answer_writer import Answered, StreamWriter, WholeWriter
from router.frontend.http.asked import Asked
from router.frontend.http.errors import ErrorAnswer
from router.frontend.http.logprob_form import CompletionLogprobs, LogprobWriter
from router.frontend.http.prompt_form import PromptForm
from router.generation.answer import ChoiceFinished, Delta, GenerationEvent, Summary


class _Told(NamedTuple):
    """What one choice is written with."""

    heading: Heading
    logprobs: LogprobWriter | None
    prompt: PromptForm | None


@dataclass(frozen=True, slots=True)
class WholeChoices:
    """An answer in one piece; each choice has a heading with its own index."""

    choices: Sequence[WholeAnswer]

    def add(self, event: GenerationEvent) -> None:
        """Take the next event."""
        match event:
            case Delta() | ChoiceFinished():
                self.choices[event.choice].add(event)
            case Summary():
                for each in self.choices:
                    each.add(event)
            case _:
                self.choices[0].add(event)

    def content(self) -> Mapping[str, object]:
        """The answer, once every event was taken."""
        made = [each.choice() for each in self.choices]
        return {**self.choices[0].content(), "choices": made}


@dataclass(frozen=True, slots=True)
class StreamedChoices:
    """A stream; a choice's last piece comes when it ends, whatever the others do."""

    choices: Sequence[StreamedAnswer]

    def send(self, event: GenerationEvent) -> bytes:
        """See ``StreamWriter``."""
        return "".join(self.parts(event)).encode()

    def parts(self, event: GenerationEvent) -> Iterator[str]:
        """See ``StreamWriter``."""
        match event:
            case Delta():
                yield from self.choices[event.choice].parts(event)
            case ChoiceFinished():
                ended = self.choices[event.choice]
                yield from ended.parts(event)
                yield from ended.last_piece()
            case Summary():
                yield from self.choices[0].end(event)
            case _:
                yield from self.choices[0].parts(event)

    def fail(self, answer: ErrorAnswer) -> Iterable[str]:
        """See ``StreamWriter``."""
        return failed_stream(answer)


@dataclass(frozen=True, slots=True)
class ChoicesWriters:
    """Implements ``AnswerWriters`` for one of the kinds of answers that have choices."""

    form: Form
    repeats_all: ClassVar = False

    @property
    def operation(self) -> str:
        return self.form.operation

    def whole(self, asked: Asked, answered: Answered) -> WholeWriter:
        made = self.whole_choices(asked, answered)
        return made.choices[0] if len(made.choices) == 1 else made

    def stream(self, asked: Asked, answered: Answered) -> StreamWriter:
        made = self.streamed_choices(asked, answered)
        return made.choices[0] if len(made.choices) == 1 else made

    def whole_choices(self, asked: Asked, answered: Answered, first: int = 0) -> WholeChoices:
        """What writes the choices of one prompt, the first of which has that index."""
        return WholeChoices(
            [
                WholeAnswer(*told, tells_timing=asked.tells_timing)
                for told in self._told(asked, answered, first)
            ]
        )

    def streamed_choices(self, asked: Asked, answered: Answered, first: int = 0) -> StreamedChoices:
        """The same for a stream."""
        parts = [
            StreamedAnswer(
                told.heading,
                asked.includes_usage,
                asked.counts_along,
                told.logprobs,
                told.prompt,
                tells_timing=asked.tells_timing,
            )
            for told in self._told(asked, answered, first)
        ]
        return StreamedChoices(parts)

    def _told(self, asked: Asked, answered: Answered, first: int) -> Iterator[_Told]:
        """Of each choice; the first one tells of the prompt."""
        sampling = asked.request.sampling
        for index in range(sampling.num_choices):
            logprobs = prompt = None
            if sampling.logprobs is not None:
                logprobs = self.form.logprobs_of(answered.text)
            if asked.prompt is not None and index == 0:
                echoed = logprobs if isinstance(logprobs, CompletionLogprobs) else None
                prompt = PromptForm(asked.prompt, answered.text, echoed)
            heading = Heading(
                form=self.form,
                request_id=answered.request_id,
                model=answered.model,
                created_s=answered.created_s,
                index=first + index,
                stop_token_ids=frozenset(sampling.stop_token_ids),
            )
            yield _Told(heading, logprobs, prompt)
