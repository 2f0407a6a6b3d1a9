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
from mezzo.method.batches import batches_of
from mezzo.method.noise import step_seed
from mezzo.method.objectives import get_objective
from mezzo.runs import datasets, setup
from mezzo.types import Probe

DEFAULT = "cross_entropy,head,accuracy@1e-3,accuracy@1e-2,accuracy@1e-1"


@dataclass(frozen=True, slots=True)
class Row:
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

    rows: tuple[Row, ...]

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
    wanted = [_parsed(text.strip()) for text in (objectives or DEFAULT).split(",")]
    for name, _, _ in wanted:
        get_objective(name)
    values = {name: value for name, value in options.items() if value is not None}
    rows = []
    for readout in dict.fromkeys(kind for _, kind, _ in wanted):
        group = [(name, eps) for name, kind, eps in wanted if kind == readout]
        rows += _of_readout(
            api.resolve({**values, **({"readout": "head"} if readout == "head" else {})}), group, directions, batches
        )
    return Signal(tuple(rows))


def _parsed(text: str) -> tuple[str, str, float | None]:
    name, _, eps = text.partition("@")
    value = convert("eps", eps) if eps else None
    if value is not None and not 0 < value < float("inf"):
        raise ConfigError(f"{text!r}: eps must be positive")
    return ("cross_entropy", "head", value) if name == "head" else (name, "words", value)


def _of_readout(config: RunConfig, wanted: list[tuple[str, float | None]], directions: int, batches: int) -> list[Row]:
    parts = setup.prepare(config)
    config = parts.config
    assert config.eps is not None and config.batch_size is not None
    train = parts.encode(datasets.splits_of(config, parts.task).train)
    if len(train) < 2 * config.batch_size:
        raise ConfigError(
            f"{len(train)} training examples do not make two batches of {config.batch_size}; use a smaller --batch-size"
        )
    engine = setup.engine_for(config, parts.family, parts.classes, parts.padding_id)
    engine.check(batches_of(train, parts.readout, config.seed, config.batch_size)(0), config.eps)
    draw = batches_of(train, parts.readout, config.seed, config.batch_size)
    slopes: dict[tuple[str, float], npt.NDArray[np.float64]] = {
        (name, eps or config.eps): np.zeros((directions, batches)) for name, eps in wanted
    }
    for direction in range(directions):
        seed = step_seed(config.seed, direction, 0)
        for number in range(batches):
            batch = draw(number)
            for eps in dict.fromkeys(eps for _, eps in slopes):
                scores = engine.score(batch, [Probe(((seed, eps),)), Probe(((seed, -eps),))])
                for name in (n for n, e in slopes if e == eps):
                    plus, minus = get_objective(name)(scores, batch)
                    slopes[name, eps][direction, number] = (plus - minus) / (2 * eps)
    engine.close()
    kind = "head" if parts.readout.kind == "head" else "words"
    return [_row(name, kind, eps, values) for (name, eps), values in slopes.items()]


def _row(name: str, readout: str, eps: float, slopes: npt.NDArray[np.float64]) -> Row:
    size = np.abs(slopes)
    within = float(slopes.var(axis=1, ddof=1).mean())
    # The variance of the directions' means holds a share of batch noise; without it, what is left is signal.
    between = max(0.0, float(slopes.mean(axis=1).var(ddof=1)) - within / slopes.shape[1])
    ratio = math.sqrt(between / within) if within else (math.inf if between else 0.0)
    return Row(
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


def _name(row: Row) -> str:
    what = "head cross_entropy" if row.readout == "head" else row.objective
    return f"{what} @ {row.eps:g}"
