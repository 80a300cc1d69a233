"""Marks in a model's output, and how a grammar says them. Pure."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class MarkPart(NamedTuple):
    """A text, and the one token that it is, if the tokenizer has one for it."""

    text: str
    token_id: int | None = None


class Mark(tuple[MarkPart, ...]):
    """A mark as a model writes it; may be empty."""

    __slots__ = ()

    @classmethod
    def of(cls, text: str, added_tokens: Mapping[str, int]) -> "Mark":
        """``added_tokens``: texts that are never anything but these tokens, and their ids."""
        longest_first = sorted(filter(None, added_tokens), key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
        pieces = re.split(f"({pattern})", text)
        return cls(MarkPart(piece, added_tokens.get(piece)) for piece in pieces if piece)

    @classmethod
    def from_plain(cls, said: Iterable[Sequence[Any]]) -> "Mark":
        """As JSON carries it: it is plain already."""
        return cls(MarkPart(*part) for part in said)

    @property
    def text(self) -> str:
        """As it reads."""
        return "".join(part.text for part in self)

    def in_lark(self, *, has_tokens: bool) -> str:
        """As a sequence of a grammar; without tokens all of it is text."""
        if not has_tokens:
            return quoted(self.text) if self else ""
        each = (
            quoted(part.text) if part.token_id is None else f"<[{part.token_id}]>" for part in self
        )
        return " ".join(each)


def quoted(text: str) -> str:
    """A text as a grammar has it."""
    return json.dumps(text, ensure_ascii=False)
