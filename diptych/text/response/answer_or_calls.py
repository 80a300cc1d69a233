"""An answer of a given form, or calls of tools in its place: which of them it is. Pure."""

from collections.abc import Sequence

from diptych.text.response.parser import Parsed, ResponseParser


class AnswerOrCalls:
    """The state of one answer whose grammar lets calls come in its place. One owner.

    An answer stays as it is, to the last space; what calls have before them is nobody's.
    """

    def __init__(self, marks: Sequence[str], calls: ResponseParser) -> None:
        """Any of the ``marks`` begins calls, which are ``calls``'s to read."""
        self._marks = marks
        self._calls = calls
        self._space: list[str] = []  # what it begins with, in the pieces in which it came
        self._begun = ""  # behind that; no longer than a mark
        self._is_calls: bool | None = None  # None: it may still be either

    def feed(self, text: str) -> Parsed:
        """Add what the model said."""
        if self._is_calls is None:
            text = self._decided(text)
        if self._is_calls is None:
            return Parsed()
        return self._calls.feed(text) if self._is_calls else Parsed(text)

    def finish(self, *, is_whole: bool) -> Parsed:
        """The rest. ``is_whole``: the model ended it."""
        if self._is_calls:
            return self._calls.finish(is_whole=is_whole)
        return Parsed(self._kept())

    def _decided(self, text: str) -> str:
        """All that came, without what stands before calls, once it is known what it is."""
        if self._begun:
            begun = self._begun + text
        else:
            begun = text.lstrip(" \n")
            self._space.append(text[: len(text) - len(begun)])
        self._begun = begun
        if any(map(begun.startswith, self._marks)):
            self._is_calls, self._space = True, []
        elif not any(mark.startswith(begun) for mark in self._marks):
            self._is_calls = False
        return "" if self._is_calls is None else self._kept()

    def _kept(self) -> str:
        kept = "".join([*self._space, self._begun])
        self._space, self._begun = [], ""
        return kept
