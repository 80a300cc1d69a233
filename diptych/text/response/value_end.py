"""Where a value ends that comes in pieces: brackets and quotes are counted. Pure."""

from typing import Final

import regex

from diptych.text.response.template import Field

_JSON: Final = regex.compile(r'\\.|["{}\[\]]', regex.DOTALL)
_PYTHON: Final = regex.compile(r"\\.|[\"'{}\[\]()]", regex.DOTALL)
_OPENING: Final = frozenset("{[(")


class ValueEnd:
    """Follows one value through a text that grows; each character is looked at once."""

    def __init__(self, field: Field, begin: int) -> None:
        """The value's text begins at ``begin``, perhaps behind white space."""
        self._begin = self._at = begin
        self._depth = 0
        self._quote = ""  # what ends the text that it is in
        self._quotes = {'"': '"'}
        self._marks = _JSON
        self._longest = 2  # characters of a mark
        if field.content == "pythonic":
            self._quotes = {'"': '"', "'": "'"}
            self._marks = _PYTHON
        elif field.content not in ("json", "named-json"):
            self._quotes = {}
        pairs = field.arguments.get("string_delims")
        if isinstance(pairs, list) and pairs:
            self._quotes = {str(opening): str(closing) for opening, closing in pairs}
            texts = {text for pair in self._quotes.items() for text in pair}
            joined = "|".join(regex.escape(text) for text in sorted(texts, key=len, reverse=True))
            self._marks = regex.compile(rf"{joined}|[{{}}\[\]]")
            self._longest = max(map(len, texts))

    def is_within_text(self, buffer: str, at: int) -> bool:
        """Whether ``at`` is between a value's quotes. Not before where it stands."""
        self._advance(buffer, at, stops=False)
        return bool(self._quote)

    def find(self, buffer: str) -> int | None:
        """Where the value has ended; None: not yet. A value that is no list nor object: at once."""
        begun = buffer[self._begin :].lstrip() if self._at == self._begin else "{"
        if begun and begun[0] not in _OPENING:
            return self._begin
        return self._advance(buffer, len(buffer), stops=True)

    def _advance(self, buffer: str, end: int, *, stops: bool) -> int | None:
        while self._at < end:
            match = self._marks.search(buffer, self._at, end)
            if match is None:  # but the end may be half of a mark
                self._at = max(self._at, end - self._longest + 1)
                return None
            self._at = match.end()
            mark = match[0]
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in self._quotes:
                self._quote = self._quotes[mark]
            elif mark in "{[(":
                self._depth += 1
            elif mark in "}])":
                self._depth -= 1
                if stops and self._depth <= 0:
                    return self._at
        return None
