"""One trace as a tree: each span under its parent, in the order in which they began."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from diptych.cli.recorded_spans import RecordedSpan


class Row(NamedTuple):
    """A span and how deep it lies."""

    span: RecordedSpan
    depth: int


class Trace(NamedTuple):
    """Spans of one trace; a span whose parent is elsewhere, as a client's is, is a root."""

    trace_id: str
    rows: tuple[Row, ...]  # parents before their children

    @property
    def start_ns(self) -> int:
        """The beginning of the first span."""
        return min(row.span.start_ns for row in self.rows)

    @property
    def end_ns(self) -> int:
        """The end of the last span."""
        return max(row.span.end_ns for row in self.rows)


def traces_of(spans: Iterable[RecordedSpan]) -> list[Trace]:
    """The traces that the spans are of, each span once, by when they began."""
    by_trace: dict[str, dict[str, RecordedSpan]] = {}
    for span in spans:
        by_trace.setdefault(span.trace_id, {})[span.span_id] = span
    traces = [
        Trace(trace_id, tuple(_rows(_ordered(own.values())))) for trace_id, own in by_trace.items()
    ]
    return sorted(traces, key=lambda trace: trace.start_ns)


def _ordered(spans: Iterable[RecordedSpan]) -> list[RecordedSpan]:
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


def _rows(spans: Sequence[RecordedSpan]) -> Iterator[Row]:
    known = {span.span_id for span in spans}
    children: dict[str, list[RecordedSpan]] = {}
    for span in spans:
        above = span.parent_id if span.parent_id in known else ""
        children.setdefault(above, []).append(span)
    tops = children.pop("", [])
    while tops or children:  # the roots, then spans that are above themselves
        left = [Row(span, 0) for span in reversed(tops or children.popitem()[1])]
        tops = []
        while left:
            row = left.pop()
            yield row
            below = children.pop(row.span.span_id, [])
            left += [Row(span, row.depth + 1) for span in reversed(below)]
