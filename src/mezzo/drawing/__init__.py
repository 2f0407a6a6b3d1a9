"""Drawing charts: as SVG, by matplotlib, or as text. It knows nothing of runs."""

from mezzo.drawing.chart import Baseline, Chart, Series, drawable
from mezzo.drawing.svg import render_svg

__all__ = ["Baseline", "Chart", "Series", "drawable", "render_svg"]
