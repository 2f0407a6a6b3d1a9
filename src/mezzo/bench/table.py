"""The timings of a comparison, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all contenders of one comparison have in common."""

    model: str
    batch_size: int
    length: int
    spread: float
    samples: int
    micro_batch: int | None
    max_length: int
    rank: int
    noise_rank: int
    dtype: str
    device: str
    device_name: str
    threads: int
    rounds: int
    torch: str
    mezzo: str

    def __str__(self) -> str:
        parts = [self.model, f"batch {self.batch_size}", f"length {self.length}"]
        if self.spread:
            parts.append(f"spread {self.spread:g}")
        if self.micro_batch:
            parts.append(f"micro-batch {self.micro_batch}")
        parts += [f"{self.samples} direction{'s' * (self.samples > 1)}", self.dtype]
        threads = f" ({self.threads} thread{'s' * (self.threads > 1)})" if self.device == "cpu" else ""
        return ", ".join(parts) + f", {self.device}{threads}"


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
    conditions: Conditions

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
        conditions: Conditions | None = None
        for t in self.timings:
            if t.conditions != conditions:
                conditions = t.conditions
                lines += ["", str(conditions), f"{'':<32}{'ms':>10}{'IQR':>9}{'÷ bare':>9}{'MiB':>10}{'÷ bare':>9}"]
            lines.append(
                f"{t.what:<32}{t.ms:>10.2f}{t.iqr:>9.2f}{t.ratio:>9.2f}{t.peak_mib:>10,.0f}{t.memory_ratio:>9.2f}"
            )
        return "\n".join(lines[1:])
