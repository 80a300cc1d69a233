"""What an output has to be: as a client says it, and as workers get it. Plain data."""

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass

from diptych.errors import InvalidRequestError
from diptych.v1 import common_pb2, inference_pb2

MAX_CONSTRAINT_CHARACTERS = 65_536
MAX_GRAMMAR_BYTES = 512 * 2**10
"""Of what a constraint became, with thoughts and calls around it."""
MAX_CHOICES = 1024


class ConstraintKind(enum.StrEnum):
    """How it is said; the names are those of the public message."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that a client wants. ``texts`` has one item, or all that may be chosen from."""

    kind: ConstraintKind
    texts: tuple[str, ...]

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, object]) -> "Constraint":
        """JSON that fits a schema, given as text or as what that text says."""
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        return cls(ConstraintKind.JSON_SCHEMA, (text,))

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        """A text that matches as a whole."""
        return cls(ConstraintKind.REGEX, (pattern,))

    @classmethod
    def grammar(cls, text: str) -> "Constraint":
        """A text of a context-free language, in Lark's syntax or as GBNF."""
        return cls(ConstraintKind.GRAMMAR, (text,))

    @classmethod
    def choice(cls, *texts: str) -> "Constraint":
        """One of these."""
        return cls(ConstraintKind.CHOICE, texts)

    @classmethod
    def from_proto(cls, message: inference_pb2.Constraint, path: str) -> "Constraint":
        """Read what a client sent. Raises InvalidRequestError: it says nothing, or too much."""
        kind = message.WhichOneof("kind")
        if kind is None:
            members = ", ".join(each.value for each in ConstraintKind)
            raise InvalidRequestError(f"give one of {members}", field=path)
        if kind == "choice":
            _check_num_choices(len(message.choice.texts), f"{path}.choice.texts")
            return cls.choice(*message.choice.texts)
        return cls(ConstraintKind(kind), (getattr(message, kind),))

    def to_proto(self) -> inference_pb2.Constraint:
        """As a client sends it."""
        if self.kind is ConstraintKind.CHOICE:
            return inference_pb2.Constraint(choice=inference_pb2.Choices(texts=self.texts))
        message = inference_pb2.Constraint()
        setattr(message, self.kind.value, self.texts[0])
        return message

    def check(self, path: str) -> None:
        """Check sizes alone. Raises InvalidRequestError."""
        path = f"{path}.{self.kind.value}"
        if self.kind is ConstraintKind.CHOICE:
            path = f"{path}.texts"
            _check_num_choices(len(self.texts), path)
        for index, text in enumerate(self.texts):
            if not text:
                at = f"{path}[{index}]" if self.kind is ConstraintKind.CHOICE else path
                raise InvalidRequestError("is empty", field=at)
        num_characters = sum(map(len, self.texts))
        if num_characters > MAX_CONSTRAINT_CHARACTERS:
            raise InvalidRequestError(
                f"has {num_characters} characters, more than {MAX_CONSTRAINT_CHARACTERS}",
                field=path,
            )


def _check_num_choices(count: int, path: str) -> None:
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidRequestError(f"must have 1 to {MAX_CHOICES} items, has {count}", field=path)


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """A constraint that was found good, as workers get it; see its message in common.proto."""

    text: str
    end_token_ids: frozenset[int]

    @classmethod
    def from_proto(cls, message: common_pb2.OutputGrammar) -> "OutputGrammar":
        """Read what the router sent."""
        return cls(message.text, frozenset(message.end_token_ids))

    def to_proto(self) -> common_pb2.OutputGrammar:
        """As it goes to the workers."""
        ends = sorted(self.end_token_ids)
        return common_pb2.OutputGrammar(text=self.text, end_token_ids=ends)
