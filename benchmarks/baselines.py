"""Published zeroth-order methods, on the package's protocols: what `methods.py` compares the package's own method with.

Each is an estimator or an optimizer of a few lines. Where a rule differs from the published one, its docstring says so.

ZO-Muon ("Powering Up Zeroth-Order Training via Subspace Gradient Orthogonalization") is not among them: it orthogonalises the
estimate of each matrix, and the result is no sum of (seed, coefficient) terms, which is all that a journal holds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mezzo.method.batches import make_batches
from mezzo.method.estimators import Estimator, Spsa
from mezzo.method.method import EstimatorMethod
from mezzo.method.noise import step_seed
from mezzo.method.objectives import Losses
from mezzo.method.optimizers import Optimizer, Schedule, Sgd, schedule
from mezzo.runs.setup import Setup
from mezzo.types import PairRule, Probe, Slope, StepRecord, Update


@dataclass(frozen=True, slots=True)
class Fzoo:
    """FZOO (Dang et al., arXiv 2506.09034): one-sided differences along `samples` ±1 directions, over the standard deviation of
    their losses. With `Sgd`, θ ← θ − lr · mean((lᵢ − l₀) / σ · zᵢ); a factor of ε is left to the learning rate."""

    seed: int
    eps: float
    samples: int = 8

    pair_spread = None

    def ask(self, step: int) -> tuple[Probe, ...]:
        seeds = [step_seed(self.seed, step, sample) for sample in range(self.samples)]
        return Probe(), *(Probe(((seed, self.eps),)) for seed in seeds)

    def tell(self, probes: Sequence[Probe], losses: Losses) -> tuple[Slope, ...]:
        spread = float(losses[1:].std(ddof=1)) or math.inf  # equal losses say nothing
        pairs = zip(probes[1:], losses[1:], strict=True)
        return tuple(Slope(probe.terms[0][0], float(loss - losses[0]) / spread) for probe, loss in pairs)


@dataclass
class Meazo:
    """MEAZO (Dbouk et al., arXiv 2605.03869): the slope over the root of a moving average of its square.

    The decay of the average is our choice: the sources at hand do not state the published one."""

    lr: Schedule
    decay: float = 0.99
    _square: float = field(init=False, default=0.0)
    _count: int = field(init=False, default=0)

    def update(self, slopes: Sequence[Slope], step: int) -> Update:
        square, count = self._include(slope.value for slope in slopes)
        root = math.sqrt(square / (1 - self.decay**count)) + 1e-8
        return Sgd(lambda step: self.lr(step) / root).update(slopes, step)

    def pair_rule(self, step: int, spread: float) -> PairRule | None:
        return None

    def observe(self, record: StepRecord) -> None:
        if not record.skipped:
            self._square, self._count = self._include(record.slopes)

    def _include(self, slopes: Any) -> tuple[float, int]:
        return self.decay * self._square + (1 - self.decay) * statistics.fmean(slopes) ** 2, self._count + 1


@dataclass(frozen=True)
class Baseline:
    """How a method is put together, and the middle of its grid of learning rates by space."""

    estimator: Callable[[int, float], Estimator]
    optimizer: Callable[[Schedule], Optimizer]
    rates: Mapping[str, float]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the run that differ from the defaults."""


# The best known rates of SPSA by space, for the bundled models. The others follow from them and from the slopes at the start,
# about 15 for all parameters and 2 for LoRA: MEAZO and FZOO divide by these, and a mean of eight directions allows steps eight
# times as long.
SPSA_RATES = {"full": 2e-5, "matrices": 2e-5, "lora": 1e-3, "head": 1.5e-3, "prefix": 0.3}
MEAZO_RATES = {"full": 3e-4, "matrices": 3e-4, "lora": 2e-3, "head": 1e-2, "prefix": 0.3}
FZOO_RATES = {space: 8 * rate for space, rate in MEAZO_RATES.items()}

BASELINES: dict[str, Baseline] = {
    "spsa": Baseline(Spsa, Sgd, SPSA_RATES),
    "fzoo": Baseline(Fzoo, Sgd, FZOO_RATES),
    "meazo": Baseline(Spsa, Meazo, MEAZO_RATES),
    # LOZO (Chen et al., arXiv 2410.07698) perturbs a matrix by U·Vᵀ of a low rank, with a new U each step and a V that stays for
    # some 50 to 100 steps. Here both are new each step, because one seed makes both, and they are ±1 instead of Gaussian. LoRA's
    # and a prefix's tensors have dense noise in this package, so that this would be SPSA there.
    "lozo": Baseline(
        Spsa, Sgd, {s: SPSA_RATES[s] for s in ("full", "matrices")}, {"noise": "lowrank", "noise_rank": 4}
    ),
}
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def make_baseline(name: str, setup: Setup, lr: float, batch_size: int, budget: int) -> EstimatorMethod:
    """A baseline by name; `NAME-linear` lets the learning rate fall to zero over the budget."""
    base, _, shape = name.partition("-")
    config = setup.config
    assert config.eps is not None
    estimator = BASELINES[base].estimator(config.seed, config.eps)
    batches = make_batches(setup.train_prompts, setup.readout, config.seed, batch_size)
    steps = max(1, budget // (len(estimator.ask(0)) * len(batches(0))))
    rate = schedule(shape or "constant", lr, steps)
    return EstimatorMethod(setup.objective, estimator, BASELINES[base].optimizer(rate), batches)
