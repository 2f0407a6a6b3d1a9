"""An exported prefix, put back on an ordinary model; its files are checked first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mezzo.engines.hf_hub import longest_input
from mezzo.engines.torch.forward import prefix
from mezzo.errors import ModelError
from mezzo.untrusted import parse_json, read_bytes

LARGEST_SETTINGS = 2**20


def put_prefix(model: nn.Module, folder: Path, format_: str) -> None:
    """Read `folder` and give its keys and values to the model's attention modules; ModelError when they do not fit."""
    settings = _read_settings(folder)
    if settings.get("format") != format_:
        raise ModelError(f"{folder} is not a prefix that this mezzo reads: its format is {settings.get('format')!r}")
    device = next(model.parameters()).device
    if (folder / "prefix.safetensors").exists() and not (folder / "prefix.safetensors").is_file():
        raise ModelError(f"{folder}/prefix.safetensors is not a file")
    try:
        with safe_open(folder / "prefix.safetensors", framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            _check_shapes(model, {name: tuple(part.get_shape()) for name, part in slices.items()}, folder)
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in slices}
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ModelError(f"{folder}/prefix.safetensors cannot be read: {str(error).splitlines()[0]}") from None
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ModelError(f"the prefix in {folder} is damaged: {name} holds values that are not finite numbers")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in tensors.keys() & parameters.keys():  # a head that was trained beside the prefix
            parameters[name].copy_(tensors.pop(name))
    prefix.set_prefix(model, {name: tensor.float().to(device) for name, tensor in tensors.items()})


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "prefix_config.json"
    try:
        settings = parse_json(read_bytes(path, LARGEST_SETTINGS))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    return settings if isinstance(settings, dict) else {}


def _check_shapes(model: nn.Module, shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Heads and widths must be the model's own; otherwise the mistake would show up in the middle of a forward."""
    longest = longest_input(model.config)
    with prefix.without_prefix(model):
        ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
        activations = prefix.record_activations(model, ids)
    lengths: dict[str, int] = {}
    parameters = dict(model.named_parameters())
    for name, shape in shapes.items():
        if name in parameters and shape == tuple(parameters[name].shape):
            continue
        fits = name in activations and len(shape) == 3 and shape[::2] == activations[name].shape[::2]
        if not fits or (longest is not None and shape[1] > longest):
            raise ModelError(
                f"the prefix in {folder} belongs to another model: {name} does not fit {type(model).__name__}"
            )
        # Attention without a mask does not compare the lengths of keys and values: it would read past the shorter.
        if lengths.setdefault(name.rpartition(".")[0], shape[1]) != shape[1]:
            raise ModelError(f"the prefix in {folder} is damaged: keys and values of {name} are of different length")
