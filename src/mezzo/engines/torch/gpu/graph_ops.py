"""`FusedOps` for CUDA graphs: nothing that changes from step to step passes through the host, so that a captured forward can be
replayed at other seeds and scales. Points with more than one direction are left to `FusedOps`."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.engines.torch.forward.probe_point import ProbePoint
from mezzo.engines.torch.gpu.fused_ops import DeviceNoise, FusedOps
from mezzo.engines.torch.gpu.kernels import norms
from mezzo.engines.torch.gpu.kernels.noise_buffer import NoiseBuffer, TransposedFactors, perturb_rows
from mezzo.engines.torch.gpu.noise_layout import split_by_size
from mezzo.engines.torch.weights.flat_buffer import FlatBuffer
from mezzo.engines.torch.weights.noise import ALIGN
from mezzo.method.noise import Kind
from mezzo.types import TrainedTensor


class _LoraBuffer:
    """LoRA factors of a flat buffer as `lowrank.Factors` takes them: components[3, n] are high part, low part and noise."""

    def __init__(self, kind: Kind, flat: FlatBuffer, compute: torch.dtype) -> None:
        self.flat = flat
        self.components = torch.empty((3, flat.values.numel()), device=flat.values.device, dtype=compute)
        self.noise = NoiseBuffer(kind, flat.sizes, self.components[2])

    def fill(self, seed: Tensor) -> None:
        self.components[0].copy_(self.flat.values)
        torch.sub(self.flat.values, self.components[0], out=self.components[1])
        self.noise.fill(seed)


class GraphOps(FusedOps):
    """Keeps the noise of low-rank factors in memory during a forward, in buffers that are allocated once."""

    def __init__(self, source: DeviceNoise, compute: torch.dtype) -> None:
        super().__init__(source)
        self.compute = compute
        self._lora: dict[int, _LoraBuffer] = {}
        self._factor_buffer: NoiseBuffer | None = None
        self.factor_noise = torch.empty(0)
        """U and V of every tensor with low-rank noise, at the point of the current forward."""
        self._copies: list[tuple[int, Tensor]] = []
        self._transposed: TransposedFactors | None = None
        self.factor_offsets: dict[str, int] = {}
        """Where the factor `NAME/U` or `NAME/V` of a tensor begins in `factor_noise`."""

    def allocate(self, trained: list[TrainedTensor], flats: list[FlatBuffer], large: dict[str, Tensor]) -> None:
        """Allocate buffers for the noise of LoRA factors and of low-rank factors; group matrices by their signs."""
        for flat in flats:
            if any(entry.trained.kind in ("lora_A", "lora_B") for entry in flat.entries):
                self._lora[id(flat)] = _LoraBuffer(self.source.kind, flat, self.compute)
        sizes: list[tuple[str, int]] = []
        end = 0
        for each in (t for t in trained if t.rank):
            for side, size in zip("UV", each.shape, strict=True):
                sizes.append((f"{each.name}/{side}", size * each.rank))
                self.factor_offsets[sizes[-1][0]] = end
                end += -(-size * each.rank // ALIGN) * ALIGN
        if sizes:
            self.factor_noise = torch.empty(end, device=self.source.device, dtype=self.compute)
            self._factor_buffer = NoiseBuffer("rademacher", sizes, self.factor_noise)
        dense = [(t, large[t.name]) for t in trained if t.name in large and not t.rank and t.kind != "embedding"]
        self.group_signs([[(t.name, value.numel()) for t, value in group] for group in split_by_size(dense)])

    def lora_components(self, flat: FlatBuffer) -> Tensor:
        """[3, n]: a flat buffer of LoRA factors as a sum of two, and its noise, at the point of the current forward."""
        return self._lora[id(flat)].components

    def keep_transposed(self, offset: int, target: Tensor) -> None:
        """Copy the factor at `offset` of `factor_noise`, transposed, to target[rank, n] before each forward."""
        self._copies.append((offset, target))

    def begin_forward(self, point: ProbePoint) -> None:
        super().begin_forward(point)
        if not point.single:
            return
        for lora in self._lora.values():
            lora.fill(point.keys)
        if self._factor_buffer:
            self._factor_buffer.fill(point.keys)
        if self._copies:
            self._transposed = self._transposed or TransposedFactors(self._copies)
            self._transposed.fill(self.factor_noise)

    def perturb_rows(self, trained: TrainedTensor, value: Tensor, ids: Tensor, point: ProbePoint) -> Tensor:
        if not point.single:
            return super().perturb_rows(trained, value, ids, point)
        if trained.rank:
            left, right = self.factors(trained, point)
            z = (left[ids].float() @ right.T.float()) * (1 / trained.rank**0.5)
            return value[ids].float() + point.scales.view(-1, *[1] * z.ndim) * z
        if value.shape[1] % ALIGN:
            matrix = torch.empty((len(point.probes), *value.shape), device=value.device)
            self.perturb_matrix(trained, value, point, matrix)
            return matrix[:, ids]
        key = self.source.keys(trained.name)
        return perturb_rows(value, ids, key, point.keys, point.scales, self.source.kind)

    def factors(self, trained: TrainedTensor, point: ProbePoint) -> tuple[Tensor, Tensor]:
        if not point.single:
            return super().factors(trained, point)
        left, right = (
            self.factor_noise[self.factor_offsets[f"{trained.name}/{side}"] :][: size * trained.rank].view(size, -1)
            for side, size in zip("UV", trained.shape, strict=True)
        )
        return left, right

    def perturb_matrix(self, trained: TrainedTensor, value: Tensor, point: ProbePoint, out: Tensor) -> None:
        if point.single and trained.rank:
            left, right = self.factors(trained, point)
            z = (left.float() @ right.T.float()).mul_(1 / trained.rank**0.5)
            torch.add(value.float(), point.scales.view(-1, 1, 1) * z, out=out)
        else:
            super().perturb_matrix(trained, value, point, out)

    def add_bias(self, y: Tensor, bias: Tensor) -> None:
        if y.is_contiguous():
            norms.add_bias(y, bias)
        else:
            super().add_bias(y, bias)
