"""One forward for several points in weight space: its members, and their weights, made just in time.

Members are stacked in the batch dimension, member by member: activations are [P·B, …]. The trained tensors live here. Small
ones (LoRA factors, norms, biases) share one flat buffer, so that perturbing and updating all of them is a handful of operations;
large matrices are perturbed one at a time into scratch that all layers share.
"""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.engines.torch.forward.probe_point import DeviceUpdate, ProbePoint
from mezzo.engines.torch.gpu.availability import kernel_refusal
from mezzo.engines.torch.weights.flat_buffer import group_flat_buffers, is_large
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.engines.torch.weights.reference_ops import ReferenceOps
from mezzo.errors import ModelError
from mezzo.types import Probe, TrainedTensor, Update


@dataclass(slots=True)
class ForwardContext:
    """One forward pass of a population. `Population.context` holds the current one."""

    point: ProbePoint
    """The members; without any, every module computes what its own code says."""
    rows: int = 0
    """Rows of each member."""
    length: int = 0
    """Tokens of a row."""
    words: Tensor | None = None
    """Label words whose logits are read; None: those of the whole vocabulary."""
    positions: Tensor | None = None
    """[P·rows, k]: the positions whose hidden states are still to be selected; None: none, or it has been done."""
    own_tokens: bool = False
    """True where members read different tokens: the text that each of them generated."""
    trim_last_layer: bool = True
    """False: the last layer computes every position, as its own code does."""

    def claim_positions(self) -> Tensor | None:
        """The positions to select, for the first module that can: it is done once."""
        positions, self.positions = self.positions, None
        return positions


