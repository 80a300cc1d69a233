"""What a route writes of an answer: in one piece, or as the events of a stream."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from diptych.sampling_params import SamplingOptions
from diptych.text.token_text import TokenText
from router.frontend.http.asked import Asked
from router.frontend.http.errors import ErrorAnswer
from router.generation.answer import GenerationEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What an answer says of itself, however it is written."""

    request_id: str
    model: str
    created_s: int  # Unix time
    text: TokenText
    """Of the model's tokens."""
    recommended: SamplingOptions
    """What of sampling applies where a request says nothing."""


class WholeWriter(Protocol):
    """Collects the events of one answer."""

    def add(self, event: GenerationEvent) -> None:
        """Take the next event."""
        ...

    def content(self) -> Mapping[str, object]:
        """The answer, once every event was taken."""
        ...


class StreamWriter(Protocol):
    """Turns each event of one answer into what is sent of it, in server-sent events."""

    def send(self, event: GenerationEvent) -> bytes:
        """What to send now; nothing for an event that says nothing alone."""
        ...

    def parts(self, event: GenerationEvent) -> Iterator[str]:
        """The same in parts, for an event that may say much: others have their turn in between.

        To be taken to the end, before the next event is.
        """
        ...

    def fail(self, answer: ErrorAnswer) -> Iterable[str]:
        """The last events of an answer that broke off, in such parts."""
        ...


class AnswerWriters(Protocol):
    """The form of one route's answers."""

    @property
    def operation(self) -> str:
        """As GenAI names it."""
        ...

    @property
    def repeats_all(self) -> bool:
        """Whether a stream's last event says all of the answer again."""
        ...

    def whole(self, asked: Asked, answered: Answered) -> WholeWriter:
        """For one answer."""
        ...

    def stream(self, asked: Asked, answered: Answered) -> StreamWriter:
        """For one answer."""
        ...
