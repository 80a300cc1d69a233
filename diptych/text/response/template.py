"""What a checkpoint says of its answers' form: Hugging Face's ``response_template``, read once.

It is a chat template's inverse, declared rather than programmed: fields of a message, each
with the marks that open and close it and with how its text is read. Ours, written in the
same form, may say a little more: several forms of one field (a list), ``ignored`` and
``call_marks`` as fields, the contents ``pythonic`` and ``named-json``, ``close_value`` (the
field ends where its value does), ``known_names`` (what calls no tool that was offered is no
call, and a mark that names no such tool is none), ``call_ids`` (what ids of calls have to look
like, see :class:`CallIdForm`), a pattern's group ``id`` (what the model itself calls the call),
``escaped_keys`` (as XML does), a mark's text beside its pattern (the pattern counts; the text
is what a grammar can say), ``between`` (what stands between a field's end and the mark of the
next), and ``calls_begin`` (a text or several: behind it there are calls and nothing else).
"""

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import regex

from diptych.errors import ConfigurationError

_PATH: Final = "tokenizer_config.json: response_template"
_CONTENTS: Final = frozenset(
    {"text", "json", "named-json", "xml-inline", "kv-lines", "pythonic", "int", "float", "bool"}
)
_TOP_KEYS: Final = frozenset(
    {
        "version",
        "defaults",
        "fields",
        "start_anchor",
        "start_anchor_pattern",
        "call_ids",
        "between",
        "calls_begin",
    }
)


class CallIdForm(enum.StrEnum):
    """What a model's chat template shows it of calls' ids."""

    ANY = "any"
    SHORT = "short"  # nine letters and digits, or it refuses them
    NUMBERED = "numbered"  # the function's name and which call of the chat it is


class Part(enum.Enum):
    """What a field's text is to the reader."""

    CONTENT = enum.auto()
    REASONING = enum.auto()
    CALLS = enum.auto()
    NOTHING = enum.auto()
    CALL_MARKS = enum.auto()  # as nothing, and text where no tools are offered


_PARTS: Final = {
    "content": Part.CONTENT,
    "reasoning_content": Part.REASONING,
    "reasoning": Part.REASONING,
    "thinking": Part.REASONING,
    "tool_calls": Part.CALLS,
    "ignored": Part.NOTHING,
    "call_marks": Part.CALL_MARKS,
}


@dataclass(frozen=True, slots=True)
class Anchor:
    """What marks a place in the text.

    ``is_final``: a match at the end of what there is cannot become another with more.
    """

    pattern: "regex.Pattern[str]"
    is_final: bool
    texts: tuple[str, ...] = ()
    """As which it may be written, the usual one first; none: only the pattern says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One form of one part; ``open`` is None for what is outside of all others."""

    part: Part
    open: Anchor | None
    open_again: "regex.Pattern[str] | None"  # what no text between a value's quotes has
    close: Anchor | None
    closes_with_value: bool
    needs_known_name: bool
    content: str
    arguments: Mapping[str, object]
    transform: object
    transforms_each: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTemplate:
    """Immutable. ``marks`` is all text that may mark a place, to look for special tokens in."""

    fields: tuple[Field, ...]
    start: Anchor | None
    call_ids: CallIdForm
    between: str
    calls_begin: tuple[str, ...]
    """The marks behind which there are calls; none: no mark tells them from an answer."""
    marks: str

    @classmethod
    def read(cls, said: object, path: str = _PATH) -> "ResponseTemplate":
        """Check what was declared. Raises ConfigurationError."""
        top = _mapping(said, path)
        if top.get("version", 1) != 1:
            raise ConfigurationError(f"{path}: version {top['version']!r} is not known")
        if unknown := set(top) - _TOP_KEYS:
            raise ConfigurationError(f"{path}: {sorted(unknown)} is not known")
        fields: list[Field] = []
        for name, forms in _mapping(top.get("fields"), f"{path}.fields").items():
            if name not in _PARTS:
                continue  # nobody here asks for it: its text stays content
            at = f"{path}.fields.{name}"
            each = forms if isinstance(forms, list) else [forms]
            fields.extend(_read_field(_PARTS[name], form, at) for form in each)
        calls_begin = _texts(top, "calls_begin", path) or tuple(_marks_of_calls(fields))
        patterns = [
            pattern.pattern.replace("\\", "") for each in fields for pattern in _patterns(each)
        ]
        return cls(
            fields=tuple(fields),
            start=_anchor(top, "start_anchor", path),
            call_ids=_call_ids(top.get("call_ids", CallIdForm.ANY), path),
            between=str(top.get("between", "")),
            calls_begin=calls_begin,
            marks="\n".join((*patterns, *calls_begin)),
        )

    @property
    def has_calls(self) -> bool:
        """Whether it says how a model calls tools."""
        return any(field.part is Part.CALLS for field in self.fields)

    def own_part(self, prompt: str) -> str:
        """Of a prompt's end, what belongs to the answer already."""
        end = None
        if self.start is not None:
            for match in self.start.pattern.finditer(prompt):
                end = match.end()
        return "" if end is None else prompt[end:]


