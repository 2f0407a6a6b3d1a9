"""SGLang's adapter slots, written in place: the buffers its LoRA kernels read, found by Hugging Face module name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.engines.sglang.shards import Part, parts_of
from mezzo.engines.sglang.support import leaf_of, module_of, served
from mezzo.errors import ModelError
from mezzo.types import TrainedTensor


@dataclass(frozen=True, slots=True)
class Place:
    """One Hugging Face matrix in the adapter pool (and, through `layer`, in the base weights)."""

    part: Part
    pool: str
    depth: int
    layer: Any


class Slots:
    """The adapters that mezzo loaded, as places to write. They are made resident before every write: SGLang reloads an
    evicted adapter from the copy it was loaded with, which holds zeros."""

    def __init__(self, manager: Any, names: Sequence[str]) -> None:
        self.manager = manager
        by_name = {ref.lora_name: ref.lora_id for ref in manager.lora_refs.values()}
        self.ids: list[str] = [by_name[name] for name in names]
        self.rank: int = manager.memory_pool.max_lora_rank
        self.places: dict[str, Place] = {}
        self._targets: dict[tuple[int, str, int], tuple[Tensor, Tensor]] = {}
        for depth, modules in enumerate(manager.lora_modules):
            for path, wrapper in modules.items():
                for part in parts_of(path, wrapper.base_layer):
                    self.places[part.module] = Place(part, leaf_of(path), depth, wrapper.base_layer)

    def place(self, module: str) -> Place:
        path = served(module)
        if path not in self.places:
            raise ModelError(f"SGLang's model has no projection {path}; it has {', '.join(list(self.places)[:3])} …")
        return self.places[path]

    def refuse_padding(self, trained: TrainedTensor) -> None:
        """On a CPU SGLang widens layers that do not divide evenly, and its own adapters then do not fit them."""
        part = self.place(module_of(trained.name)).part
        rows = part.rows[1] if trained.kind != "lora_A" else 0
        cols = part.cols[1] if trained.kind != "lora_B" else 0
        if rows > trained.shape[0] or cols > trained.shape[1]:
            raise ModelError(
                f"SGLang pads {part.module} to a size that its adapters do not fit; leave it out with --targets or --only, "
                "choose another --tp, or use --engine torch"
            )

    def resident(self) -> list[int]:
        """Buffer slots of the adapters, loaded if they are not there."""
        self.manager.fetch_new_loras({*self.ids, None})
        return [self.manager.memory_pool.uid_to_buffer_id[adapter] for adapter in self.ids]

    def write(self, written: Iterable[tuple[int, str, Tensor, Tensor]]) -> None:
        """Put A[r, in] and B[out, r] of modules into buffer slots: this rank's share of them, in as few copies as possible."""
        targets: list[Tensor] = []
        values: list[Tensor] = []
        for slot, module, down, up in written:
            key = (slot, module, down.shape[0])
            if key not in self._targets:
                self._targets[key] = self._target(*key)
            part = self.places[served(module)].part
            targets += self._targets[key]
            values += (down[:, slice(*part.cols)], up[slice(*part.rows)])
        if targets:
            torch._foreach_copy_(targets, values)

    def whole(self, slots: Sequence[int], trained: Sequence[TrainedTensor]) -> list[Tensor] | None:
        """The places of LoRA's factors as flat vectors, slot by slot; None where this rank holds a part of one only."""
        found: list[Tensor] = []
        for slot in slots:
            for each in trained:
                first, rank = each.kind == "lora_A", min(each.shape)
                target = self._target(slot, module_of(each.name), rank)[0 if first else 1]
                if target.shape != each.shape or not target.is_contiguous():
                    return None
                found.append(target.view(-1))
        return found

    def _target(self, slot: int, module: str, rank: int) -> tuple[Tensor, Tensor]:
        """Where they go: SGLang's buffers stay where they are, and slicing them anew costs more than the copies."""
        place, pool = self.place(module), self.manager.memory_pool
        first = place.part.index * self.rank
        a: Tensor = pool.A_buffer[place.pool][place.depth][slot, first : first + rank]
        b: Tensor = pool.B_buffer[place.pool][place.depth][slot, place.part.local_rows, :rank]
        return a, b
