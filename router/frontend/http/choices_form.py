"""Several choices of one prompt as one answer: each is written as if it were alone. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.frontend.http.answer_form import StreamedAnswer, WholeAnswer
from router.generation.answer import ChoiceFinished, Delta, GenerationEvent, Summary


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
        """What to send now; nothing for an event that says nothing alone."""
        match event:
            case Delta():
                return self.choices[event.choice].send(event)
            case ChoiceFinished():
                ended = self.choices[event.choice]
                return ended.send(event) + ended.last_piece()
            case Summary():
                return self.choices[0].end(event)
        return self.choices[0].send(event)
