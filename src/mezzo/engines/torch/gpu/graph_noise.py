"""`fused`'s work, laid out for graphs: nothing that changes from step to step passes through the host, so that a captured
forward can be replayed at other seeds and scales. Points with more than one direction are left to `fused`."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.engines.torch.forward.probe_point import ProbePoint
from mezzo.engines.torch.gpu.fused import DeviceNoise, FusedOps
from mezzo.engines.torch.gpu.kernels import norms
from mezzo.engines.torch.gpu.kernels.streams import Streams, Turned, moved_rows
from mezzo.engines.torch.gpu.noise_layout import portions
from mezzo.engines.torch.weights.flat_buffer import FlatBuffer
from mezzo.engines.torch.weights.noise import ALIGN
from mezzo.types import TrainedTensor


class GraphOps(FusedOps):
    """Keeps the noise of thin factors for the length of a forward, in room that is made once."""

    kernels = True

    def __init__(self, source: DeviceNoise, compute: torch.dtype) -> None:
        super().__init__(source)
        self.compute = compute
        self._lora: dict[int, tuple[FlatBuffer, Streams, Tensor]] = {}
        self._thin: Streams | None = None
        self._below: list[tuple[int, Tensor]] = []
        self._turned: Turned | None = None
        self.factor_at: dict[str, int] = {}
        """Where the factor `NAME/U` or `NAME/V` of a tensor begins in `factor_noise`."""

    def prepare(self, trained: list[TrainedTensor], flats: list[FlatBuffer], large: dict[str, Tensor]) -> None:
        """Room for the noise of LoRA's factors and of the factors of low-rank noise; matrices whose signs are made together."""
        for flat in flats:
            if any(slot.trained.kind in ("lora_A", "lora_B") for slot in flat.slots):
                streams = Streams(self.source.kind, flat.named, self.source.device, self.compute)
                parts = torch.empty((3, flat.values.numel()), device=self.source.device, dtype=self.compute)
                streams.values = parts[2]
                self._lora[id(flat)] = flat, streams, parts
        named: list[tuple[str, int]] = []
        end = 0
        for one in (t for t in trained if t.rank):
            for side, size in zip("UV", one.shape, strict=True):
                named.append((f"{one.name}/{side}", size * one.rank))
                self.factor_at[named[-1][0]] = end
                end += -(-size * one.rank // ALIGN) * ALIGN
        if named:
            self._thin = Streams("rademacher", named, self.source.device, self.compute)
        dense = [(t, large[t.name]) for t in trained if t.name in large and not t.rank and t.kind != "embedding"]
        self.share_signs([[(t.name, value.numel()) for t, value in part] for part in portions(dense)])

    @property
    def factor_noise(self) -> Tensor:
        assert self._thin is not None
        return self._thin.values

    def lora_parts(self, flat: FlatBuffer) -> Tensor:
        """[3, n]: a flat buffer of LoRA factors as a sum of two, and its noise, at the point that was begun."""
        return self._lora[id(flat)][2]

    def keep_turned(self, start: int, rows: Tensor) -> None:
        """Let rows[rank, n] hold the factor that begins at `start` of `factor_noise`, at every point of one direction."""
        self._below.append((start, rows))

    def begin(self, point: ProbePoint) -> None:
        super().begin(point)
        if not point.single:
            return
        for flat, streams, parts in self._lora.values():
            parts[0].copy_(flat.values)
            torch.sub(flat.values, parts[0], out=parts[1])
            streams.fill(point.keys)
        if self._thin:
            self._thin.fill(point.keys)
        if self._below:
            self._turned = self._turned or Turned(self._below)
            self._turned.fill(self.factor_noise)

    def moved_rows(self, trained: TrainedTensor, value: Tensor, ids: Tensor, point: ProbePoint) -> Tensor:
        if not point.single:
            return super().moved_rows(trained, value, ids, point)
        if trained.rank:
            left, right = self.factors(trained, point)
            moved = (left[ids].float() @ right.T.float()) * (1 / trained.rank**0.5)
            return value[ids].float() + point.scales.view(-1, *[1] * moved.ndim) * moved
        if value.shape[1] % ALIGN:
            whole = torch.empty((len(point.probes), *value.shape), device=value.device)
            self.members(trained, value, point, whole)
            return whole[:, ids]
        key = self.source.keys(trained.name)
        return moved_rows(value, ids, key, point.keys, point.scales, self.source.kind)

    def factors(self, trained: TrainedTensor, point: ProbePoint) -> tuple[Tensor, Tensor]:
        if not point.single:
            return super().factors(trained, point)
        left, right = (
            self.factor_noise[self.factor_at[f"{trained.name}/{side}"] :][: size * trained.rank].view(size, -1)
            for side, size in zip("UV", trained.shape, strict=True)
        )
        return left, right

    def members(self, trained: TrainedTensor, value: Tensor, point: ProbePoint, out: Tensor) -> None:
        if not (point.single and trained.rank):
            return super().members(trained, value, point, out)
        left, right = self.factors(trained, point)
        z = (left.float() @ right.T.float()).mul_(1 / trained.rank**0.5)
        torch.add(value.float(), point.scales.view(-1, 1, 1) * z, out=out)
        return None

    def add_bias(self, y: Tensor, bias: Tensor) -> None:
        if y.is_contiguous():
            norms.add_bias(y, bias)
        else:
            super().add_bias(y, bias)
