"""Which objective a run has: one that comes with this package, the user's own function, or a reward of generated text."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mezzo.errors import ConfigError, nearest
from mezzo.evaluation.rewards import REWARDS, Reward, is_reward
from mezzo.method.objectives import METRICS, OBJECTIVES, import_function
from mezzo.tasks import Task


def find_function(objective: str) -> Any:
    """The user's own function that `module:function` names; None for an objective that comes with this package."""
    if ":" in objective:
        return import_function(objective)
    names = dict.fromkeys((*OBJECTIVES, *REWARDS))
    if (
        objective and objective not in names and not objective.startswith("<")
    ):  # a Python function, given again in Python
        raise ConfigError(
            f"unknown objective {objective!r}{nearest(objective, names)} ({', '.join(names)}, or module:function)"
        )
    return None


def find_reward(objective: str, task: Task, function: Any = None) -> Reward | None:
    """What rewards generated text: the user's own function, a reward by name, or else the task's own; None: no reward."""
    if function is not None:
        return function if is_reward(function) else None
    if objective in REWARDS and (task.kind == "generation" or objective not in OBJECTIVES):
        return REWARDS[objective]
    return REWARDS[task.metric] if task.metric not in METRICS else None


def refuse_label_metric(objective: str, task: Task, of_texts: Collection[str] = tuple(REWARDS)) -> None:
    """A metric of labels is a constant where answers are texts."""
    if task.kind == "generation" and objective in METRICS and objective not in of_texts:
        others = " or ".join(("cross_entropy", *of_texts))
        raise ConfigError(f"{objective} counts labels, and task {task.name!r} generates texts: train on {others}")
