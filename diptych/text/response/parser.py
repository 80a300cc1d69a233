"""An answer's text, piece by piece, into content, reasoning and calls of tools. Pure.

Invariants: however a text is cut into pieces, the same comes out. Nothing that a model
says raises, and what cannot be read as its template says comes out as content. A call
comes out whole, once its end has come: of one that was cut off no client hears. The work that
an answer makes is bounded, see :class:`Patience`: behind what takes longer all is content.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import regex

from diptych.text.response.argument_types import ToolSchemas
from diptych.text.response.body import ParsedCall, read_body
from diptych.text.response.patience import Patience
from diptych.text.response.spacing import Spacing
from diptych.text.response.template import Anchor, Field, Part, ResponseTemplate
from diptych.text.response.value_end import ValueEnd

logger = logging.getLogger(__name__)

_PIECE: Final = 1024  # characters that are looked through at once: each mark does so again
_FAR: Final = 65_536  # characters behind an end within quotes that are likely no quotes
_CONTEXT: Final = 256  # characters that stay, for patterns that look behind
_TIDY_AT: Final = 8192  # characters that are done with


class Parsed(NamedTuple):
    """What a piece made certain."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()


@dataclass(slots=True)
class _Open:
    """A field that has begun. Of calls nothing is taken before their end."""

    field: Field
    captures: dict[str, str]
    begin: int  # of its mark
    body: int  # behind its mark
    value: ValueEnd
    passed: "_Found | None" = None  # the first end of it that stands between quotes
    passed_to: int = 0  # behind that end no other of its kind begins before here


class _Found(NamedTuple):
    """A mark: where it is, and what it opens; None: it closes."""

    begin: int
    end: int
    field: Field | None
    captures: dict[str, str]


_OF_CALLS: Final = (Part.CALLS, Part.CALL_MARKS)
_NOTHING: Final = (Part.NOTHING, Part.CALL_MARKS)


