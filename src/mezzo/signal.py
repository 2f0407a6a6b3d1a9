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
from mezzo.evaluation.rewards import REWARDS, is_reward
from mezzo.method.batches import make_batches
from mezzo.method.estimators import Spsa
from mezzo.method.objectives import OBJECTIVES, get_objective, import_function
from mezzo.runs.objectives import refuse_label_metric
from mezzo.runs.resolve import resolve_setup

DEFAULT = "cross_entropy,head,accuracy@1e-3,accuracy@1e-2,accuracy@1e-1"


@dataclass(frozen=True, slots=True)
class ObjectiveSignal:
    """Slopes of one objective over random directions and batches.

    `signal_to_noise` compares how slopes differ between directions (what training uses) with how they differ between batches
    of one direction (what only adds noise): the ratio of the two standard deviations, for one batch. `interval` is its 95%
    confidence interval.
    """

    objective: str
    readout: str
    eps: float
    zero_slope_share: float
    mean_abs_slope: float
    smallest: float
    largest: float
    signal_to_noise: float
    interval: tuple[float, float]
    slopes: int


@dataclass(frozen=True, slots=True, repr=False)
class Signal:
    """The comparison, and what follows from it."""

    rows: tuple[ObjectiveSignal, ...]

    def to_list(self) -> list[dict[str, Any]]:
        return [{name: getattr(row, name) for name in row.__slots__} for row in self.rows]

    @property
    def recommendation(self) -> str:
        """The objective whose slopes tell directions apart best, if its interval is above all others."""
        best = max(self.rows, key=lambda row: row.signal_to_noise)
        low = best.interval[0]
        if best.signal_to_noise < 0.1:
            return (
                "no objective gives a usable signal here: check template and label words, or try a larger eps or batch"
            )
        close = [_name(row) for row in self.rows if row.interval[1] >= low]
        if len(close) > 1:
            return f"too close to tell apart: {', '.join(close)}; measure with more --directions or --batches"
        if low == 0:
            return f"too close to no signal: {_name(best)}; measure with more --directions or --batches"
        text = f"train with {_name(best)}: signal to noise {best.signal_to_noise:.2f}"
        sparse = [row for row in self.rows if row.zero_slope_share > 0.2]
        if sparse:
            text += f"; {_name(sparse[0])} gives no slope on {sparse[0].zero_slope_share:.0%} of steps"
        return text

    def __str__(self) -> str:
        head = f"{'objective':<26} {'zero slopes':>11} {'mean |g|':>10} {'range':>21} {'signal/noise':>13} {'95%':>13}"
        lines = [
            f"{_name(r):<26} {r.zero_slope_share:>11.1%} {r.mean_abs_slope:>10.4g} "
            f"{f'{r.smallest:.3g} … {r.largest:.3g}':>21} {r.signal_to_noise:>13.2f} "
            f"{'{:.2f} … {:.2f}'.format(*r.interval):>13}"
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
    if name in REWARDS.keys() - OBJECTIVES.keys() or (":" in name and is_reward(import_function(name))):
        raise ConfigError(
            f"{name!r} rewards generated text, and only scores are read here; steps of a run show its slopes"
        )
    return name, "vocabulary" if get_objective(name).vocabulary else "words", value


def _measure_readout(
    config: RunConfig, readout: str, objectives: list[tuple[str, float | None]], directions: int, batches: int
) -> list[ObjectiveSignal]:
    # Slopes are measured as SPSA does, and solve has no batch size of its own.
    setup = resolve_setup(config.replace(method="spsa") if config.method in (None, "solve") else config)
    for name, _ in objectives:
        refuse_label_metric(name, setup.task, of_texts=())  # only scores are read here, no texts
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
    return [summarize_slopes(name, readout, eps, values) for (name, eps), values in slopes.items()]


def summarize_slopes(name: str, readout: str, eps: float, slopes: npt.NDArray[np.float64]) -> ObjectiveSignal:
    size = np.abs(slopes)
    ratio, low, high = _signal_to_noise(slopes)
    return ObjectiveSignal(
        objective=name,
        readout=readout,
        eps=eps,
        zero_slope_share=float((slopes == 0).mean()),
        mean_abs_slope=float(size.mean()),
        smallest=float(size.min()),
        largest=float(size.max()),
        signal_to_noise=ratio,
        interval=(low, high),
        slopes=slopes.size,
    )


def _signal_to_noise(slopes: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """The ratio and its 95% interval, from a one-way analysis of variance of slopes[directions, batches]."""
    directions, batches = slopes.shape
    within = float(slopes.var(axis=1, ddof=1).mean())
    between = batches * float(slopes.mean(axis=1).var(ddof=1))
    if not within:
        return (math.inf, math.inf, math.inf) if between else (0.0, 0.0, 0.0)
    # The variance of the directions' means holds a share of batch noise; without it, what is left is signal.
    ratios = (
        between / within / quantile for quantile in (1.0, *_f_quantiles(directions - 1, directions * (batches - 1)))
    )
    middle, low, high = (math.sqrt(max(0.0, ratio - 1) / batches) for ratio in ratios)
    return middle, low, high


def _f_quantiles(above: int, below: int, draws: int = 100_000) -> tuple[float, float]:
    """The 97.5% and 2.5% quantiles of the F distribution, from fixed draws: NumPy has no inverse of it."""
    draw = np.random.default_rng(0).chisquare
    high, low = np.quantile(draw(above, draws) / above / (draw(below, draws) / below), (0.975, 0.025))
    return float(high), float(low)


def _name(row: ObjectiveSignal) -> str:
    what = "head cross_entropy" if row.readout == "head" else row.objective
    return f"{what} @ {row.eps:g}"
