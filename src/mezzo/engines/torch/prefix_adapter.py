"""A prefix that was exported, back on an ordinary model: every claim of its files is checked first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mezzo.engines.torch.forward import prefix
from mezzo.errors import ModelError

LARGEST_SETTINGS = 2**20


def put_prefix(model: nn.Module, folder: Path, format_: str) -> None:
    """Read `folder` and give its keys and values to the model's attention modules; ModelError when they do not fit."""
    settings = _settings(folder)
    if settings.get("format") != format_:
        raise ModelError(f"{folder} is no prefix that this mezzo reads: its format is {settings.get('format')!r}")
    device = next(model.parameters()).device
    try:
        with safe_open(folder / "prefix.safetensors", framework="pt") as file:
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"{folder}/prefix.safetensors cannot be read: {str(error).splitlines()[0]}") from None
    _fits(model, tensors, folder)
    prefix.give(model, {name: tensor.float().to(device) for name, tensor in tensors.items()})


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "prefix_config.json"
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(LARGEST_SETTINGS))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    return found if isinstance(found, dict) else {}


def _fits(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Heads and widths must be the model's own; otherwise the mistake would show up in the middle of a forward."""
    with prefix.withheld(model):
        ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
        known = {info.name: info.shape for info in prefix.catalogue(prefix.activations(model, ids))}
    lengths: dict[str, int] = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        fits = name in known and len(shape) == 3 and (shape[0], shape[2]) == known[name]
        if not fits or not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ModelError(
                f"the prefix in {folder} belongs to another model: {name} does not fit {type(model).__name__}"
            )
        # Attention without a mask does not compare the lengths of keys and values: it would read past the shorter.
        if lengths.setdefault(name.rpartition(".")[0], shape[1]) != shape[1]:
            raise ModelError(f"the prefix in {folder} is damaged: keys and values of {name} are of different length")
