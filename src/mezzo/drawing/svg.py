"""Charts as SVG, for use inside a page (with its colours) and as files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from mezzo.drawing.chart import Chart, Series

WIDTH, HEIGHT = 440, 200
LEFT, RIGHT, BOTTOM = 52, 10, 36
COLOURS = ("#2563eb", "#d97706", "#15803d", "#7c3aed", "#6b7280", "#0e7490", "#be123c", "#854d0e")


@dataclass(frozen=True)
class _Axes:
    """From values to places in the picture; `top` is the upper edge of the plot area."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    top: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.top + HEIGHT - (value - self.y_low) / (self.y_high - self.y_low) * HEIGHT

    def points(self, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
        return [f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in zip(xs, ys, strict=True)]


def colour(number: int) -> str:
    """A colour of the page's scheme, with a fallback where there is no page."""
    index = number % len(COLOURS)
    return f"var(--c{index}, {COLOURS[index]})"


def render_svg(chart: Chart) -> str:
    """The complete picture; its height grows with the rows of the legend."""
    legend = _legend(chart)
    top = 10 + 18 * len(legend)
    x_low, x_high = _span([*chart.xs()], not chart.bars)
    y_ticks = ticks(*_span([*chart.ys()], chart.from_zero))
    x_ticks = [tick for tick in ticks(x_low, x_high) if x_low <= tick <= x_high]
    axes = _Axes(x_low, x_high, y_ticks[0], y_ticks[-1], top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + HEIGHT + BOTTOM}" role="img" '
        f'aria-label="{escape(chart.title)}" font-family="system-ui, sans-serif" font-size="13">',
        *_grid(chart, x_ticks, y_ticks, axes),
        *_bars(chart, axes),
        *_straight_lines(chart, axes),
        *(part for series in chart.series for part in _curve(chart, series, axes)),
        *legend,
        "</svg>",
    ]
    return "".join(parts)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` steps of round numbers that cover low to high."""
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-290):  # too close together to tell apart in a picture
        low, high = low - max(0.1 * abs(low), 1e-280), high + max(0.1 * abs(high), 1e-280)
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _span(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    low = min(0.0, low) if from_zero else low
    return (low, high) if high - low > 1e-12 * abs(low) else (low, low + max(abs(low), 1.0))


def _grid(chart: Chart, x_ticks: Sequence[float], y_ticks: Sequence[float], axes: _Axes) -> Iterator[str]:
    bottom = axes.top + HEIGHT
    for tick in y_ticks:
        y = axes.y(tick)
        yield _line(LEFT, WIDTH - RIGHT, y, y, 'stroke="currentColor" opacity="0.13"')
        yield _text(LEFT - 6, y + 4, format_y(chart, tick), 'text-anchor="end"')
    for tick in x_ticks:
        x = min(axes.x(tick), WIDTH - RIGHT - 10)
        yield _text(x, bottom + 16, format_count(tick), 'text-anchor="middle"')
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield _text(middle, bottom + BOTTOM - 4, chart.x_label, 'text-anchor="middle" opacity="0.7"')


def _bars(chart: Chart, axes: _Axes) -> Iterator[str]:
    for left, right, share in chart.bars:
        x, y, width = axes.x(left), axes.y(share), axes.x(right) - axes.x(left)
        yield (
            f'<rect x="{x + 0.5:.1f}" y="{y:.1f}" width="{max(0.5, width - 1):.1f}" '
            f'height="{max(0.0, axes.y(0) - y):.1f}" fill="{colour(0)}">'
            f"<title>{_format_number(left)} to {_format_number(right)}: {share:.1%}</title></rect>"
        )


def _straight_lines(chart: Chart, axes: _Axes) -> Iterator[str]:
    if chart.best is not None:
        x, style = axes.x(chart.best), 'stroke="currentColor" opacity="0.35" stroke-dasharray="2 3"'
        yield _line(x, x, axes.top, axes.top + HEIGHT, style, f"best: {_place(chart, chart.best)}")
    for baseline in chart.baselines:
        y = axes.y(baseline.y)
        style = f'stroke="{colour(baseline.colour)}" stroke-width="1.5" stroke-dasharray="6 4"'
        yield _line(LEFT, WIDTH - RIGHT, y, y, style, f"{baseline.name} {format_y(chart, baseline.y)}")


def _curve(chart: Chart, series: Series, axes: _Axes) -> Iterator[str]:
    stroke = colour(series.colour)
    name = escape(series.name)
    yield f'<g class="series" data-series="{name}"><title>{name}</title>'
    if series.low and len(series.x) > 1:
        outline = axes.points(series.x, series.high) + axes.points(series.x, series.low)[::-1]
        yield f'<polygon points="{" ".join(outline)}" fill="{stroke}" opacity="0.16"/>'
    elif series.low:
        x, low, high = axes.x(series.x[0]), axes.y(series.low[0]), axes.y(series.high[0])
        yield _line(x, x, low, high, f'stroke="{stroke}" stroke-width="2"')
    points = " ".join(axes.points(series.x, series.y))
    yield f'<polyline points="{points}" fill="none" stroke="{stroke}" stroke-width="2" stroke-linejoin="round"/>'
    fill = stroke if series.markers else "none"
    for x, y in zip(series.x, series.y, strict=True) if series.markers or series.hidden_markers else ():
        yield (
            f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3.5" fill="{fill}">'
            f"<title>{name}, {_place(chart, x)}: {format_y(chart, y)}</title></circle>"
        )
    yield "</g>"


def _legend(chart: Chart) -> list[str]:
    """Names beside their colours, in as many rows as needed; a single name needs no legend."""
    entries = list(dict.fromkeys((series.group or series.name, series.colour, "") for series in chart.series))
    entries += [(baseline.name, baseline.colour, "4 2") for baseline in chart.baselines]
    if len(entries) < 2:
        return []
    rows, x = [""], 4.0
    for name, number, dashes in entries:
        label = name if len(name) <= 30 else name[:29] + "…"
        width = 30 + 7 * len(label)
        if x + width > WIDTH and rows[-1]:
            rows.append("")
            x = 4.0
        y = 13 + 18 * (len(rows) - 1)
        style = f'stroke="{colour(number)}" stroke-width="3" stroke-dasharray="{dashes}"'
        rows[-1] += _line(x, x + 16, y - 4, y - 4, style) + _text(x + 20, y, label)
        x += width
    return rows


def _line(x1: float, x2: float, y1: float, y2: float, style: str, title: str = "") -> str:
    content = f"<title>{escape(title)}</title>" if title else ""
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" {style}>{content}</line>'


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="currentColor" {style}>{escape(text)}</text>'


def format_y(chart: Chart, value: float) -> str:
    if chart.percent:
        return f"{100 * value:.1f}".rstrip("0").rstrip(".") + "%"
    return _format_number(value)


def _place(chart: Chart, x: float) -> str:
    return f"{chart.x_label} {format_count(x)}"


def format_count(value: float) -> str:
    """Thousands as k and millions as M: a tick has little room."""
    if 1e4 <= abs(value) < 1e9:
        return f"{value / 1e6:.4g}M" if abs(value) >= 1e6 else f"{value / 1e3:.4g}k"
    return _format_number(value)


def _format_number(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
