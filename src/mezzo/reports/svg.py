"""A chart as SVG text: readable inside the page (whose colours it takes) and as a file of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from mezzo.reports.charts import Chart, Series

WIDTH, HEIGHT = 440, 200
LEFT, RIGHT, BOTTOM = 52, 10, 36
COLOURS = ("#2563eb", "#d97706", "#15803d", "#7c3aed", "#6b7280", "#0e7490", "#be123c", "#854d0e")
Scale = Callable[[float], float]


def colour(number: int) -> str:
    """A colour of the page's own scheme, with a fallback where there is no page."""
    place = number % len(COLOURS)
    return f"var(--c{place}, {COLOURS[place]})"


def draw(chart: Chart) -> str:
    """The whole picture; height grows with the rows of the legend."""
    rows = _legend(chart)
    top = 10 + 18 * len(rows)
    xs, ys = _values(chart)
    x_low, x_high = _span(xs, chart.x_label == "step")
    y_ticks = ticks(*_span(ys, chart.from_zero))
    x_ticks = [tick for tick in ticks(x_low, x_high) if x_low <= tick <= x_high]
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def x(value: float) -> float:
        return LEFT + (value - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return top + HEIGHT - (value - y_low) / (y_high - y_low) * HEIGHT

    height = top + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(chart.title)}" font-family="system-ui, sans-serif" font-size="13">'
    ]
    parts += _grid(chart, x_ticks, y_ticks, x, y, height)
    for left, right, share in chart.bars:
        parts.append(
            f'<rect x="{x(left) + 0.5:.1f}" y="{y(share):.1f}" width="{max(0.5, x(right) - x(left) - 1):.1f}" '
            f'height="{max(0.0, y(0) - y(share)):.1f}" fill="{colour(0)}"><title>{_number(left)} to {_number(right)}: '
            f"{share:.1%}</title></rect>"
        )
    for place, name in chart.marks:
        parts.append(
            f'<line x1="{x(place):.1f}" x2="{x(place):.1f}" y1="{top}" y2="{top + HEIGHT}" stroke="currentColor" '
            f'opacity="0.35" stroke-dasharray="2 3"><title>{escape(name)}</title></line>'
        )
    for level in chart.levels:
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(level.y):.1f}" y2="{y(level.y):.1f}" '
            f'stroke="{colour(level.colour)}" stroke-width="1.5" stroke-dasharray="6 4">'
            f"<title>{escape(level.name)} {_shown(chart, level.y)}</title></line>"
        )
    for series in chart.series:
        parts += _line(chart, series, x, y)
    parts += rows
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers that cover low to high."""
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-290):  # one value, as far as a picture can tell
        low, high = low - max(0.1 * abs(low), 1e-280), high + max(0.1 * abs(high), 1e-280)
    raw = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _values(chart: Chart) -> tuple[list[float], list[float]]:
    xs = [value for series in chart.series for value in series.x]
    xs += [edge for left, right, _ in chart.bars for edge in (left, right)]
    ys = [value for s in chart.series for value in (*s.y, *s.low, *s.high)]
    ys += [level.y for level in chart.levels] + [share for _, _, share in chart.bars]
    return xs, ys


def _span(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    low = min(0.0, low) if from_zero else low
    return (low, high) if high - low > 1e-12 * abs(low) else (low, low + max(abs(low), 1.0))


def _grid(
    chart: Chart, x_ticks: Sequence[float], y_ticks: Sequence[float], x: Scale, y: Scale, height: float
) -> Iterator[str]:
    for tick in y_ticks:
        yield (
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="currentColor" '
            f'opacity="0.13"/><text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="currentColor">'
            f"{_shown(chart, tick)}</text>"
        )
    for tick in x_ticks:
        yield (
            f'<text x="{min(x(tick), WIDTH - RIGHT - 10):.1f}" y="{height - BOTTOM + 16:.1f}" text-anchor="middle" '
            f'fill="currentColor">{_number(tick)}</text>'
        )
    yield (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 4}" text-anchor="middle" fill="currentColor" opacity="0.7">'
        f"{escape(chart.x_label)}</text>"
    )


def _line(chart: Chart, series: Series, x: Scale, y: Scale) -> Iterator[str]:
    ink = colour(series.colour)
    places = list(zip(series.x, series.y, strict=True))
    if series.low and len(places) > 1:
        there = [f"{x(a):.1f},{y(b):.1f}" for a, b in zip(series.x, series.high, strict=True)]
        back = [f"{x(a):.1f},{y(b):.1f}" for a, b in zip(series.x, series.low, strict=True)]
        yield f'<polygon points="{" ".join(there + back[::-1])}" fill="{ink}" opacity="0.16"/>'
    elif series.low:
        place, low, high = x(series.x[0]), series.low[0], series.high[0]
        yield (
            f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}" stroke="{ink}" '
            'stroke-width="2"/>'
        )
    points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in places)
    yield f'<polyline points="{points}" fill="none" stroke="{ink}" stroke-width="2" stroke-linejoin="round"/>'
    if series.style == "points":
        for a, b in places:
            yield (
                f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5" fill="{ink}">'
                f"<title>{escape(series.name)}, step {_number(a)}: {_shown(chart, b)}</title></circle>"
            )


def _legend(chart: Chart) -> list[str]:
    """Names beside their colours, in as many rows as they need; one name alone needs no legend."""
    entries = [(s.name, s.colour, "") for s in chart.series] + [(v.name, v.colour, "4 2") for v in chart.levels]
    if len(entries) < 2:
        return []
    rows: list[list[str]] = [[]]
    place = 4.0
    for name, ink, dash in entries:
        shown = name if len(name) <= 30 else name[:29] + "…"
        need = 30 + 7 * len(shown)
        if place + need > WIDTH and rows[-1]:
            rows.append([])
            place = 4.0
        high = 13 + 18 * (len(rows) - 1)
        rows[-1].append(
            f'<line x1="{place}" x2="{place + 16}" y1="{high - 4}" y2="{high - 4}" stroke="{colour(ink)}" stroke-width="3" '
            f'stroke-dasharray="{dash}"/><text x="{place + 20}" y="{high}" fill="currentColor">{escape(shown)}</text>'
        )
        place += need
    return ["".join(row) for row in rows]


def _shown(chart: Chart, value: float) -> str:
    if chart.percent:
        text = f"{100 * value:.1f}".rstrip("0").rstrip(".")
        return f"{text}%"
    return _number(value)


def _number(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
