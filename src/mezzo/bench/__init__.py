"""What a step costs: the published recipe, a bare doubled forward and mezzo's step, side by side on random weights."""

from mezzo.bench.report import Report, Row
from mezzo.bench.runs import bench

__all__ = ["Report", "Row", "bench"]
