"""What a server runs to move its weights: SGLang calls `load` on every rank (`--custom-weight-loader`), mezzo beside it.

An order is a list of updates, (seed, coefficient) pairs, as bytes of JSON in one small tensor: the noise is made where the
weights are. Whole matrices come the same way, when a server must go back to where a run began or to a snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezzo.engines.sglang.matrices import Matrices
from mezzo.engines.sglang.shards import Part, parts_of
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.method import noise
from mezzo.types import TrainedTensor, Update

LOADER = "mezzo.engines.sglang.server.loader.load"
ORDER = "mezzo.order"


def order(trained: Sequence[TrainedTensor], updates: Sequence[Update]) -> tuple[str, Tensor]:
    """The updates as one named tensor, with all that a rank must know to carry them out."""
    content = {
        "noise": noise.VERSION,
        "tensors": [[t.name, t.shape, t.rank, t.decay] for t in trained],
        "updates": [[u.terms, u.keep] for u in updates],
    }
    return ORDER, torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


@torch.no_grad()
def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """SGLang's side: carry out orders, and write whole matrices, in this rank's share of the model."""
    places = _places(model)
    for name, tensor in named_tensors:
        if name == ORDER:
            _carry_out(json.loads(tensor.cpu().numpy().tobytes()), places, next(model.parameters()).device)
        else:
            Matrices((), places, _source(tensor.device)).load(name, tensor)


def _carry_out(content: dict[str, Any], places: dict[str, tuple[Part, Any]], device: torch.device) -> None:
    if content["noise"] != noise.VERSION:
        raise ValueError(f"the run makes noise {content['noise']!r}, the mezzo beside this server {noise.VERSION!r}")
    trained = [
        TrainedTensor(name, tuple(shape), "matrix", rank, decay) for name, shape, rank, decay in content["tensors"]
    ]
    matrices = Matrices(trained, places, _source(device))
    for terms, keep in content["updates"]:
        update = Update(tuple((seed, coef) for seed, coef in terms), keep)
        if not update.empty:
            matrices.apply(update)


def _source(device: torch.device) -> NoiseSource:
    return NoiseSource("rademacher", device)  # low-rank factors are ±1 whatever the kind of dense noise


def _places(model: torch.nn.Module) -> dict[str, tuple[Part, Any]]:
    """Hugging Face tensor name → its part and layer, of every layer that SGLang has given adapters."""
    found: dict[str, tuple[Part, Any]] = {}
    for path, module in model.named_modules():
        if (layer := getattr(module, "base_layer", None)) is not None:
            found |= {f"{part.module}.weight": (part, layer) for part in parts_of(path, layer)}
    return found


def sized(tensors: dict[str, np.ndarray[Any, Any]], limit: int = 64 * 2**20) -> list[list[tuple[str, Tensor]]]:
    """The tensors in groups of about `limit` bytes, one message each."""
    groups: list[list[tuple[str, Tensor]]] = [[]]
    room = limit
    for name, values in tensors.items():
        if groups[-1] and values.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append((name, torch.from_numpy(np.ascontiguousarray(values))))
        room -= values.nbytes
    return groups
