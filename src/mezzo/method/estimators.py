"""Ask for probes, tell their losses, get slopes. An estimator never touches a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mezzo.errors import ConfigError
from mezzo.method.noise import step_seed
from mezzo.method.objectives import Losses
from mezzo.types import Probe, Slope


class Estimator(Protocol):
    """What a method needs of an estimator."""

    @property
    def pair_spread(self) -> float | None:
        """The distance of the two probes where a step is one ± pair, which a device can evaluate by itself; else None."""
        ...

    def ask(self, step: int) -> tuple[Probe, ...]:
        """The probes of a step, a function of its number alone."""
        ...

    def tell(self, probes: Sequence[Probe], losses: Losses) -> tuple[Slope, ...]:
        """The slopes that follow from the losses at the probes."""
        ...


@dataclass(frozen=True, slots=True)
class Spsa:
    """Simultaneous perturbation: two probes per direction, θ+εz and θ−εz, `samples` directions a step."""

    seed: int
    eps: float
    samples: int = 1

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ConfigError(f"eps must be positive, not {self.eps}")
        if self.samples < 1:
            raise ConfigError(f"samples must be at least 1, not {self.samples}")

    @property
    def pair_spread(self) -> float | None:
        return 2 * self.eps if self.samples == 1 else None

    def ask(self, step: int) -> tuple[Probe, ...]:
        seeds = [step_seed(self.seed, step, sample) for sample in range(self.samples)]
        return tuple(Probe(((seed, sign * self.eps),)) for seed in seeds for sign in (1, -1))

    def tell(self, probes: Sequence[Probe], losses: Losses) -> tuple[Slope, ...]:
        pairs = zip(probes[::2], losses[::2], losses[1::2], strict=True)
        return tuple(Slope(plus.terms[0][0], (float(up) - float(down)) / (2 * self.eps)) for plus, up, down in pairs)
