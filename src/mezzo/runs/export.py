"""Exports that other libraries load: a PEFT adapter, a prefix, or a whole Hugging Face model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mezzo.engines.base import ExportableEngine
from mezzo.engines.hf_hub import quiet
from mezzo.errors import ConfigError
from mezzo.journal.atomic_files import explain_os_errors, write_atomically, write_folder_atomically
from mezzo.runs import datasets
from mezzo.runs.defaults import SETTINGS, TEXT_OPTIONS, model_settings
from mezzo.runs.setup import Setup


def export_adapter(engine: ExportableEngine, setup: Setup, out: Path, card: str) -> None:
    """Write the trained tensors without the base model: LoRA for PEFT, a prefix for `load_prefix`."""
    write = {"lora": _export_lora, "prefix": _export_prefix}.get(engine.space.kind)
    if write is None:
        raise ConfigError(
            f"only LoRA and prefix runs have an adapter; this one trained {engine.space.kind!r}: export the model instead"
        )
    with _staging_folder(out, card) as folder:
        write(engine, setup, folder)


def _export_lora(engine: ExportableEngine, setup: Setup, folder: Path) -> None:
    """LoRA tensors in PEFT's layout (`adapter_config.json`, `adapter_model.safetensors`), and the whole modules of a trained
    head: PEFT loads no parts of them."""
    from safetensors.numpy import save

    adapter = _finite(engine.adapter_tensors().items())
    factors = {name for name in adapter if ".lora_" in name}
    modules = sorted({name.split(".lora_")[0] for name in factors})
    saved = _outermost({name.rpartition(".")[0] for name in adapter.keys() - factors})
    for path in saved:
        adapter |= engine.module_tensors(path)
    tensors = {f"base_model.model.{name}": np.ascontiguousarray(value) for name, value in adapter.items()}
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": setup.config.model,
        "r": engine.space.rank,
        "lora_alpha": engine.space.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "modules_to_save": saved or None,
        "inference_mode": True,
        "fan_in_fan_out": engine.stores_transposed,
    }
    write_atomically(folder / "adapter_model.safetensors", save(tensors, metadata={"format": "pt"}))
    _write_json(folder / "adapter_config.json", settings)


def _outermost(modules: set[str]) -> list[str]:
    """The modules that lie in no other one of them."""
    return sorted(m for m in modules if not any(m.startswith(other + ".") for other in modules))


def _export_prefix(engine: ExportableEngine, setup: Setup, folder: Path) -> None:
    """A format of its own: PEFT puts a prefix into the key-value cache, which shifts the position of every token."""
    from safetensors.numpy import save

    tensors = {name: np.ascontiguousarray(value) for name, value in _finite(engine.adapter_tensors().items()).items()}
    settings = {"format": PREFIX_FORMAT, "base_model_name_or_path": setup.config.model, "tokens": engine.space.tokens}
    write_atomically(folder / "prefix.safetensors", save(tensors, metadata={"format": "pt"}))
    _write_json(folder / "prefix_config.json", settings)


def load_prefix(model: Any, folder: str | Path) -> Any:
    """Put an exported prefix on a Hugging Face model, in place: its forward and `generate` then use it. Returns the model."""
    from mezzo.engines.torch.prefix_adapter import put_prefix

    put_prefix(model, Path(folder), PREFIX_FORMAT)
    return model


def export_model(engine: ExportableEngine, setup: Setup, out: Path, card: str) -> None:
    """Write the whole model with the trained tensors merged, its tokenizer, its card, its task and the settings of its base."""
    with _staging_folder(out, card) as folder:
        with quiet():
            model = engine.merged_model()
            _finite(model.named_parameters())
            model.save_pretrained(folder)
            setup.tokenizer.save_pretrained(folder)
        _write_json(folder / SETTINGS, {**model_settings(setup.config.model), **_task_settings(setup)})


def _task_settings(setup: Setup) -> dict[str, Any]:
    """The task, as data with the columns of the run's is read, and how it is asked and read out."""
    task, named = setup.task, datasets.column_names(setup.config)
    aliases = {**task.column_aliases, **{column: (name,) for column, name in named.items() if name != column}}
    length = setup.config.max_length or task.max_length
    task = dataclasses.replace(task, column_aliases=aliases, max_length=length)
    return {"task": task.as_dict(), "readout": setup.config.readout, **_text_settings(setup)}


def _text_settings(setup: Setup) -> dict[str, Any]:
    """How a causal model is prompted, and where the texts it generates end."""
    if setup.family != "causal":
        return {}
    values = setup.config.to_dict()
    return {name: values[name] for name in TEXT_OPTIONS if values[name] is not None}


@contextlib.contextmanager
def _staging_folder(out: Path, card: str) -> Iterator[Path]:
    """A temporary folder that becomes `out` when everything, the card included, is written: complete or absent."""
    with explain_os_errors(out):
        _refuse_used(out)
        with write_folder_atomically(out) as staging:
            with _explain_safetensors(out):
                yield staging
            write_atomically(staging / "README.md", card.encode())


@contextlib.contextmanager
def _explain_safetensors(out: Path) -> Iterator[None]:
    """The library has an error of its own for a disk that is full or fails."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from None


def _finite(tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The tensors, of NumPy or torch, if all their values are finite."""
    found = dict(tensors)
    for name, tensor in found.items():
        if not (tensor.isfinite() if hasattr(tensor, "isfinite") else np.isfinite(tensor)).all():
            raise ConfigError(f"{name} holds values that are not finite numbers; export another step with --at")
    return found


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(values, indent=2) + "\n").encode())


def _refuse_used(out: Path) -> None:
    """Never overwrite existing files: they may be a run, or the base model."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ConfigError(f"{out} exists already; choose another --out, or remove it first")


PREFIX_FORMAT = "mezzo-prefix-1"
EXPORTS: dict[str, Callable[[Any, Setup, Path, str], None]] = {"adapter": export_adapter, "model": export_model}