class Population:
    """The trained tensors and, while a forward runs, the members' versions of them.

    Tensors keep the type they come with. `compute` is the type of the activations: members of large matrices are made in it,
    members of everything small in float32, because a step of ε would vanish in 16 bits beside a gain of one.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[TrainedTensor, Tensor]],
        source: NoiseSource,
        frozen: Mapping[str, Tensor] | None = None,
        compute: torch.dtype = torch.float32,
        kernels: bool = True,
    ) -> None:
        self.ops = choose_ops(source, compute) if kernels else ReferenceOps(source)
        self.compute = compute
        self.frozen = dict(frozen or {})  # LoRA factors that take part in the forward but are not trained
        self.trained = {trained.name: trained for trained, _ in tensors}
        self.large = {t.name: v.detach().contiguous() for t, v in tensors if is_large(t, v)}
        self.flat_buffers = group_flat_buffers([(t, v) for t, v in tensors if t.name not in self.large])
        self._views = {entry.trained.name: flat.view(entry) for flat in self.flat_buffers for entry in flat.entries}
        self._values = ChainMap(self.large, self._views, self.frozen)
        self.scratch = torch.empty(0)
        self.context = self._idle()
        self._perturbed_small: dict[str, Tensor] | None = None

    @property
    def source(self) -> NoiseSource:
        return self.ops.source

    # ---- the weights themselves

    def value(self, name: str) -> Tensor:
        """The unperturbed tensor."""
        return self._values[name]

    def apply_all(self, updates: Sequence[Update]) -> None:
        """One update after the other; each ends a step, so its noise is not needed again."""
        for update in updates:
            if not update.empty:
                self.apply(update)
            self.source.clear_cache()

    def apply(self, update: Update) -> None:
        """θ ← keep·θ − Σ c·z, rounded as `update_values` does."""
        self.apply_on_device(DeviceUpdate(update, self.source.device))

    def apply_on_device(self, update: DeviceUpdate) -> None:
        """The same for an update whose seeds and coefficients may be in device memory only."""
        for flat in self.flat_buffers:
            self.ops.update_flat(flat, update)
        self.ops.update_matrices([(self.trained[name], tensor) for name, tensor in self.large.items()], update)

    # ---- the members of a forward

    @contextlib.contextmanager
    def at(self, point: Sequence[Probe] | ProbePoint) -> Iterator[None]:
        """Forwards inside compute every block of rows at its own probe."""
        point = point if isinstance(point, ProbePoint) else ProbePoint(tuple(point), self.source.device)
        self.context = ForwardContext(point)
        try:
            if point.seeds:
                self.ops.begin_forward(point)
            yield
        finally:
            self.context, self._perturbed_small = self._idle(), None

    @contextlib.contextmanager
    def forward(
        self,
        rows: int,
        length: int,
        *,
        words: Tensor | None = None,
        positions: Tensor | None = None,
        own_tokens: bool = False,
        trim_last_layer: bool = True,
    ) -> Iterator[ForwardContext]:
        """The context of one forward pass at the current point; see `ForwardContext` for the arguments."""
        outer = self.context
        self.context = ForwardContext(outer.point, rows, length, words, positions, own_tokens, trim_last_layer)
        try:
            yield self.context
        finally:
            self.context = outer

    def _idle(self) -> ForwardContext:
        return ForwardContext(ProbePoint((), self.source.device))

    @property
    def point(self) -> ProbePoint:
        return self.context.point

    @property
    def members(self) -> int:
        return len(self.context.point.probes)

    @property
    def perturbed(self) -> bool:
        return bool(self.context.point.seeds)

    def member_tensor(self, name: str) -> Tensor:
        """[P, *shape] of a small tensor in float32; one row, seen P times, when nothing is perturbed."""
        if self.perturbed and self._perturbed_small is None:
            self._perturbed_small = self._perturb_small()
        if self._perturbed_small and name in self._perturbed_small:
            return self._perturbed_small[name]
        value = self.value(name).float()
        return value.expand(self.members, *value.shape)

    def member_matrix(self, name: str) -> Tensor:
        """[P, *shape] of a large tensor, in scratch that all layers share: use it before asking for another."""
        out = self._scratch_like(self.large[name])
        self.ops.perturb_matrix(self.trained[name], self.large[name], self.point, out)
        return out

    def stacked_member_matrix(self, names: Sequence[str], value: Tensor) -> Tensor:
        """The same for dense matrices of one shape that are stacked in `value`, in one go."""
        out = self._scratch_like(value)
        self.ops.perturb_stacked([self.trained[name] for name in names], value, self.point, out)
        return out

    def _scratch_like(self, value: Tensor) -> Tensor:
        count = self.members * value.numel()
        if self.scratch.numel() < count or self.scratch.device != value.device:
            self.scratch = torch.empty(0)  # free the smaller one first
            self.scratch = torch.empty(count, device=value.device, dtype=self.compute)
        return self.scratch[:count].view(self.members, *value.shape)

    def member_rows(self, name: str, ids: Tensor) -> Tensor:
        """[P, *ids.shape, width] in float32: rows of a matrix at each member, without perturbing the rest of it."""
        if name not in self.large:
            return self.member_tensor(name)[:, ids]
        if not self.perturbed:
            rows = self.large[name][ids].float()
            return rows.expand(self.members, *rows.shape)
        return self.ops.perturb_rows(self.trained[name], self.large[name], ids, self.point)

    def split(self, tensor: Tensor, module: str) -> Tensor:
        """[P·B, …] → [P, B, …]. A leading 1 (a position table) is the same row for every member, and sequences may come
        flattened into rows (OPT): [P·B·L, …] → [P, B·L, …]."""
        members, rows, length = self.members, self.context.rows, self.context.length
        lead = members * rows
        if tensor.shape[0] == 1 and lead != 1:
            return tensor.expand(lead, *tensor.shape[1:]).reshape(members, rows, *tensor.shape[1:])
        if tensor.shape[0] == lead * length and tensor.ndim == 2:
            return tensor.reshape(members, rows * length, *tensor.shape[1:])
        if tensor.shape[0] != lead:
            raise ModelError(
                f"{module} gets an input of leading size {tensor.shape[0]} where {lead} rows were expected; "
                "this architecture cannot be perturbed in one forward"
            )
        return tensor.reshape(members, rows, *tensor.shape[1:])

    def _perturb_small(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for flat in self.flat_buffers:
            values = self.ops.perturb_flat(flat, self.point)
            for entry in flat.entries:
                block = values[:, entry.start : entry.start + entry.count]
                tensors[entry.trained.name] = block.reshape(self.members, *entry.trained.shape)
        return tensors


def choose_ops(source: NoiseSource, compute: torch.dtype) -> ReferenceOps:
    """Kernels where they can run, plain torch elsewhere: the same weights bit for bit."""
    if kernel_refusal(source.device):
        return ReferenceOps(source)
    from mezzo.engines.torch.gpu.fused_ops import DeviceNoise
    from mezzo.engines.torch.gpu.graph_ops import GraphOps

    return GraphOps(DeviceNoise(source.kind, source.device), compute)
