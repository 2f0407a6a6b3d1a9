"""How much signal an objective gives, measured before compute is spent on training with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mezzo import api
from mezzo.config import RunConfig, convert
from mezzo.errors import ConfigError
from mezzo.method.batches import make_batches
from mezzo.method.estimators import Spsa
from mezzo.method.objectives import get_objective
from mezzo.runs.setup import resolve_setup

DEFAULT = "cross_entropy,head,accuracy@1e-3,accuracy@1e-2,accuracy@1e-1"


@dataclass(frozen=True, slots=True)
class ObjectiveSignal:
    """Slopes of one objective over random directions and batches.

    `signal_to_noise` compares how slopes differ between directions (what training uses) with how they differ between batches
    of one direction (what only adds noise): the ratio of the two standard deviations, for one batch.
    """

    objective: str
    readout: str
    eps: float
    zero_slope_share: float
    mean_abs_slope: float
    smallest: float
    largest: float
    signal_to_noise: float
    slopes: int


@dataclass(frozen=True, slots=True, repr=False)
class Signal:
    """The comparison, and what follows from it."""

    rows: tuple[ObjectiveSignal, ...]

    def to_list(self) -> list[dict[str, Any]]:
        return [{name: getattr(row, name) for name in row.__slots__} for row in self.rows]

    @property
    def recommendation(self) -> str:
        """Prefer the objective whose slopes tell directions apart best; say so when none does."""
        best = max(self.rows, key=lambda row: row.signal_to_noise)
        if best.signal_to_noise < 0.1:
            return (
                "no objective gives a usable signal here: check template and label words, or try a larger eps or batch"
            )
        text = f"train with {_name(best)}: signal to noise {best.signal_to_noise:.2f}"
        sparse = [row for row in self.rows if row.zero_slope_share > 0.2]
        if sparse:
            text += f"; {_name(sparse[0])} gives no slope on {sparse[0].zero_slope_share:.0%} of steps"
        return text

    def __str__(self) -> str:
        head = f"{'objective':<26} {'zero slopes':>11} {'mean |g|':>10} {'range':>21} {'signal/noise':>13}"
        lines = [
            f"{_name(r):<26} {r.zero_slope_share:>11.1%} {r.mean_abs_slope:>10.4g} "
            f"{f'{r.smallest:.3g} … {r.largest:.3g}':>21} {r.signal_to_noise:>13.2f}"
            for r in self.rows
        ]
        return "\n".join([head, *lines, "", self.recommendation])

    __repr__ = __str__


def measure(options: Mapping[str, Any], directions: int = 16, batches: int = 8, objectives: str = "") -> Signal:
    """Slopes of each objective over the same directions and batches.

    An objective is a name, with `@eps` to set its own perturbation; `head` is cross-entropy of a fresh classification head.
    """
    if directions < 2 or batches < 2:
        raise ConfigError("signal needs at least 2 directions and 2 batches")
    requests = [_parse_objective(text.strip()) for text in (objectives or DEFAULT).split(",")]
    values = api.with_task({name: value for name, value in options.items() if value is not None})
    rows = []
    for readout, extra in READOUTS.items():
        group = [(name, eps) for name, kind, eps in requests if kind == readout]
        if group:
            rows += _measure_readout(api.resolve({**values, **extra}), readout, group, directions, batches)
    return Signal(tuple(rows))


# What the scores of an objective are read from, and the options that make an engine read it.
READOUTS: dict[str, dict[str, str]] = {
    "words": {},
    "vocabulary": {"objective": "vocabulary_cross_entropy"},
    "head": {"readout": "head"},
}


def _parse_objective(text: str) -> tuple[str, str, float | None]:
    """Objective, readout and eps of `name@eps`."""
    name, _, eps = text.partition("@")
    value = convert("eps", eps) if eps else None
    if value is not None and not 0 < value < float("inf"):
        raise ConfigError(f"{text!r}: eps must be positive")
    if name == "head":
        return "cross_entropy", "head", value
    return name, "vocabulary" if get_objective(name).vocabulary else "words", value


def _measure_readout(
    config: RunConfig, readout: str, objectives: list[tuple[str, float | None]], directions: int, batches: int
) -> list[ObjectiveSignal]:
    setup = resolve_setup(config)
    config = setup.config
    assert config.eps is not None and config.batch_size is not None
    train = setup.train_prompts
    if len(train) < 2 * config.batch_size:
        raise ConfigError(
            f"{len(train)} training examples do not make two batches of {config.batch_size}; use a smaller --batch-size"
        )
    draw = make_batches(train, setup.readout, config.seed, config.batch_size)
    slopes = {(name, eps or config.eps): np.zeros((directions, batches)) for name, eps in objectives}
    engine = setup.open_engine()
    try:
        engine.check(draw(0), config.eps)
        for eps in dict.fromkeys(eps for _, eps in slopes):
            estimator = Spsa(config.seed, eps)
            names = [name for name, own in slopes if own == eps]
            for direction in range(directions):
                probes = estimator.ask(direction)
                for number in range(batches):
                    batch = draw(number)
                    scores = engine.score(batch, probes)
                    for name in names:
                        (slope,) = estimator.tell(probes, get_objective(name).losses(scores, batch))
                        slopes[name, eps][direction, number] = slope.value
    finally:
        engine.close()
    return [_summarize(name, readout, eps, values) for (name, eps), values in slopes.items()]


def _summarize(name: str, readout: str, eps: float, slopes: npt.NDArray[np.float64]) -> ObjectiveSignal:
    size = np.abs(slopes)
    within = float(slopes.var(axis=1, ddof=1).mean())
    # The variance of the directions' means holds a share of batch noise; without it, what is left is signal.
    between = max(0.0, float(slopes.mean(axis=1).var(ddof=1)) - within / slopes.shape[1])
    ratio = math.sqrt(between / within) if within else (math.inf if between else 0.0)
    return ObjectiveSignal(
        objective=name,
        readout=readout,
        eps=eps,
        zero_slope_share=float((slopes == 0).mean()),
        mean_abs_slope=float(size.mean()),
        smallest=float(size.min()),
        largest=float(size.max()),
        signal_to_noise=ratio,
        slopes=slopes.size,
    )


def _name(row: ObjectiveSignal) -> str:
    what = "head cross_entropy" if row.readout == "head" else row.objective
    return f"{what} @ {row.eps:g}"
