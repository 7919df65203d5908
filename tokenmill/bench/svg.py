"""Draws line charts as inline SVG, in the colours of the page that they stand in."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

WIDTH, HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 28, 40
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """`points`: (x, y) in ascending x. `steps`: hold y until the next point."""

    name: str
    points: Sequence[tuple[float, float]]
    steps: bool = False


def line_chart(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """An SVG element. The axes begin at 0."""
    right = _nice(max((x for line in lines for x, _ in line.points), default=1.0))
    top = _nice(max((y for line in lines for _, y in line.points), default=1.0))
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>',
        *_grid(right, top),
        f'<text class="label" x="{(_LEFT + WIDTH) / 2}" y="{HEIGHT - 6}">{escape(x_label)}</text>',
        f'<text class="label" transform="rotate(-90 12 {HEIGHT / 2})" x="12" y="{HEIGHT / 2}">'
        f"{escape(y_label)}</text>",
    ]
    for number, line in enumerate(lines):
        place = " ".join(f"{_x(x, right):.1f},{_y(y, top):.1f}" for x, y in _corners(line))
        parts.append(f'<polyline class="line{number}" points="{place}"/>')
        if len(lines) > 1:
            x = WIDTH - _RIGHT - 130 * (len(lines) - number)
            parts.append(f'<rect class="key{number}" x="{x}" y="8" width="10" height="10"/>')
            parts.append(f'<text x="{x + 14}" y="17">{escape(line.name)}</text>')
    return "".join([*parts, "</svg>"])


def _corners(line: Line) -> list[tuple[float, float]]:
    if not line.steps:
        return list(line.points)
    corners: list[tuple[float, float]] = []
    for x, y in line.points:
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    return corners


def _grid(right: float, top: float) -> list[str]:
    parts = []
    for number in range(_TICKS + 1):
        x, y = right * number / _TICKS, top * number / _TICKS
        across, up = _x(x, right), _y(y, top)
        parts += [
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{up:.1f}" y2="{up:.1f}"/>',
            f'<text class="tick-y" x="{_LEFT - 6}" y="{up + 4:.1f}">{y:g}</text>',
            f'<text class="tick-x" x="{across:.1f}" y="{HEIGHT - _BOTTOM + 16}">{x:g}</text>',
        ]
    return parts


def _x(value: float, right: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * value / right


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / top


def _nice(value: float) -> float:
    """The least end of an axis whose five ticks are short numbers."""
    if value <= 0:
        return 1.0
    unit = 10 ** floor(log10(value))
    return float(next(unit * step for step in (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10) if unit * step >= value))
