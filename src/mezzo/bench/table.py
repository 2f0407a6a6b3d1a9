"""The timings of a comparison, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Timing:
    """One contender. Both ratios are relative to the bare doubled forward of the same comparison."""

    what: str
    ms: float
    """Median milliseconds per step."""
    iqr: float
    ratio: float
    peak_mib: float
    memory_ratio: float
    all_ms: tuple[float, ...]
    """Milliseconds per step of every round."""
    conditions: Mapping[str, Any]
    """What all contenders of one comparison have in common: model, sizes, device and versions."""

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        return {**fields, **fields.pop("conditions")}


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All timings, comparison by comparison."""

    timings: tuple[Timing, ...]

    def to_list(self) -> list[dict[str, Any]]:
        return [timing.to_dict() for timing in self.timings]

    def __str__(self) -> str:
        lines: list[str] = []
        conditions: Mapping[str, Any] = {}
        for t in self.timings:
            if t.conditions != conditions:
                conditions = t.conditions
                lines += ["", _title(conditions), f"{'':<32}{'ms':>10}{'IQR':>9}{'÷ bare':>9}{'MiB':>10}{'÷ bare':>9}"]
            lines.append(
                f"{t.what:<32}{t.ms:>10.2f}{t.iqr:>9.2f}{t.ratio:>9.2f}{t.peak_mib:>10,.0f}{t.memory_ratio:>9.2f}"
            )
        return "\n".join(lines[1:])


def _title(conditions: Mapping[str, Any]) -> str:
    """What distinguishes a comparison, in one line."""
    parts = [conditions["model"], f"batch {conditions['batch_size']}", f"length {conditions['length']}"]
    if conditions["spread"]:
        parts.append(f"spread {conditions['spread']:g}")
    if conditions["micro_batch"]:
        parts.append(f"micro-batch {conditions['micro_batch']}")
    samples, threads, device = (conditions[key] for key in ("samples", "threads", "device"))
    device += f" ({threads} thread{'s' * (threads > 1)})" if device == "cpu" else ""
    return ", ".join([*parts, f"{samples} direction{'s' * (samples > 1)}", conditions["dtype"], device])
