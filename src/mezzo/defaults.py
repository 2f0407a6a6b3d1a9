"""Settings that depend on the model and the space: the published grids, and what each bundled model ships beside its weights."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from mezzo.config import RunConfig

STEPS = 1000
BATCH = {"masked": 64, "causal": 16}

# Middle of the published grids for RoBERTa-large (masked) and OPT (causal). A head is small and its loss smooth.
PUBLISHED: dict[tuple[str, str], dict[str, float]] = {
    ("masked", "full"): {"lr": 1e-6, "eps": 1e-3, "weight_decay": 0.0},
    ("masked", "matrices"): {"lr": 1e-6, "eps": 1e-3, "weight_decay": 0.0},
    ("masked", "lora"): {"lr": 5e-5, "eps": 1e-3, "weight_decay": 0.1},
    ("masked", "head"): {"lr": 1e-4, "eps": 1e-3, "weight_decay": 0.0},
    ("causal", "full"): {"lr": 1e-6, "eps": 1e-3, "weight_decay": 0.0},
    ("causal", "matrices"): {"lr": 1e-6, "eps": 1e-3, "weight_decay": 0.0},
    ("causal", "lora"): {"lr": 1e-4, "eps": 1e-2, "weight_decay": 0.0},
    ("causal", "head"): {"lr": 1e-4, "eps": 1e-3, "weight_decay": 0.0},
}

# In bfloat16 a matrix W ± εz made in scratch realises z with an error of an eighth at ε = 1e-3 (weights about 0.02); the
# low-rank term is added to activations instead. LoRA factors are float32, and their noise is dense.
NOISE = {"float32": "rademacher", "float16": "rademacher", "bfloat16": "lowrank"}


def shipped(model: str) -> dict[str, Any]:
    """What a bundled model's `mezzo.json` says, by space; empty for other models."""
    if not model.startswith("mezzo/"):
        return {}
    file = resources.files("mezzo") / "bundled" / "models" / model.removeprefix("mezzo/") / "mezzo.json"
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def with_defaults(config: RunConfig, family: str) -> RunConfig:
    """Every `None` among the method's options replaced: the bundled model's choice, else the published one."""
    ours = shipped(config.model)
    asked: str = config.space or ours.get("space", "lora")
    config = config.replace(space=asked)
    space = asked if (family, asked) in PUBLISHED else "full"
    chosen: dict[str, Any] = {
        "steps": STEPS,
        "schedule": "constant",
        "noise": NOISE[config.dtype],
        "batch_size": BATCH[family],
        **PUBLISHED[family, space],
    }
    chosen |= ours.get(asked, {})
    missing = {name: value for name, value in chosen.items() if getattr(config, name) is None}
    config = config.replace(**missing)
    if config.eval_every is None:
        assert config.steps is not None
        config = config.replace(eval_every=max(1, config.steps // 10))
    return config
