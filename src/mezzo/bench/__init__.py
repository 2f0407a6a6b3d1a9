"""What a step costs: the published recipe, a bare doubled forward and mezzo's step, side by side on random weights."""

from mezzo.bench.compare import bench
from mezzo.bench.table import BenchResult, Timing

__all__ = ["BenchResult", "Timing", "bench"]