class ResponseParser:
    """The state of one answer. One owner."""

    def __init__(
        self,
        template: ResponseTemplate,
        prompt: str = "",
        tools: ToolSchemas | None = None,
        patience: Patience | None = None,
    ) -> None:
        """``prompt`` is its end: an answer may begin within a field. Without ``tools`` no
        call is looked for, nor what stands beside calls."""
        self._tools = tools or {}
        left_out = _OF_CALLS if tools is None else ()
        fields = [each for each in template.fields if each.part not in left_out]
        self._outside = list(_marks_outside(fields))
        self._patience = patience or Patience()
        self._content, self._reasoning = Spacing(), Spacing()
        self._reasoning.cut()
        self._buffer = ""
        self._at = 0  # what is before is done with
        self._look_at = 0  # no mark ends before it
        self._open: _Open | None = None
        self._has_given_up = False
        begun = template.own_part(prompt)
        if begun:
            self.feed(begun)
            self._process(is_end=True)  # what it begins with is certain
            self._forget(begun)

    @property
    def opened(self) -> Field | None:
        """What comes next belongs to it; None: it is outside of all fields."""
        return None if self._open is None else self._open.field

    def feed(self, text: str) -> Parsed:
        """Add what the model said."""
        parts: list[Parsed] = []
        for begin in range(0, len(text), _PIECE):
            self._patience.begin_piece()
            buffer, self._buffer = self._buffer, ""
            buffer += text[begin : begin + _PIECE]  # in place: nobody else has it
            self._buffer = buffer
            parts += self._process(is_end=False)
            self._patience.end_piece()
        return joined(parts)

    def finish(self, *, is_whole: bool) -> Parsed:
        """The rest. ``is_whole``: the model ended it; else it was cut off, and so was a call
        whose end did not come: it is left out."""
        self._patience.begin_piece()
        parts = self._process(is_end=True)
        end = len(self._buffer)
        if self._open is not None and self._open.field.part is Part.CALLS:
            try:
                parts.append(self._close_calls(end, end, is_whole=is_whole))
            except TimeoutError:
                parts.append(self._take(end))
        parts.append(Parsed(self._content.end()))
        return joined(parts)

    def _process(self, *, is_end: bool) -> list[Parsed]:
        parts: list[Parsed] = []
        try:
            while not self._has_given_up:
                found, safe = self._next_mark(is_end=is_end)
                if found is None:
                    parts.append(self._take(safe))
                    break
                parts.append(self._pass(found))
        except TimeoutError:  # in what was made to be slow
            self._has_given_up, self._open = True, None
        if self._has_given_up:
            parts.append(self._take(len(self._buffer)))
        self._tidy()
        return parts

    def _next_mark(self, *, is_end: bool) -> tuple[_Found | None, int]:
        """The first mark that is certain, or how far it is certain that there is none."""
        opened = self._open
        if opened is None:
            return self._search(self._outside, is_end)
        if opened.field.closes_with_value:
            end = opened.value.find(self._buffer)
            at = opened.begin if end is None else end
            return (None, at) if end is None else (_Found(end, end, None, {}), at)
        closes: list[tuple[Field | None, Anchor]] = []
        if opened.field.close is not None:
            closes.append((None, opened.field.close))
        while True:
            found, safe = self._search(closes, is_end)
            if opened.field.part is not Part.CALLS:
                return found, safe
            if found is not None and opened.value.is_within_text(self._buffer, found.begin):
                opened.passed = opened.passed or found
                opened.passed_to = opened.passed_to or found.end
                self._look_at = found.begin + 1
                continue
            if self._has_lost_quotes(opened, safe if found is None else found.begin):
                return opened.passed, safe
            is_lost = is_end and opened.value.is_within_text(self._buffer, len(self._buffer))
            return opened.passed if found is None and is_lost else found, safe

    def _has_lost_quotes(self, opened: _Open, end: int) -> bool:
        """Whether an end between quotes was one: what is before ``end`` begins another call, or
        is too much."""
        passed, begins = opened.passed, opened.field.open_again
        if passed is None or begins is None:
            return False
        if end - passed.end > _FAR:
            return True
        match = begins.search(
            self._buffer, opened.passed_to, end, partial=True, timeout=self._patience.left_s()
        )
        opened.passed_to = max(opened.passed_to, end if match is None else match.start())
        return match is not None and not match.partial

    def _search(
        self, anchors: Iterable[tuple[Field | None, Anchor]], is_end: bool
    ) -> tuple[_Found | None, int]:
        """The earliest match, of those the longest, unless one that began before may yet come."""
        best: _Found | None = None
        safe = len(self._buffer)
        for field, anchor in anchors:
            match = self._match(field, anchor, is_end)
            if match is None:
                continue
            if not is_end and (match.partial or self._can_grow(match, anchor)):
                safe = min(safe, match.start())
                continue
            captures = {name: text for name, text in match.groupdict().items() if text is not None}
            found = _Found(match.start(), match.end(), field, captures)
            if best is None or (found.begin, -found.end) < (best.begin, -best.end):
                best = found
        if best is not None and best.begin < safe:
            return best, safe
        self._look_at = max(self._look_at, safe)
        return None, safe

    def _match(
        self, field: Field | None, anchor: Anchor, is_end: bool
    ) -> "regex.Match[str] | None":
        """The first place that may be such a mark. One that names no tool is none, if it has to."""
        at = self._look_at
        while True:
            match = anchor.pattern.search(
                self._buffer, at, partial=not is_end, timeout=self._patience.left_s()
            )
            if match is None or match.partial or field is None or not field.needs_known_name:
                return match
            name = match.groupdict().get("name")
            if name is None or name in self._tools:
                return match
            at = match.start() + 1

    def _can_grow(self, match: "regex.Match[str]", anchor: Anchor) -> bool:
        return match.end() == len(self._buffer) and not anchor.is_final

    def _pass(self, found: _Found) -> Parsed:
        """Go on behind a mark."""
        opened = self._open
        if opened is not None and opened.field.part is Part.CALLS:
            return self._close_calls(found.begin, found.end, is_whole=True)
        before = self._take(found.begin)
        self._at = self._look_at = found.end
        if found.field is None:
            self._open = None
            if opened is None or opened.begin == found.end:  # nothing was passed: not here again
                self._look_at += 1
            if opened is not None and opened.field.part is Part.REASONING:
                self._reasoning.cut()
            return before
        self._content.cut()
        value = ValueEnd(found.field, found.end)
        self._open = _Open(found.field, found.captures, found.begin, found.end, value)
        if found.field.part is Part.CALLS:
            self._at = found.begin  # they are content again if they cannot be read
        elif found.field.part in _NOTHING and found.field.close is None:
            self._open = None  # the mark was all
        return before

    def _take(self, end: int) -> Parsed:
        """Give out what is before ``end``, as what it is."""
        opened = self._open
        if opened is not None and opened.field.part is Part.CALLS:
            return Parsed()
        text, self._at = self._buffer[self._at : end], max(self._at, end)
        if opened is None or opened.field.part is Part.CONTENT:
            return Parsed(self._content.add(text)) if text else Parsed()
        if opened.field.part is Part.REASONING:
            return Parsed(reasoning=self._reasoning.add(text)) if text else Parsed()
        return Parsed()

    def _close_calls(self, body_end: int, end: int, *, is_whole: bool) -> Parsed:
        opened = self._open
        assert opened is not None
        self._open = None
        body = self._buffer[opened.body : body_end]
        calls: tuple[ParsedCall, ...] | None = None
        if is_whole:
            calls = self._read(opened, body)
        elif _is_begun_call(opened, body):
            calls = ()  # half a call is nothing to read
        if calls is None:
            self._look_at = max(end, opened.begin + 1)
            return self._take(end)
        self._at = self._look_at = end
        self._content.cut()
        return Parsed(calls=calls)

    def _read(self, opened: _Open, body: str) -> tuple[ParsedCall, ...] | None:
        """The calls that ``body`` says; None: it says something else.

        Raises TimeoutError: nothing more is read.
        """
        self._patience.left_s()
        try:
            return read_body(opened.field, body, opened.captures, self._tools, self._patience)
        except (ValueError, RecursionError):
            return None
        except TimeoutError:
            raise
        except Exception:
            logger.exception("what a model wrote as a call could not be read")
            return None

    def _forget(self, begun: str) -> None:
        """What came so far was the prompt's; of more than white space the answer goes on."""
        self._buffer = begun if begun.strip() else ""
        self._at = self._look_at = end = len(self._buffer)
        if self._open is not None:
            opened = self._open
            self._open = _Open(opened.field, opened.captures, end, end, ValueEnd(opened.field, end))

    def _tidy(self) -> None:
        """Let go of what is done with; the last of it stays, so that nothing looks like a begin."""
        done = self._at - _CONTEXT
        if done < _TIDY_AT or (self._open is not None and self._open.field.part is Part.CALLS):
            return
        self._buffer = self._buffer[done:]
        self._at -= done
        self._look_at = max(0, self._look_at - done)


def _is_begun_call(opened: _Open, body: str) -> bool:
    """Whether what was cut off is a call's begin, rather than text that looks like one."""
    field, begin = opened.field, body.lstrip()[:1]
    if opened.body == opened.begin or (field.needs_known_name and "name" not in opened.captures):
        return False  # without a mark of its own it may be anything
    return field.content != "json" or begin in ("", "{", "[")


def _marks_outside(fields: list[Field]) -> Iterator[tuple[Field | None, Anchor]]:
    """What to look for outside of all fields; what closes those is taken out and no more."""
    for each in fields:
        if each.open is not None:
            yield each, each.open
        elif each.close is not None:
            yield None, each.close


def joined(parts: list[Parsed]) -> Parsed:
    """All of it as one."""
    if len(parts) == 1:
        return parts[0]
    return Parsed(
        "".join(each.content for each in parts),
        "".join(each.reasoning for each in parts),
        tuple(call for each in parts for call in each.calls),
    )
