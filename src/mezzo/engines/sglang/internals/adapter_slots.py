"""SGLang's adapter slots, written in place: the buffers that its LoRA kernels read, found by Hugging Face module name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.engines.lora_factors import module_of, projection_of
from mezzo.engines.sglang.internals.shards import Shard, layer_shards
from mezzo.engines.sglang.module_names import sglang_path
from mezzo.errors import ModelError
from mezzo.types import TrainedTensor


@dataclass(frozen=True, slots=True)
class AdapterBuffer:
    """Where SGLang's adapter pool holds the factors of one Hugging Face matrix: by projection and layer."""

    shard: Shard
    projection: str
    layer: int


class AdapterSlots:
    """The pool slots of mezzo's own adapters.

    Before every write the adapters are made resident: SGLang would reload an evicted one from the zeros it was loaded with.
    """

    def __init__(self, manager: Any, names: Sequence[str]) -> None:
        self.manager = manager
        by_name = {ref.lora_name: ref.lora_id for ref in manager.lora_refs.values()}
        self.ids: list[str] = [by_name[name] for name in names]
        self.rank: int = manager.memory_pool.max_lora_rank
        self.buffers: dict[str, AdapterBuffer] = {}
        self._views: dict[tuple[int, str, int], tuple[Tensor, Tensor]] = {}
        for layer, modules in enumerate(manager.lora_modules):
            for path, wrapper in modules.items():
                for shard in layer_shards(path, wrapper.base_layer):
                    self.buffers[shard.module] = AdapterBuffer(shard, projection_of(path), layer)

    def buffer(self, module: str) -> AdapterBuffer:
        path = sglang_path(module)
        if path not in self.buffers:
            raise ModelError(
                f"SGLang gives {path} no adapter; leave it out with --targets or --only, or use --engine torch"
            )
        return self.buffers[path]

    def refuse_padding(self, trained: Sequence[TrainedTensor]) -> None:
        """On a CPU SGLang pads layers that do not divide evenly, and its own adapters then do not fit them."""
        for tensor in trained:
            shard = self.buffer(module_of(tensor.name)).shard
            rows = shard.rows[1] if tensor.kind != "lora_A" else 0
            cols = shard.cols[1] if tensor.kind != "lora_B" else 0
            if rows > tensor.shape[0] or cols > tensor.shape[1]:
                raise ModelError(
                    f"SGLang pads {shard.module} to a size that its adapters do not fit; leave it out with --targets or "
                    "--only, choose another --tp, or use --engine torch"
                )

    def resident_names(self) -> list[str]:
        """Names of the adapters in SGLang's pool, mezzo's or not."""
        resident = self.manager.memory_pool.uid_to_buffer_id
        return [self.manager.lora_refs[uid].lora_name for uid in resident if uid is not None]

    def make_resident(self) -> list[int]:
        """Load the adapters into the pool unless they are there; return their slots."""
        self.manager.fetch_new_loras({*self.ids, None})
        return [self.manager.memory_pool.uid_to_buffer_id[adapter] for adapter in self.ids]

    def write(self, factors: Iterable[tuple[int, str, Tensor, Tensor]]) -> None:
        """Write this rank's share of (slot, module, A[r, in], B[out, r]), in as few copies as possible."""
        targets: list[Tensor] = []
        values: list[Tensor] = []
        for slot, module, a, b in factors:
            key = (slot, module, a.shape[0])
            if key not in self._views:
                self._views[key] = self._factor_views(*key)
            shard = self.buffers[sglang_path(module)].shard
            targets += self._views[key]
            values += (a[:, slice(*shard.cols)], b[slice(*shard.rows)])
        if targets:
            torch._foreach_copy_(targets, values)

    def flat_views(self, slots: Sequence[int], trained: Sequence[TrainedTensor]) -> list[Tensor] | None:
        """The buffers of LoRA factors as vectors, slot by slot; None if this rank holds only a part of one of them."""
        views: list[Tensor] = []
        for slot in slots:
            for factor in trained:
                a, b = self._factor_views(slot, module_of(factor.name), min(factor.shape))
                view = a if factor.kind == "lora_A" else b
                if view.shape != factor.shape or not view.is_contiguous():
                    return None
                views.append(view.view(-1))
        return views

    def _factor_views(self, slot: int, module: str, rank: int) -> tuple[Tensor, Tensor]:
        """A and B in SGLang's buffers. These never move, and slicing them again would cost more than the copies."""
        buffer, pool = self.buffer(module), self.manager.memory_pool
        first = buffer.shard.index * self.rank
        a: Tensor = pool.A_buffer[buffer.projection][buffer.layer][slot, first : first + rank]
        b: Tensor = pool.B_buffer[buffer.projection][buffer.layer][slot, buffer.shard.local_rows, :rank]
        return a, b
