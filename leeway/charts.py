"""Small charts as inline SVG: no script, no external host. Colours come from the page's CSS (`.s0` to `.s5`), so dark mode follows."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 620, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 30


class Series(NamedTuple):
    """Points (x, y); those without a finite y are left out. `faint`: raw data behind a smoothed line; `dots`: mark each point."""

    name: str
    points: Sequence[tuple[float, float | None]]
    faint: bool = False
    dots: bool = False
    colour: int | None = None


def number(value: float | None, digits: int = 3) -> str:
    """A number for people: 12,345 or 0.0123 or an en dash."""
    if value is None or not math.isfinite(value):
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover [low, high]: steps of 1, 2 or 5 times a power of ten."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of them lie (nearest rank); None of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def smooth(points: Sequence[tuple[float, float | None]], window: int) -> list[tuple[float, float | None]]:
    """Mean of the last `window` values at each point."""
    finite = _finite(points)
    values = [y for _, y in finite]
    return [(x, sum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1)) for i, (x, _) in enumerate(finite)]


def lines(
    series: Sequence[Series],
    *,
    x_label: str,
    zero: bool = False,
    bounds: tuple[float, float] | None = None,
    rule: tuple[float, str] | None = None,
    log: bool = False,
) -> str:
    """A line chart. `zero` starts the y axis at 0, `bounds` fixes it; `rule` draws a labelled horizontal line; `log`: powers of ten, and
    what is not above 0 is left out."""
    if log:
        series = [s._replace(points=[(x, math.log10(y)) for x, y in _finite(s.points) if y > 0]) for s in series]
    drawn = [(i if s.colour is None else s.colour, s, _finite(s.points)) for i, s in enumerate(series)]
    points = [p for _, _, finite in drawn for p in finite]
    if not points:
        return '<p class="none">no data</p>'
    ys = [y for _, y in points] + ([rule[0]] if rule else []) + ([0.0] if zero else [])
    y_ticks = ticks(*(bounds or (min(ys), max(ys))))
    x_ticks = ticks(min(x for x, _ in points), max(x for x, _ in points), 8)
    x_low, x_high = min(x for x, _ in points), max(max(x for x, _ in points), min(x for x, _ in points) + 1)

    def sx(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def sy(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    out = _y_axis(y_ticks, sy, (lambda power: f"{10.0**power:.0e}") if log else number)
    out += [
        f'<text class="tick" x="{sx(t):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number(t)}</text>'
        for t in x_ticks
        if x_low <= t <= x_high
    ]
    out.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{escape(x_label)}</text>')
    if rule:
        out.append(
            f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{sy(rule[0]):.1f}" y2="{sy(rule[0]):.1f}"/>'
            f'<text class="tick" x="{WIDTH - RIGHT}" y="{sy(rule[0]) - 4:.1f}" text-anchor="end">{escape(rule[1])}</text>'
        )
    for colour, one, finite in drawn:
        path = " ".join(f"{sx(x):.1f},{sy(y):.1f}" for x, y in finite)
        out.append(f'<polyline class="line s{colour}{" faint" if one.faint else ""}" points="{path}"/>')
        if one.dots or len(finite) == 1:
            out += [
                f'<circle class="dot s{colour}" cx="{sx(x):.1f}" cy="{sy(y):.1f}" r="3.5"><title>{escape(one.name)} at {number(x)}: '
                f"{number(10**y if log else y)}</title></circle>"
                for x, y in finite
            ]
    return _svg(out, HEIGHT) + legend([(s.name, c) for c, s, _ in drawn if not s.faint])


def columns(values: Sequence[tuple[str, float]], *, x_label: str, colour: int = 0, unit: str = "") -> str:
    """A column chart with the value above each column."""
    if not values:
        return '<p class="none">no data</p>'
    y_ticks = ticks(0.0, max(max(v for _, v in values), 1e-9))
    slot = (WIDTH - LEFT - RIGHT) / len(values)
    width = min(64.0, slot * 0.7)

    def sy(y: float) -> float:
        return HEIGHT - BOTTOM - y / y_ticks[-1] * (HEIGHT - TOP - BOTTOM - 10)

    out = _y_axis(y_ticks, sy)
    out.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{escape(x_label)}</text>')
    for i, (name, value) in enumerate(values):
        middle = LEFT + slot * (i + 0.5)
        out.append(
            f'<rect class="bar s{colour}" x="{middle - width / 2:.1f}" y="{sy(value):.1f}" width="{width:.1f}" '
            f'height="{HEIGHT - BOTTOM - sy(value):.1f}" rx="2"><title>{escape(name)}: {number(value)} {escape(unit)}</title></rect>'
            f'<text class="tick" x="{middle:.1f}" y="{sy(value) - 4:.1f}" text-anchor="middle">{number(value)}</text>'
            f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>'
        )
    return _svg(out, HEIGHT)


def share_bar(parts: Sequence[tuple[str, float, int]], unit: str) -> str:
    """One horizontal bar split into (name, value, colour), with a legend that gives value and share."""
    parts = [p for p in parts if p[1] > 0]
    total = sum(value for _, value, _ in parts)
    if total <= 0:
        return '<p class="none">no data</p>'
    out, x = [], 0.0
    for name, value, colour in parts:
        width = value / total * WIDTH
        out.append(
            f'<rect class="bar s{colour}" x="{x:.1f}" y="0" width="{max(width - 1, 0.5):.1f}" height="26">'
            f"<title>{escape(name)}: {number(value)} {escape(unit)}</title></rect>"
        )
        x += width
    return _svg(out, 26) + legend([(f"{name} {number(value)} {unit} ({value / total:.1%})", colour) for name, value, colour in parts])


def legend(entries: Sequence[tuple[str, int]]) -> str:
    return '<p class="legend">' + "".join(f'<span><i class="s{colour}"></i>{escape(name)}</span>' for name, colour in entries) + "</p>"


def _finite(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _y_axis(y_ticks: Sequence[float], sy: Callable[[float], float], label: Callable[[float], str] = number) -> list[str]:
    return [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{sy(t):.1f}" y2="{sy(t):.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{sy(t) + 4:.1f}" text-anchor="end">{label(t)}</text>'
        for t in y_ticks
    ]


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'
