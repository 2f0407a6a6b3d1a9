"""`mezzo bench --plan`: which forward every module of a model gets, instead of how long a step takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mezzo.bench.compare import MIN_LENGTH, Case, build_setting, parse_options
from mezzo.config import RunConfig
from mezzo.method.noise import NOISES
from mezzo.runs.setup import make_space


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """The plan of one model shape in one space, as text and as rows."""

    model: str
    space: str
    noise: str
    dtype: str
    device: str
    text: str
    lines: list[dict[str, Any]]

    def __str__(self) -> str:
        return f"{self.model}, {self.space}, {self.noise}, {self.dtype}, {self.device}\n{self.text}"

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["text"]
        return values


def forward_plans(options: Mapping[str, Any]) -> Iterator[ForwardPlan]:
    """One plan after the other: only one model is in memory at a time."""
    config, spaces = parse_options(options)
    for model in config.model.split(","):
        for kind, noise in spaces:
            yield _forward_plan(config, model.strip().removeprefix("mezzo/"), kind, noise)
            gc.collect()


def _forward_plan(config: RunConfig, model: str, kind: str, noise: str) -> ForwardPlan:
    setting = build_setting(Case(config, model, 1, MIN_LENGTH, spread=0.0, samples=1))
    space = make_space(config.replace(space=kind, noise=noise))
    plan = setting.engine(space, NOISES[noise].kind).plan
    return ForwardPlan(model, kind, noise, config.dtype, str(setting.device), str(plan), plan.to_list())
