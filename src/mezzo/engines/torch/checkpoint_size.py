"""The size that a model's configuration states, compared with its weights before memory is allocated for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mezzo.engines.architectures import layer_count
from mezzo.errors import ModelError

SPARE = 2**24
"""Parameters that may be missing from any file: a fresh head is made, not read."""


def check_size(folder: Path, auto: Any, name: str, config: Any) -> None:
    """ModelError where there are no safetensors, or the configuration describes a far larger model.

    Without a configuration (where the model brings its own code) the second is not checked.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        why = "; its .bin or .pt file is a pickle, which can run code when it is opened" if pickled else ""
        raise ModelError(f"{name} has no weights as .safetensors{why}: save it again with save_pretrained")
    if config is not None:
        _compare(config, files, auto, name)


def _compare(config: Any, files: list[Path], auto: Any, name: str) -> None:
    sizes = [size for file in files for size in _sizes(file)]
    depth = layer_count(config)
    if depth > len(sizes):
        raise ModelError(f"{name}: config.json claims {depth} layers, and its weights are {len(sizes)} tensors")
    with torch.device("meta"):
        stated = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if stated > 4 * sum(sizes) + SPARE:
        raise ModelError(f"{name}: config.json describes {stated:,} parameters, and its weights are {sum(sizes):,}")


def _sizes(file: Path) -> list[int]:
    """Elements of each tensor, by the file's header, which safetensors has compared with the file's length."""
    with safe_open(file, framework="numpy") as tensors:
        return [math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()]  # noqa: SIM118
