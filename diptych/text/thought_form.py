"""What a model may think before an answer of a given form: plain data, and a grammar. Pure.

A constraint is of the answer alone. Its grammar becomes part of a larger one, in which free text
up to the mark that ends thoughts comes first: so the state of both is made again from the
output's tokens, wherever it goes on.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from diptych.text.joined_grammars import GAP, with_answer
from diptych.text.mark import Mark, quoted

_ANSWER: Final = "answer"


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
            f"spelled[suffix={quoted(self.close.text)}]: /(?s:.*)/",
        ]
        lines += ["FREE: /(?s:.+)/"] * is_token + [f"GAP: {GAP}"] * bool(gap)
        return with_answer("\n".join(lines), answer, _ANSWER)
