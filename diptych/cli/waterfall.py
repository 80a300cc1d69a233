"""A picture of one trace: a line for each span, its bar where it lay in time. SVG."""

import re
from collections.abc import Iterator
from xml.sax.saxutils import escape

from diptych.cli.trace_tree import Row, Trace

_NAMES_WIDTH, _BARS_WIDTH, _LENGTHS_WIDTH = 330, 560, 90
_ROW_HEIGHT, _HEAD_HEIGHT, _INDENT = 20, 46, 14
_COLOURS = ("#3b6fb6", "#c8553d", "#4f9d69", "#8f6bb3", "#b58900", "#5c6b73")
_ERROR_COLOUR = "#c00000"
_NUM_TICKS = 5
_NOT_IN_XML = re.compile(r"[^\t\n\r -\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


def waterfall(trace: Trace) -> str:
    """The SVG document."""
    width = _NAMES_WIDTH + _BARS_WIDTH + _LENGTHS_WIDTH
    height = _HEAD_HEIGHT + _ROW_HEIGHT * len(trace.rows) + 10
    services = list(dict.fromkeys(row.span.service for row in trace.rows))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(services)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(colours),
        *_axis(trace, height),
    ]
    for index, row in enumerate(trace.rows):
        lines += _row(trace, row, _HEAD_HEIGHT + index * _ROW_HEIGHT, colours[row.span.service])
    return "\n".join([*lines, "</svg>", ""])


def _legend(colours: dict[str, str]) -> Iterator[str]:
    for index, (name, colour) in enumerate(colours.items()):
        left = 10 + 150 * index
        yield f'<rect x="{left}" y="8" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{left + 15}" y="17">{_text(name)}</text>'


def _axis(trace: Trace, height: int) -> Iterator[str]:
    for tick in range(_NUM_TICKS):
        share = tick / (_NUM_TICKS - 1)
        left = _NAMES_WIDTH + share * _BARS_WIDTH
        length = _length_text(round(share * (trace.end_ns - trace.start_ns)))
        yield f'<path d="M{left:.1f} 40V{height - 8}" stroke="#dddddd"/>'
        yield f'<text x="{left:.1f}" y="36" fill="#666666" text-anchor="middle">{length}</text>'


def _row(trace: Trace, row: Row, top: int, colour: str) -> Iterator[str]:
    span = row.span
    whole_ns = max(1, trace.end_ns - trace.start_ns)
    left = _NAMES_WIDTH + (span.start_ns - trace.start_ns) / whole_ns * _BARS_WIDTH
    width = max(1.5, (span.end_ns - span.start_ns) / whole_ns * _BARS_WIDTH)
    name = span.name if span.error is None else f"{span.name}: {span.error or 'failed'}"
    fill = "#222222" if span.error is None else _ERROR_COLOUR
    length = _length_text(span.end_ns - span.start_ns)
    yield (
        f'<text x="{10 + row.depth * _INDENT}" y="{top + 14}" fill="{fill}">{_text(name)}</text>'
    )
    yield (
        f'<rect x="{left:.1f}" y="{top + 4}" width="{width:.1f}" height="{_ROW_HEIGHT - 8}" '
        f'rx="2" fill="{colour}"/>'
    )
    yield (
        f'<text x="{_NAMES_WIDTH + _BARS_WIDTH + 12}" y="{top + 14}" fill="#666666">{length}</text>'
    )


def _text(name: str) -> str:
    return escape(_NOT_IN_XML.sub("?", name))


def _length_text(length_ns: int) -> str:
    if length_ns >= 10**9:
        return f"{length_ns / 1e9:.2f} s"
    return f"{length_ns / 1e6:.2f} ms"
