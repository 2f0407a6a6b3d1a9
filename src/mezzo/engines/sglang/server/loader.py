"""What a server runs to change its weights: SGLang calls `load` on every rank (`--custom-weight-loader`).

An order says which weights it expects and what they are called afterwards. Updates in it are (seed, coefficient) pairs, in JSON
in one small tensor; the noise is made where the weights are. Complete matrices come with it when a server has to go back.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from mezzo.engines.arrays import Array, to_tensor
from mezzo.engines.sglang.internals import hooks
from mezzo.engines.sglang.internals.shards import Shard, model_shards
from mezzo.engines.sglang.matrices import MatrixShards
from mezzo.engines.sglang.module_names import sglang_path
from mezzo.engines.sglang.requests import SAMPLER
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.method import noise
from mezzo.types import TrainedTensor, Update

LOADER = "mezzo.engines.sglang.server.loader.load"
ORDER = "mezzo.order"
# Questions that a client asks through SGLang's `/get_weights_by_name`.
STATUS, DIGESTS = "mezzo.status", "mezzo.digests"
MESSAGE_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Order:
    """A change of the weights, without the matrices that may come with it."""

    owner: str
    expected: str | None
    """The version that the weights must have, the loader's own name; empty: as the server read them; None: any."""
    version: str
    """Their version afterwards."""
    base_name: str
    """SGLang's `weight_version` of the untrained model, to be restored."""
    is_base: bool = False
    """Afterwards the weights are those of the checkpoint again."""
    noise: str = field(default_factory=lambda: noise.VERSION)
    tensors: tuple[tuple[str, tuple[int, ...], int, bool], ...] = ()
    updates: tuple[tuple[tuple[tuple[int, float], ...], float], ...] = ()


# ---- the client's side


def encode_order(order: Order) -> tuple[str, Tensor]:
    """An order as one named tensor."""
    return ORDER, torch.frombuffer(bytearray(json.dumps(asdict(order)).encode()), dtype=torch.uint8)


def describe_updates(trained: Sequence[TrainedTensor], updates: Sequence[Update]) -> dict[str, Any]:
    """The updates, with all that a rank must know to apply them, as fields of an order."""
    return {
        "tensors": tuple((t.name, t.shape, t.rank, t.decay) for t in trained),
        "updates": tuple((u.terms, u.keep) for u in updates),
    }


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


def digest_part(values: Tensor) -> str:
    """SHA-256 of the bits of a matrix, or of a part of one."""
    return hashlib.sha256(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


# ---- the server's side


@dataclass
class Ledger:
    """What a rank knows of the orders it was given."""

    version: str = ""
    owner: str = ""
    base_name: str = ""
    moved: tuple[str, ...] = ()
    """The matrices that may differ from the checkpoint's."""
    error: str = ""
    """Why the last order was not carried out."""
    last_contact: float = 0.0


def ledger_of(model: torch.nn.Module) -> Ledger:
    return model.__dict__.setdefault("_mezzo_ledger", Ledger())  # type: ignore[no-any-return]


@torch.no_grad()
def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Carry out an order on this rank's shards of the model.

    It never raises, since an exception would end SGLang's scheduler and with it the requests of all clients. The client asks.
    """
    ledger = ledger_of(model)
    try:
        _carry_out(model, ledger, dict(named_tensors))
        ledger.error = ""
    except Exception as error:
        ledger.error = f"{type(error).__name__}: {error}"


def _carry_out(model: torch.nn.Module, ledger: Ledger, tensors: dict[str, Tensor]) -> None:
    order = Order(**json.loads(tensors.pop(ORDER).cpu().numpy().tobytes()))
    if order.noise != noise.VERSION:
        raise ValueError(f"the run uses noise {order.noise!r}, the server's mezzo {noise.VERSION!r}")
    if order.expected not in (None, ledger.version):
        raise ValueError(f"the weights are {ledger.version or 'the checkpoint'!r}, not {order.expected!r}")
    trained = [TrainedTensor(name, tuple(shape), "matrix", rank, decay) for name, shape, rank, decay in order.tensors]
    updates = [Update(tuple((seed, coef) for seed, coef in terms), keep) for terms, keep in order.updates]
    names = {*tensors, *(t.name for t in trained)}
    shards = _model_shards(model, names)
    if missing := sorted(names - set(shards)):
        raise ValueError(f"the server has no adapters on {missing[0]}")
    ledger.version = f"{order.version} (incomplete)"  # what the weights are if the next lines fail
    ledger.moved = tuple(
        {**dict.fromkeys(ledger.moved), **dict.fromkeys(tensors), **dict.fromkeys(t.name for t in trained)}
    )
    for name, tensor in tensors.items():
        shards[name].load(tensor)
    # Low-rank factors are ±1 whatever the kind of dense noise.
    MatrixShards(trained, shards, NoiseSource("rademacher", next(model.parameters()).device)).apply(updates)
    ledger.version, ledger.owner, ledger.base_name = order.version, order.owner, order.base_name
    ledger.last_contact = time.monotonic()
    if order.is_base:
        ledger.version, ledger.owner, ledger.moved = "", "", ()


def answer(model: torch.nn.Module, question: str) -> list[float]:
    """Answer a client's question: JSON, one value for each rank, as the numbers that SGLang's `/get_weights_by_name` returns."""
    try:
        value = _answer(model, *question.split(" "))
    except Exception as error:  # the other ranks wait for this one
        value = {"error": f"{type(error).__name__}: {error}"}
    return [float(byte) for byte in json.dumps(hooks.gather(value)).encode()]


def _answer(model: torch.nn.Module, question: str, client: str = "") -> Any:
    ledger = ledger_of(model)
    if question == DIGESTS:
        return [
            [name, shard.rows, shard.cols, str(shard.weight.dtype).removeprefix("torch."), digest_part(shard.weight)]
            for name, shard in _model_shards(model, ledger.moved).items()
        ]
    if client and client == ledger.owner:
        ledger.last_contact = time.monotonic()
    facts = {"noise": noise.VERSION, "silent_seconds": time.monotonic() - ledger.last_contact}
    return asdict(ledger) | facts | {"makes_adapters": hooks.converts_adapters(), "sampler": SAMPLER}


def _model_shards(model: torch.nn.Module, names: Collection[str]) -> dict[str, Shard]:
    """Those of the matrices that lie in layers that SGLang has given adapters, by Hugging Face tensor name."""
    shards = model_shards(model)
    paths = {name: sglang_path(name.removesuffix(".weight")) for name in names}
    return {name: shards[path] for name, path in paths.items() if path in shards}
