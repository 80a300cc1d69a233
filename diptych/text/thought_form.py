"""What a model may think before an answer of a given form: plain data, and a grammar. Pure.

A constraint is of the answer alone. Its grammar becomes part of a larger one, in which free text
up to the mark that ends thoughts comes first: so the state of both is made again from the
output's tokens, wherever it goes on.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

# Between a mark and an answer; models write line breaks there.
_GAP: Final = r"/[ \n]{1,8}/"
_ANSWER: Final = "answer"


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
            return _quoted(self.text) if self else ""
        each = (
            _quoted(part.text) if part.token_id is None else f"<[{part.token_id}]>" for part in self
        )
        return " ".join(each)


_NONE: Final = Mark()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtForm:
    """How thoughts begin and end, and an answer begins."""

    open: Mark | None
    """None: the prompt has begun them, and the answer comes behind their end."""
    close: Mark
    lead: Mark = _NONE
    """What an answer begins with that comes behind thoughts."""
    own_lead: Mark = _NONE
    """And one that comes without."""
    has_gap: bool = True
    """Whether white space between them belongs to neither; where an answer may begin with such,
    it is the answer's."""

    @classmethod
    def from_plain(cls, said: Mapping[str, Any]) -> "ThoughtForm":
        """What ``to_plain`` made."""
        marks = {
            name: None if said[name] is None else Mark.from_plain(said[name])
            for name in ("open", "close", "lead", "own_lead")
        }
        return cls(**marks, has_gap=bool(said["has_gap"]))  # type: ignore[arg-type]

    def to_plain(self) -> dict[str, Any]:
        """As JSON carries it."""
        return asdict(self)

    def before(self, answer: str, *, has_tokens: bool) -> str:
        """The grammar of thoughts and then an ``answer``, which is one of llguidance's.

        Without tokens it is over bytes: there marks are their text. With them a mark that is
        a token is that token; spelled out by others it ends thoughts, too, as who reads the
        text takes it for the mark.
        """
        gap = "GAP?" if self.has_gap and not self.lead else ""
        lead, own_lead = (
            mark.in_lark(has_tokens=has_tokens) for mark in (self.lead, self.own_lead)
        )
        behind = f"thoughts {gap} {lead}"
        start = f"{behind} @{_ANSWER}"
        if self.open is not None:
            opened = self.open.in_lark(has_tokens=has_tokens)
            without = f"| {own_lead})" if own_lead else ")?"
            start = f"({opened} {behind} {without} @{_ANSWER}"
        closing = self.close.in_lark(has_tokens=has_tokens)
        is_token = has_tokens and any(part.token_id is not None for part in self.close)
        lines = [
            f"start: {start}",
            f"thoughts: spelled | FREE? {closing}" if is_token else "thoughts: spelled",
            f"spelled[suffix={_quoted(self.close.text)}]: /(?s:.*)/",
        ]
        lines += ["FREE: /(?s:.+)/"] * is_token + [f"GAP: {_GAP}"] * bool(gap)
        return with_parts("\n".join(lines), answer, _ANSWER)


def with_parts(lark: str, answer: str, name: str) -> str:
    """A grammar that refers to an ``answer``, another one of llguidance's, by its ``name``."""
    first, others = {"lark_grammar": answer}, []
    if answer.startswith("{"):
        first, *others = json.loads(answer)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**first, "name": name}, *others]})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
