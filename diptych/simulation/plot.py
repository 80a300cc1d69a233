"""A picture of several series over one axis. SVG, pure."""

from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 900, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 30, 45
_COLOURS = ("#3b6fb6", "#c8553d", "#4f9d69", "#8f6bb3", "#b58900", "#5c6b73", "#1a1a1a", "#d17fb0")
_ROW_HEIGHT = 18
_NUM_TICKS = 6

Series = Mapping[str, Sequence[tuple[float, float]]]


def line_chart(series: Series, *, title: str, across: str, up: str) -> str:
    """The SVG document; both axes begin at 0."""
    points = [point for line in series.values() for point in line]
    most_x = max((x for x, _ in points), default=0.0) or 1.0
    most_y = max((y for _, y in points), default=0.0) or 1.0
    height = _HEIGHT + _ROW_HEIGHT * len(series)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">{escape(title)}</text>',
        *_axes(most_x, most_y, across, up),
    ]
    for index, (name, line) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(f"{_x(x / most_x):.1f},{_y(y / most_y):.1f}" for x, y in line)
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        )
        top = _HEIGHT + _ROW_HEIGHT * index
        lines.append(f'<rect x="{_LEFT}" y="{top - 9}" width="14" height="4" fill="{colour}"/>')
        lines.append(f'<text x="{_LEFT + 22}" y="{top}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _axes(most_x: float, most_y: float, across: str, up: str) -> Iterator[str]:
    for tick in range(_NUM_TICKS):
        share = tick / (_NUM_TICKS - 1)
        x, y = _x(share), _y(share)
        yield f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd"/>'
        yield (
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" fill="#666666" text-anchor="end">'
            f"{share * most_y:.3g}</text>"
        )
        yield (
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" fill="#666666" '
            f'text-anchor="middle">{share * most_x:.4g}</text>'
        )
    for name, y in ((across, _HEIGHT - 12), (up, 18)):
        yield f'<text x="{_WIDTH - _RIGHT}" y="{y}" text-anchor="end">{escape(name)}</text>'
