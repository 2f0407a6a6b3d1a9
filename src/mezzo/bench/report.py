"""The figures of a comparison, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One contender in one setting. `ratio` is its time over that of the bare doubled forward beside it."""

    what: str
    ms: float
    iqr: float
    ratio: float
    peak_mib: float
    memory_ratio: float
    model: str
    batch_size: int
    length: int
    samples: int
    dtype: str
    device: str
    threads: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Report:
    """All rows, setting by setting."""

    rows: tuple[Row, ...]

    def to_list(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        lines: list[str] = []
        setting = ""
        for row in self.rows:
            shown = (
                f"{row.model}, batch {row.batch_size}, length {row.length}, {row.samples} direction"
                f"{'s' * (row.samples > 1)}, {row.dtype}, {row.device}"
                + (f" ({row.threads} thread{'s' * (row.threads > 1)})" if row.device == "cpu" else "")
            )
            if shown != setting:
                lines += ["", shown, f"{'':<32}{'ms':>10}{'IQR':>9}{'÷ bare':>9}{'MiB':>10}{'÷ bare':>9}"]
                setting = shown
            lines.append(
                f"{row.what:<32}{row.ms:>10.2f}{row.iqr:>9.2f}{row.ratio:>9.2f}{row.peak_mib:>10,.0f}{row.memory_ratio:>9.2f}"
            )
        return "\n".join(lines[1:])
