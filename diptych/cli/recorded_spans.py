"""Spans as a file of OTLP has them in JSON, one export a line: what a collector's file exporter
writes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from diptych.errors import ConfigurationError

_ERROR = 2  # opentelemetry.proto.trace.v1.Status

Value = str | bool | int | float | list[str]
Tags = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Reference:
    """Another span, and what is said of how it is linked."""

    trace_id: str
    span_id: str
    tags: Tags


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span."""

    name: str
    at_ns: int
    tags: Tags


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSpan:
    """One span. Ids are hexadecimal, times are ns since 1970 by its process's clock."""

    trace_id: str
    span_id: str
    parent_id: str  # "": it has none
    name: str
    service: str
    process_tags: Tags  # of its resource, the service's name among them
    kind: int  # opentelemetry.proto.trace.v1.Span.SpanKind
    start_ns: int
    end_ns: int
    tags: Tags
    events: tuple[SpanEvent, ...]
    links: tuple[Reference, ...]
    error: str | None  # why it failed, perhaps ""; None: it did not


class _Message(BaseModel):
    """A message of OTLP; fields that are not needed are not looked at."""

    model_config = ConfigDict(alias_generator=to_camel, frozen=True)


class _Values(_Message):
    values: list["_AnyValue"] = []


class _AnyValue(_Message):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: int | None = None
    double_value: float | None = None
    array_value: _Values | None = None

    def plain(self) -> Value:
        """As Python has it; in lists as text."""
        if self.array_value is not None:
            return [str(value.plain()) for value in self.array_value.values]
        given = (self.string_value, self.bool_value, self.int_value, self.double_value)
        return next((value for value in given if value is not None), "")


class _KeyValue(_Message):
    key: str
    value: _AnyValue = _AnyValue()


class _Tagged(_Message):
    attributes: list[_KeyValue] = []

    def tags(self) -> Tags:
        """By their names."""
        return {each.key: each.value.plain() for each in self.attributes}


class _Event(_Tagged):
    name: str = ""
    time_unix_nano: int


class _Link(_Tagged):
    trace_id: str
    span_id: str


class _Status(_Message):
    code: int = 0
    message: str = ""


class _Span(_Tagged):
    trace_id: str = Field(pattern="^[0-9a-fA-F]{32}$")
    span_id: str = Field(pattern="^[0-9a-fA-F]{16}$")
    parent_span_id: str = ""
    name: str
    kind: int = 0
    start_time_unix_nano: int
    end_time_unix_nano: int
    events: list[_Event] = []
    links: list[_Link] = []
    status: _Status = _Status()


class _ScopeSpans(_Message):
    spans: list[_Span] = []


class _ResourceSpans(_Message):
    resource: _Tagged = _Tagged()
    scope_spans: list[_ScopeSpans] = []


class _Export(_Message):
    resource_spans: list[_ResourceSpans]


def read_spans(lines: Sequence[str | bytes]) -> list[RecordedSpan]:
    """All spans of a file's lines, in its order.

    Nothing ends the last line: if it is no JSON, after others that are, it is being written.
    Raises ConfigurationError: a line is no export of spans.
    """
    found: list[RecordedSpan] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            export = _Export.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            if found and number == len(lines) and first["type"] == "json_invalid":
                break
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigurationError(f"line {number}: {where}: {first['msg']}") from None
        found += _spans_of(export)
    return found


def _spans_of(export: _Export) -> Iterator[RecordedSpan]:
    for resource in export.resource_spans:
        process_tags = resource.resource.tags()
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _recorded(span, process_tags)


def _recorded(span: _Span, process_tags: Tags) -> RecordedSpan:
    status = span.status
    return RecordedSpan(
        trace_id=span.trace_id.lower(),
        span_id=span.span_id.lower(),
        parent_id=span.parent_span_id.lower(),
        name=span.name,
        service=str(process_tags.get("service.name", "unknown")),
        process_tags=process_tags,
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        tags=span.tags(),
        events=tuple(SpanEvent(e.name, e.time_unix_nano, e.tags()) for e in span.events),
        links=tuple(
            Reference(link.trace_id.lower(), link.span_id.lower(), link.tags())
            for link in span.links
        ),
        error=status.message if status.code == _ERROR else None,
    )
