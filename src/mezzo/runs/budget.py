"""How much a run may spend: example-forwards, or time."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mezzo.errors import ConfigError

MULTIPLES = {"": 1.0, "k": 1e3, "m": 1e6}
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Budget:
    """Example-forwards are forward passes times the examples in each: the unit in which methods can be compared."""

    forwards: float = math.inf
    seconds: float = math.inf


def parse_budget(text: str | None) -> Budget:
    """`250000`, `250k` and `2.5M` are example-forwards; `90s`, `10min` and `1h` are time."""
    if text is None:
        return Budget()
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?([a-z]*)", text.strip().lower())
    number, unit = (float(match[1]), match[2]) if match else (0.0, "?")
    if number <= 0 or unit not in (*MULTIPLES, *SECONDS):
        raise ConfigError(
            f"budget must be example-forwards, such as 250k, or time, such as 90s, 10min or 1h, not {text!r}"
        )
    return Budget(forwards=number * MULTIPLES[unit]) if unit in MULTIPLES else Budget(seconds=number * SECONDS[unit])
