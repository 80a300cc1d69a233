"""The answers to several prompts as one: the choices of each stand behind those before. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from router.frontend.http.answer_form import counted, failed_stream, usage_content
from router.frontend.http.answer_writer import Answered
from router.frontend.http.asked import Asked
from router.frontend.http.choices_form import ChoicesWriters, StreamedChoices, WholeChoices
from router.frontend.http.errors import ErrorAnswer
from router.frontend.http.merged_events import OfPrompt
from router.generation.answer import Summary, Usage


@dataclass(frozen=True, slots=True)
class WholePrompts:
    """An answer in one piece."""

    parts: Sequence[WholeChoices]
    _usages: list[Usage] = field(default_factory=list)

    @classmethod
    def of(cls, writers: ChoicesWriters, asked: Asked, answered: Answered) -> "WholePrompts":
        """What writes the answers to all prompts of a body."""
        return cls([writers.whole_choices(each, answered, at) for at, each in _numbered(asked)])

    def add(self, of_prompt: OfPrompt) -> None:
        """Take the next event."""
        prompt, event = of_prompt
        self.parts[prompt].add(event)
        if isinstance(event, Summary):
            self._usages.append(event.usage)

    def content(self) -> Mapping[str, object]:
        """The answer, once every event was taken."""
        made = [each.choice() for part in self.parts for each in part.choices]
        first = self.parts[0]
        usage = usage_content(counted(_sum(self._usages), first.choices[0].prompt))
        return {**first.content(), "choices": made, "usage": usage}


@dataclass(frozen=True, slots=True)
class StreamedPrompts:
    """A stream; its usage comes when the last answer has ended."""

    prompts: Sequence[StreamedChoices]
    _usages: list[Usage] = field(default_factory=list)

    @classmethod
    def of(cls, writers: ChoicesWriters, asked: Asked, answered: Answered) -> "StreamedPrompts":
        """What writes the answers to all prompts of a body."""
        return cls([writers.streamed_choices(each, answered, at) for at, each in _numbered(asked)])

    def send(self, of_prompt: OfPrompt) -> bytes:
        """See ``StreamWriter``."""
        return "".join(self.parts(of_prompt)).encode()

    def parts(self, of_prompt: OfPrompt) -> Iterator[str]:
        """See ``StreamWriter``."""
        prompt, event = of_prompt
        if not isinstance(event, Summary):
            yield from self.prompts[prompt].parts(event)
            return
        self._usages.append(event.usage)
        if len(self._usages) == len(self.prompts):
            yield from self.prompts[0].parts(event._replace(usage=_sum(self._usages)))

    def fail(self, answer: ErrorAnswer) -> Iterable[str]:
        """See ``StreamWriter``."""
        return failed_stream(answer)


def _numbered(asked: Asked) -> Iterator[tuple[int, Asked]]:
    """What is asked of each prompt, and the index of its first choice."""
    at = 0
    for each in (asked, *asked.others):
        yield at, each
        at += each.request.sampling.num_choices


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        num_prompt_tokens=sum(each.num_prompt_tokens for each in usages),
        num_output_tokens=sum(each.num_output_tokens for each in usages),
        num_cached_tokens=sum(each.num_cached_tokens for each in usages),
    )
