"""Thoughts before an answer that is held to a form: where they may be, and an answer taken apart.

Pure. Which marks there are says the template of a model's answers; only those that are plain
texts can be written into a grammar.
"""

import enum
from collections.abc import Mapping
from typing import Protocol

from diptych.errors import InvalidRequestError
from diptych.text.mark import Mark
from diptych.text.response.parser import Parsed, ResponseParser, joined
from diptych.text.response.spacing import Spacing
from diptych.text.response.template import Field, Part, ResponseTemplate
from diptych.text.thought_form import ThoughtForm


class AnswerParser(Protocol):
    """Takes one answer's text apart."""

    def feed(self, text: str) -> Parsed:
        """More text; what it made certain."""

    def finish(self, *, is_whole: bool) -> Parsed:
        """The rest; ``is_whole``: the model ended it."""


def thoughts_before(
    template: ResponseTemplate, chat_template: str, prompt: str, tokens: Mapping[str, int]
) -> ThoughtForm | None:
    """The thoughts that may come at an answer's begin; None: there are none to be expected.

    ``prompt`` is its end. A model thinks if its own chat template knows the marks, or if the
    prompt has begun to; it does not where the prompt has said otherwise. ``tokens`` are
    those that are never written otherwise, by their texts.

    Raises:
        InvalidRequestError: nothing tells a grammar where they end.
    """
    begun = ResponseParser(template, prompt).opened
    if begun is not None and begun.part is Part.REASONING:
        if begun.close is None or not begun.close.texts:
            raise InvalidRequestError(
                "this model's thoughts, which the prompt begins, end with no mark that is a text: "
                "no answer can be held to a form behind them",
                field="sampling.constraint",
            )
        return _form(template, None, begun.close.texts[0], tokens)
    if template.own_part(prompt).strip():
        return None
    for field in template.fields:
        marks = _plain_marks(field)
        if marks is not None and any(mark.strip() in chat_template for mark in marks):
            return _form(template, *marks, tokens)
    return None


def _plain_marks(field: Field) -> tuple[str, str] | None:
    if field.part is not Part.REASONING or field.open is None or field.close is None:
        return None
    if not field.open.texts or not field.close.texts:
        return None
    return field.open.texts[0], field.close.texts[0]


def _form(
    template: ResponseTemplate, open_: str | None, close: str, tokens: Mapping[str, int]
) -> ThoughtForm:
    opens = (each.open for each in template.fields if each.part is Part.CONTENT)
    lead = next((each.texts[0] for each in opens if each is not None and each.texts), "")
    return ThoughtForm(
        open=None if open_ is None else Mark.of(open_, tokens),
        close=Mark.of(close, tokens),
        lead=Mark.of(f"{template.between}{lead}" if lead else "", tokens),
        own_lead=Mark.of(lead, tokens),
    )


class _Stage(enum.Enum):
    BEGIN = enum.auto()  # it may be either
    THOUGHTS = enum.auto()
    BETWEEN = enum.auto()
    ANSWER = enum.auto()


class ThoughtSplit:
    """The state of one answer that its grammar let begin with thoughts. One owner.

    What the grammar admits is all that it understands: the answer behind them stays as it
    is, to the last space, or goes to ``answer``, which takes it further apart.
    """

    def __init__(self, form: ThoughtForm, answer: AnswerParser | None = None) -> None:
        self._form = form
        self._answer = answer
        self._stage = _Stage.THOUGHTS if form.open is None else _Stage.BEGIN
        self._buffer = ""
        self._reasoning = Spacing()
        self._reasoning.cut()

    def feed(self, text: str) -> Parsed:
        """Add what the model said."""
        self._buffer += text
        parts: list[Parsed] = []
        while self._buffer:
            before = self._stage
            parts.append(self._step())
            if self._stage is before:
                break
        return joined(parts)

    def finish(self, *, is_whole: bool) -> Parsed:
        """The rest. ``is_whole``: the model ended it."""
        parts: list[Parsed] = []
        if self._stage is _Stage.BEGIN and not self._form.own_lead:
            self._stage = _Stage.ANSWER  # it only began like a mark
            parts.append(self._step())
        elif self._stage is _Stage.THOUGHTS:
            parts.append(Parsed(reasoning=self._reasoning.add(self._buffer)))
        if self._answer is not None:
            parts.append(self._answer.finish(is_whole=is_whole))
        return joined(parts)

    def _step(self) -> Parsed:
        match self._stage:
            case _Stage.BEGIN:
                return self._begin()
            case _Stage.THOUGHTS:
                return self._think()
            case _Stage.BETWEEN:
                return self._pass_lead()
        text, self._buffer = self._buffer, ""
        return Parsed(text) if self._answer is None else self._answer.feed(text)

    def _begin(self) -> Parsed:
        opened, lead = self._form.open, self._form.own_lead.text
        assert opened is not None
        if self._buffer.startswith(opened.text):
            self._buffer = self._buffer.removeprefix(opened.text)
            self._stage = _Stage.THOUGHTS
        elif not opened.text.startswith(self._buffer) and not (
            len(self._buffer) < len(lead) and lead.startswith(self._buffer)
        ):
            self._buffer = self._buffer.removeprefix(lead)
            self._stage = _Stage.ANSWER
        return Parsed()

    def _think(self) -> Parsed:
        text, mark = self._buffer, self._form.close.text
        end = text.find(mark)
        if end < 0:
            safe = len(text) - _num_begun(text, mark)
            self._buffer = text[safe:]
            return Parsed(reasoning=self._reasoning.add(text[:safe]))
        self._buffer = text[end + len(mark) :]
        self._stage = _Stage.BETWEEN
        said = self._reasoning.add(text[:end])
        self._reasoning.cut()
        return Parsed(reasoning=said)

    def _pass_lead(self) -> Parsed:
        lead = self._form.lead.text
        if lead:
            if len(self._buffer) >= len(lead):
                self._buffer = self._buffer.removeprefix(lead)
                self._stage = _Stage.ANSWER
            return Parsed()
        if self._form.has_gap:
            self._buffer = self._buffer.lstrip(" \n")
        if self._buffer:
            self._stage = _Stage.ANSWER
        return Parsed()


def _num_begun(text: str, mark: str) -> int:
    """How many characters at the end of ``text`` may be the begin of ``mark``."""
    most = min(len(text), len(mark) - 1)
    return next((n for n in range(most, 0, -1) if mark.startswith(text[-n:])), 0)
