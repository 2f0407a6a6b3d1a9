"""The figures of a comparison, as a table and as JSON."""

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
        said = [self.model, f"batch {self.batch_size}", f"length {self.length}"]
        if self.spread:
            said.append(f"spread {self.spread:g}")
        if self.micro_batch:
            said.append(f"micro-batch {self.micro_batch}")
        said += [f"{self.samples} direction{'s' * (self.samples > 1)}", self.dtype]
        threads = f" ({self.threads} thread{'s' * (self.threads > 1)})" if self.device == "cpu" else ""
        return ", ".join(said) + f", {self.device}{threads}"


@dataclass(frozen=True, slots=True)
class Row:
    """One contender. `ratio` is its time over that of the bare doubled forward beside it, `all_ms` the time of every round."""

    what: str
    ms: float
    iqr: float
    ratio: float
    peak_mib: float
    memory_ratio: float
    all_ms: tuple[float, ...]
    conditions: Conditions

    def to_dict(self) -> dict[str, Any]:
        own = asdict(self)
        return {**own, **own.pop("conditions")}


@dataclass(frozen=True, slots=True)
class Report:
    """All rows, setting by setting."""

    rows: tuple[Row, ...]

    def to_list(self) -> list[dict[str, Any]]:
        return [row.to_dict() for row in self.rows]

    def __str__(self) -> str:
        lines: list[str] = []
        before: Conditions | None = None
        for row in self.rows:
            if row.conditions != before:
                before = row.conditions
                lines += ["", str(before), f"{'':<32}{'ms':>10}{'IQR':>9}{'÷ bare':>9}{'MiB':>10}{'÷ bare':>9}"]
            lines.append(
                f"{row.what:<32}{row.ms:>10.2f}{row.iqr:>9.2f}{row.ratio:>9.2f}{row.peak_mib:>10,.0f}{row.memory_ratio:>9.2f}"
            )
        return "\n".join(lines[1:])
