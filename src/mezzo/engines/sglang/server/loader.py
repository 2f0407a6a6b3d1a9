"""What a server runs to change its weights: SGLang calls `load` on every rank (`--custom-weight-loader`).

Updates arrive as (seed, coefficient) pairs, in JSON in one small tensor; the noise is made where the weights are. Complete
matrices arrive the same way when a server has to return to the base model or to a snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mezzo.engines.arrays import Array, to_tensor
from mezzo.engines.sglang.matrices import MatrixShards
from mezzo.engines.sglang.shards import Shard, layer_shards
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.method import noise
from mezzo.types import TrainedTensor, Update

LOADER = "mezzo.engines.sglang.server.loader.load"
UPDATES = "mezzo.updates"
MESSAGE_BYTES = 64 * 2**20


# ---- the client's side


def encode_updates(trained: Sequence[TrainedTensor], updates: Sequence[Update]) -> tuple[str, Tensor]:
    """The updates as one named tensor, with all that a rank must know to apply them."""
    content = {
        "noise": noise.VERSION,
        "tensors": [[t.name, t.shape, t.rank, t.decay] for t in trained],
        "updates": [[u.terms, u.keep] for u in updates],
    }
    return UPDATES, torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def group_by_size(tensors: Mapping[str, Array], limit: int = MESSAGE_BYTES) -> list[list[tuple[str, Tensor]]]:
    """The tensors in groups of about `limit` bytes, one message each."""
    groups: list[list[tuple[str, Tensor]]] = [[]]
    room = limit
    for name, values in tensors.items():
        if groups[-1] and values.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append((name, to_tensor(values)))
        room -= values.nbytes
    return groups


# ---- the server's side


@torch.no_grad()
def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Apply updates, and write complete matrices, to this rank's shards of the model."""
    shards = _model_shards(model)
    # Low-rank factors are ±1 whatever the kind of dense noise.
    source = NoiseSource("rademacher", next(model.parameters()).device)
    for name, tensor in named_tensors:
        if name == UPDATES:
            _apply_updates(tensor, shards, source)
        else:
            shards[name].load(tensor)


def _apply_updates(encoded: Tensor, shards: Mapping[str, Shard], source: NoiseSource) -> None:
    content = json.loads(encoded.cpu().numpy().tobytes())
    if content["noise"] != noise.VERSION:
        raise ValueError(f"the run uses noise {content['noise']!r}, the server's mezzo {noise.VERSION!r}")
    tensors = content["tensors"]
    trained = [TrainedTensor(name, tuple(shape), "matrix", rank, decay) for name, shape, rank, decay in tensors]
    updates = [Update(tuple((seed, coef) for seed, coef in terms), keep) for terms, keep in content["updates"]]
    MatrixShards(trained, shards, source).apply(updates)


def _model_shards(model: torch.nn.Module) -> dict[str, Shard]:
    """The shards in all layers that SGLang has given adapters, by Hugging Face tensor name."""
    shards: dict[str, Shard] = {}
    for path, module in model.named_modules():
        if (layer := getattr(module, "base_layer", None)) is not None:
            shards |= {f"{shard.module}.weight": shard for shard in layer_shards(path, layer)}
    return shards
