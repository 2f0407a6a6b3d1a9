"""One forward for several points in weight space: who the members are, and their weights, made just in time.

Members are stacked in the batch dimension, member by member: activations are [P·B, …]. The trained tensors live here. Small
ones (LoRA factors, norms, biases) share one flat buffer, so that perturbing and updating all of them is a handful of operations;
large matrices are perturbed one at a time into scratch that all layers share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo import noise
from mezzo.engines.torch.noise import ALIGN, NoiseSource
from mezzo.errors import ModelError
from mezzo.types import Probe, Trained, Update

SMALL = 64 * 1024  # elements; a larger matrix is perturbed on its own


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a small tensor lies in its flat buffer."""

    trained: Trained
    start: int
    count: int


class Flat:
    """Small tensors of one decay setting in one buffer; gaps up to the next word belong to nobody."""

    def __init__(self, tensors: Sequence[tuple[Trained, Tensor]]) -> None:
        self.slots: list[Slot] = []
        end = 0
        for trained, tensor in tensors:
            self.slots.append(Slot(trained, end, tensor.numel()))
            end += -(-tensor.numel() // ALIGN) * ALIGN
        device = tensors[0][1].device
        self.values = torch.zeros(end, device=device)
        self.decay = tensors[0][0].decay
        for slot, (_, tensor) in zip(self.slots, tensors, strict=True):
            self.values[slot.start : slot.start + slot.count] = tensor.detach().flatten()

    def view(self, slot: Slot) -> Tensor:
        return self.values[slot.start : slot.start + slot.count].view(slot.trained.shape)

    def noise(self, source: NoiseSource, seed: int) -> Tensor:
        packed = source.packed_side_by_side(seed, [(slot.trained.name, slot.count) for slot in self.slots])
        return source.spread(packed, None)


class Population:
    """The trained tensors and, while a forward runs, the members' versions of them."""

    def __init__(
        self, tensors: Sequence[tuple[Trained, Tensor]], source: NoiseSource, frozen: Mapping[str, Tensor] | None = None
    ) -> None:
        self.source = source
        self.frozen = dict(frozen or {})  # LoRA factors that take part in the forward but are not trained
        self.trained = {trained.name: trained for trained, _ in tensors}
        small = [(t, v) for t, v in tensors if not _is_large(t, v)]
        self.large = {t.name: v.detach() for t, v in tensors if _is_large(t, v)}
        self.flats = [
            Flat(group) for decay in (True, False) if (group := [(t, v) for t, v in small if t.decay == decay])
        ]
        self._views = {slot.trained.name: flat.view(slot) for flat in self.flats for slot in flat.slots}
        self._scratch: dict[str, Tensor] = {}
        self._small: dict[str, Tensor] = {}
        self.probes: tuple[Probe, ...] = ()
        self.rows = 0
        self.length = 0
        self.diverged = False
        """True while members read tokens of their own: text that each of them generated."""
        self.words: Tensor | None = None
        self.gather: Tensor | None = None

    # ---- the weights themselves

    def value(self, name: str) -> Tensor:
        """The unperturbed tensor."""
        for held in (self.large, self._views, self.frozen):
            if name in held:
                return held[name]
        raise KeyError(name)

    def replay(self, updates: Sequence[Update]) -> None:
        """One update after the other; each ends a step, so its noise is not needed again."""
        for update in updates:
            if not update.empty:
                self.apply(update)
            self.source.forget()

    def apply(self, update: Update) -> None:
        """θ ← fl(keep·θ), then fl(θ − fl(c·z)) term by term: separate operations, so that every machine rounds alike."""
        terms = [(seed, coef) for seed, coef in update.terms if coef != 0.0]
        for flat in self.flats:
            _decay(flat.values, update.keep, flat.decay)
            for seed, coef in terms:
                flat.values.sub_(flat.noise(self.source, seed).mul_(coef))
        for name, tensor in self.large.items():
            trained = self.trained[name]
            _decay(tensor, update.keep, trained.decay)
            for seed, coef in terms:
                tensor.sub_(self.unit_noise(trained, seed).mul_(noise.factor_scale(coef, trained.rank)))

    def unit_noise(self, trained: Trained, seed: int) -> Tensor:
        """A large tensor's noise in scratch; low-rank noise as the integers U·Vᵀ, without its 1/√r."""
        if trained.rank:
            left, right = self.source.factors(seed, trained.name, trained.shape, trained.rank)
            flat = self.scratch("noise", left.shape[0] * right.shape[0], left.device)
            return torch.mm(left, right.T, out=flat.view(trained.shape))
        count = self.large[trained.name].numel()
        room = self.scratch("noise", -(-count // ALIGN) * ALIGN, self.source.device)
        return self.source.dense(seed, trained.name, count, room).view(trained.shape)

    def scratch(self, use: str, count: int, device: torch.device) -> Tensor:
        """A buffer that all layers share; grown to the largest."""
        held = self._scratch.get(use)
        if held is None or held.numel() < count:
            held = self._scratch[use] = torch.empty(count, device=device)
        return held[:count]

    # ---- the members of a forward

    @contextlib.contextmanager
    def at(self, probes: Sequence[Probe]) -> Iterator[None]:
        """Forwards inside compute every row block at its own probe."""
        self.probes = tuple(probes)
        self._small = self._small_members() if any(probe.terms for probe in probes) else {}
        try:
            yield
        finally:
            self.diverged = False
            self.probes, self._small, self.rows, self.length, self.words, self.gather = (), {}, 0, 0, None, None

    @property
    def members(self) -> int:
        return len(self.probes)

    @property
    def perturbed(self) -> bool:
        return any(probe.terms for probe in self.probes)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(seed for probe in self.probes for seed, _ in probe.terms))

    def scales(self) -> Tensor:
        """[P, K]: the scale of seed k at member m."""
        table = [[sum(scale for s, scale in probe.terms if s == seed) for seed in self.seeds] for probe in self.probes]
        return torch.tensor(table, dtype=torch.float32, device=self.source.device)

    def member(self, name: str) -> Tensor:
        """[P, *shape] of a small tensor; a view of one row when nothing is perturbed."""
        if (found := self._small.get(name)) is not None:
            return found
        value = self.value(name)
        return value.expand(self.members, *value.shape)

    def member_matrix(self, name: str) -> Tensor:
        """[P, *shape] of a large tensor with dense noise, in scratch: use it before asking for another."""
        trained, value = self.trained[name], self.large[name]
        out = self.scratch("members", self.members * value.numel(), value.device).view(self.members, *value.shape)
        written = [False] * self.members
        for seed in self.seeds:
            z = self.unit_noise(trained, seed)
            for index, probe in enumerate(self.probes):
                for _, scale in (term for term in probe.terms if term[0] == seed):
                    scale = noise.factor_scale(scale, trained.rank)
                    torch.add(out[index] if written[index] else value, z, alpha=scale, out=out[index])
                    written[index] = True
        for index in range(self.members):
            if not written[index]:
                out[index] = value
        return out

    def member_rows(self, name: str, ids: Tensor) -> Tensor:
        """[P, *ids.shape, width]: rows of a matrix at each member, without perturbing the rest of it."""
        trained = self.trained[name]
        if name not in self.large:
            return self.member(name)[:, ids]
        picked = self.large[name][ids]
        if not self.perturbed:
            return picked.expand(self.members, *picked.shape)
        noises = torch.stack([self._noise_rows(trained, seed, ids) for seed in self.seeds])
        scales = self.scales() if not trained.rank else self.factor_scales(trained.rank)
        return picked + torch.tensordot(scales, noises, dims=1)

    def factor_scales(self, rank: int) -> Tensor:
        """[P, K] scales of the integer products U·Vᵀ."""
        return self.scales() * (1 / rank**0.5)

    def split(self, tensor: Tensor, module: str) -> Tensor:
        """[P·B, …] → [P, B, …]. A leading 1 (a position table) is the same row for everyone, and sequences may come
        flattened into rows (OPT): [P·B·L, …] → [P, B·L, …]."""
        lead = self.members * self.rows
        if tensor.shape[0] == 1 and lead != 1:
            return tensor.expand(lead, *tensor.shape[1:]).reshape(self.members, self.rows, *tensor.shape[1:])
        if tensor.shape[0] == lead * self.length and tensor.ndim == 2:
            return tensor.reshape(self.members, self.rows * self.length, *tensor.shape[1:])
        if tensor.shape[0] != lead:
            raise ModelError(
                f"{module} gets an input of leading size {tensor.shape[0]} where {lead} rows were expected; "
                "this architecture cannot be perturbed in one forward"
            )
        return tensor.reshape(self.members, self.rows, *tensor.shape[1:])

    def _noise_rows(self, trained: Trained, seed: int, ids: Tensor) -> Tensor:
        rows, width = trained.shape
        if trained.rank:
            left, right = self.source.factors(seed, trained.name, trained.shape, trained.rank)
            return left[ids] @ right.T
        return self.source.rows(seed, trained.name, (rows, width), ids)

    def _small_members(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for flat in self.flats:
            noises = torch.stack([flat.noise(self.source, seed) for seed in self.seeds])
            values = torch.addmm(flat.values, self.scales(), noises)
            for slot in flat.slots:
                block = values[:, slot.start : slot.start + slot.count]
                found[slot.trained.name] = block.reshape(self.members, *slot.trained.shape)
        return found


def _is_large(trained: Trained, tensor: Tensor) -> bool:
    """Matrices of the model that are worth perturbing one at a time. Vectors and LoRA factors never are."""
    if trained.rank:
        return True
    return tensor.ndim == 2 and tensor.numel() > SMALL and trained.kind not in ("lora_A", "lora_B")


def _decay(tensor: Tensor, keep: float, decays: bool) -> None:
    if decays and keep != 1.0:
        tensor.mul_(keep)
