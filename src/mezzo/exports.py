"""A run in layouts that others load: a PEFT adapter, or a whole Hugging Face model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mezzo.defaults import SETTINGS, shipped
from mezzo.engines.base import Engine
from mezzo.engines.hub import quiet
from mezzo.errors import ConfigError
from mezzo.files import explained, write_atomically


def export_adapter(engine: Any, parts: Any, out: Path, card: str) -> None:
    """LoRA tensors as PEFT reads them (`adapter_config.json`, `adapter_model.safetensors`)."""
    from safetensors.numpy import save

    if engine.space.kind != "lora":
        raise ConfigError(
            f"only LoRA runs have an adapter; this one trained {engine.space.kind!r}: export the model instead"
        )
    _refuse_used(out)
    tensors = {f"base_model.model.{name}": np.ascontiguousarray(value) for name, value in _both_factors(engine).items()}
    modules = sorted({name.split(".lora_")[0] for name in _both_factors(engine)})
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": parts.config.model,
        "r": engine.space.rank,
        "lora_alpha": engine.space.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "inference_mode": True,
        "fan_in_fan_out": bool(engine.transposed),
    }
    _make(out)
    write_atomically(out / "adapter_model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_atomically(out / "adapter_config.json", (json.dumps(settings, indent=2) + "\n").encode())
    write_atomically(out / "README.md", card.encode())


def export_model(engine: Any, parts: Any, out: Path, card: str) -> None:
    """The whole model with the trained tensors in place, its tokenizer, its card and the settings of its base.

    Complete or absent.
    """
    _refuse_used(out)
    _make(out.parent)
    staging = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    with explained(out):
        try:
            with quiet():
                engine.merged().save_pretrained(staging)
                parts.tokenizer.save_pretrained(staging)
            (staging / "README.md").write_text(card, encoding="utf-8")
            if settings := shipped(parts.config.model):
                (staging / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            staging.replace(out)  # an empty folder may be replaced, and _refuse_used has seen that it is one
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _both_factors(engine: Any) -> dict[str, Any]:
    frozen = {name: value.cpu().numpy() for name, value in engine.population.frozen.items()}
    return {**engine.state(), **frozen}


def _refuse_used(out: Path) -> None:
    """Never write over what is there: it may be a run, or the base model."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; choose another --out, or remove it first")


def _make(folder: Path) -> None:
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)


EXPORTS: dict[str, Callable[[Engine, Any, Path, str], None]] = {"adapter": export_adapter, "model": export_model}
