"""mezzo: fine-tune language models with forward passes only.

Importing this module imports neither torch nor transformers: names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "finetune": "mezzo.api",
    "evaluate": "mezzo.api",
    "predict": "mezzo.api",
    "export": "mezzo.api",
    "push_to_hub": "mezzo.api",
    "verify": "mezzo.api",
    "report": "mezzo.api",
    "sweep": "mezzo.many_runs",
    "open_session": "mezzo.api",
    "suggest_task": "mezzo.api",
    "Run": "mezzo.runs.result",
    "RunConfig": "mezzo.config",
    "MezzoError": "mezzo.errors",
    "StopTraining": "mezzo.errors",
    "load_prefix": "mezzo.runs.export",
    "MLMConfig": "mezzo.tasks",
    "Task": "mezzo.tasks",
    "MeZOTrainer": "mezzo.runs.trainer",
    "MeZOMLMTrainer": "mezzo.mlm",
    "MezzoTrainer": "mezzo.hf_trainer",
    "mezo_mlm_finetune": "mezzo.mlm",
}

__all__ = ["__version__", *sorted(_LAZY)]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mezzo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