def _call_ids(said: object, path: str) -> CallIdForm:
    try:
        return CallIdForm(str(said))
    except ValueError:
        raise ConfigurationError(f"{path}.call_ids: {said!r} is not known") from None


def _patterns(field: Field) -> "Iterator[regex.Pattern[str]]":
    for anchor in (field.open, field.close):
        if anchor is not None:
            yield anchor.pattern
    within = field.arguments.get("tag_pattern")
    if isinstance(within, regex.Pattern):
        yield within


def _read_field(part: Part, said: object, path: str) -> Field:
    form = _mapping(said, path)
    content = form.get("content", "text")
    if not isinstance(content, str) or content not in _CONTENTS:
        raise ConfigurationError(f"{path}.content: {content!r} is not known")
    open_ = _anchor(form, "open", path)
    return Field(
        part=part,
        open=open_,
        open_again=None if open_ is None else _open_again(open_, form),
        close=_anchor(form, "close", path),
        closes_with_value=bool(form.get("close_value")),
        needs_known_name=bool(form.get("known_names")),
        content=content,
        arguments=_read_arguments(form, f"{path}.content_args"),
        transform=form.get("transform"),
        transforms_each=bool(form.get("transform_each")),
    )


def _open_again(open_: Anchor, form: Mapping[str, object]) -> "regex.Pattern[str]":
    """Where JSON has to follow it is the quote, which between quotes has a backslash before it."""
    if form.get("content") != "json" or form.get("content_args"):
        return open_.pattern
    text = open_.pattern.pattern
    return regex.compile(rf"(?:{text})\s{{0,64}}[\[{{]{{1,2}}\s{{0,64}}\"", regex.DOTALL)


def _read_arguments(form: Mapping[str, object], path: str) -> Mapping[str, object]:
    """Patterns are compiled once."""
    said = dict(_mapping(form.get("content_args", {}), path))
    if form.get("content") == "xml-inline":
        found = _compile(str(said.get("tag_pattern", "")), f"{path}.tag_pattern")
        if not {"key", "value"} <= set(found.groupindex):
            raise ConfigurationError(f"{path}.tag_pattern: has to name a key and a value")
        said["tag_pattern"] = found
    if not _are_pairs(said.get("string_delims") or []):
        raise ConfigurationError(f"{path}.string_delims: should be pairs of texts")
    return said


def _are_pairs(said: object) -> bool:
    """Of what opens and closes a text, each with a character at least."""
    pairs: list[object] = said if isinstance(said, list) else [None]
    return all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(mark, str) and mark for mark in pair)
        for pair in pairs
    )


def _anchor(form: Mapping[str, object], name: str, path: str) -> Anchor | None:
    """Said as a text, as several, or as a pattern."""
    texts, pattern = _texts(form, name, path), form.get(f"{name}_pattern")
    if not texts and pattern is None:
        return None
    if pattern is not None:
        return Anchor(_compile(str(pattern), f"{path}.{name}_pattern"), False, texts)
    longest_first = sorted(texts, key=len, reverse=True)
    is_final = not any(a != b and a.startswith(b) for a in texts for b in texts)
    joined = "|".join(regex.escape(each) for each in longest_first)
    return Anchor(_compile(joined, f"{path}.{name}"), is_final, texts)


def _texts(form: Mapping[str, object], name: str, path: str) -> tuple[str, ...]:
    """Said as one or as a list; none if nothing was said."""
    given = form.get(name)
    if given is None:
        return ()
    said: list[object] = given if isinstance(given, list) else [given]
    texts = tuple(each for each in said if isinstance(each, str) and each)
    if not texts or len(texts) < len(said):
        raise ConfigurationError(f"{path}.{name}: should be a text or a list of texts")
    return texts


def _marks_of_calls(fields: Sequence[Field]) -> Iterator[str]:
    """None where answers have a mark as well."""
    if not any(each.part is Part.CONTENT and each.open is not None for each in fields):
        for each in fields:
            if each.part is Part.CALLS and each.open is not None:
                yield from each.open.texts


def _compile(pattern: str, path: str) -> "regex.Pattern[str]":
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _mapping(said: object, path: str) -> Mapping[str, object]:
    if not isinstance(said, dict):
        raise ConfigurationError(f"{path}: should be an object")
    return said
