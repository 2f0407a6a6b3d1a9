"""`ReferenceOps` on a GPU: noise, perturbation and update in few kernels. Same weights, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezzo.engines.torch.forward.probe_point import DeviceUpdate, ProbePoint, words_on
from mezzo.engines.torch.gpu.kernels import flat_buffer, matrices, philox, rounding
from mezzo.engines.torch.gpu.noise_layout import Matrix, NoiseGroup, SignLayout, UpdateLaunch, group_matrices
from mezzo.engines.torch.weights.flat_buffer import FlatBuffer
from mezzo.engines.torch.weights.noise import ALIGN, NoiseSource, quantiles
from mezzo.engines.torch.weights.reference_ops import ReferenceOps
from mezzo.method import noise
from mezzo.method.rounding import stream_name
from mezzo.types import TrainedTensor

# Signs of a factor's row that fit into the kernel's number; noise of a higher rank is left to plain torch.
MAX_RANK = 32
DTYPES = {torch.float32: rounding.FLOAT32, torch.bfloat16: rounding.BFLOAT16, torch.float16: rounding.FLOAT16}
# Launch of kernels that generate noise: as many chunks of 64 elements as threads, so that each thread generates one.
GENERATE = {"CHUNKS": 128, "num_warps": 4}
# Launch of kernels that read ±1 noise from memory: each thread generates the rounding bits of sixteen elements.
READ = {"CHUNKS": 32, "num_warps": 4}
# Elements. Stacked matrices whose sizes are multiples of it have their signs one behind the other without a gap.
STACK_ALIGN = ALIGN * matrices.WORDS_PER_PROGRAM
# A product and a sum are rounded separately, as everywhere else.
NO_FMA = {"enable_fp_fusion": False}
WORDS_BLOCK = 256


class DeviceNoise(NoiseSource):
    """Streams generated on the device: only seeds are sent there."""

    def __init__(self, kind: noise.Kind, device: torch.device) -> None:
        super().__init__(kind, device)
        self._keys: dict[tuple[str, ...], Tensor] = {}
        self._seeds: dict[int, Tensor] = {}

    def stream(self, seed: int, name: str, first: int, last: int) -> Tensor:
        return self._words(seed, name, last - first, first, None, 1)

    def rows(self, seed: int, name: str, shape: tuple[int, ...], ids: Tensor) -> Tensor:
        """Generates only the words of these rows, where rows are whole words."""
        words_per_row, rest = divmod(shape[1] * noise.BITS[self.kind], 64)
        if rest:
            return super().rows(seed, name, shape, ids)
        packed = self._words(seed, name, ids.numel() * words_per_row, 0, ids.contiguous(), words_per_row)
        return self.unpack(packed).view(*ids.shape, shape[1])

    def _words(self, seed: int, name: str, count: int, first: int, rows: Tensor | None, words_per_row: int) -> Tensor:
        out = torch.empty(count, dtype=torch.int64, device=self.device)
        if count:
            keys = self.keys(name)
            if seed not in self._seeds:
                self._seeds[seed] = words_on(self.device, [seed])
            with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]  # kernels run on the current GPU
                philox.words[(-(-count // WORDS_BLOCK),)](
                    *(out, count, first, keys if rows is None else rows, words_per_row, self._seeds[seed], keys),
                    SELECT_ROWS=rows is not None,
                    BLOCK=WORDS_BLOCK,
                )
        return out.view(torch.uint8)

    def keys(self, *names: str) -> Tensor:
        """The keys of each tensor's streams: its noise, its rounding bits, and the factors U and V of low-rank noise."""
        if names not in self._keys:
            streams = [stream for name in names for stream in (name, stream_name(name), f"{name}/U", f"{name}/V")]
            self._keys[names] = words_on(self.device, [noise.name_hash(stream) for stream in streams])
        return self._keys[names]

    def clear_cache(self) -> None:
        super().clear_cache()
        self._seeds.clear()


class FusedOps(ReferenceOps):
    """Kernels for flat buffers and for matrices; what they do not cover is left to plain torch."""

    source: DeviceNoise
    uses_kernels = True

    def __init__(self, source: DeviceNoise) -> None:
        super().__init__(source)
        self._chunk_tables: weakref.WeakKeyDictionary[FlatBuffer, tuple[Tensor, Tensor]] = weakref.WeakKeyDictionary()
        self._noise_groups: dict[tuple[tuple[str, int], ...], list[NoiseGroup]] = {}
        self._sign_layouts: dict[str, SignLayout] = {}
        self._signs: tuple[SignLayout, ProbePoint, Tensor] | None = None
        """The signs in memory, and what they are those of."""

    def begin_forward(self, point: ProbePoint) -> None:
        self._signs = None

    def perturb_flat(self, flat: FlatBuffer, point: ProbePoint) -> Tensor:
        out = torch.empty(len(point.probes), flat.values.numel(), device=self.source.device)
        self._perturb(flat.values, out, *self._chunk_table(flat), point)
        return out

    def perturb_matrix(self, trained: TrainedTensor, value: Tensor, point: ProbePoint, out: Tensor) -> None:
        if trained.rank or not point.seeds:
            super().perturb_matrix(trained, value, point, out)
        elif point.single:
            self.perturb_stacked([trained], value, point, out)
        else:
            self._perturb(value, out, self.source.keys(trained.name), None, point)

    def perturb_stacked(self, trained: Sequence[TrainedTensor], value: Tensor, point: ProbePoint, out: Tensor) -> None:
        """Along one direction; sizes of several matrices are multiples of `STACK_ALIGN`."""
        assert len(trained) == 1 or value.numel() % (len(trained) * STACK_ALIGN) == 0
        count, chunks_per_matrix = value.numel(), -(-value.numel() // len(trained) // ALIGN)
        keys = self.source.keys(*(each.name for each in trained))
        if self.source.kind == "rademacher":
            signs, launch = self._generate_signs(trained, point), READ
        else:
            signs, launch = keys, GENERATE
        matrices.perturb[_grid(count, launch)](
            value, out, count, chunks_per_matrix, signs, keys, point.keys, point.scales, quantiles(self.source.device),
            MEMBERS=len(point.probes), KIND=philox.KINDS[self.source.kind], **launch, **NO_FMA,
        )  # fmt: skip

    def group_signs(self, groups: Sequence[Sequence[tuple[str, int]]]) -> None:
        """Generate the signs of all (name, elements) of a group when those of one are needed: a forward needs all."""
        for sizes in groups:
            layout = SignLayout(sizes, self.source.device)
            self._sign_layouts |= dict.fromkeys(layout.offsets, layout)

    def update_flat(self, flat: FlatBuffer, device_update: DeviceUpdate) -> None:
        value = flat.values
        flat_buffer.update[_grid(value.numel(), GENERATE)](
            _bit_patterns(value), value.numel(), *self._chunk_table(flat), device_update.keys, device_update.coefs,
            quantiles(self.source.device), len(device_update.update.terms), KIND=philox.KINDS[self.source.kind],
            DECAY=flat.decay, DTYPE=DTYPES[value.dtype], **GENERATE, **NO_FMA,
        )  # fmt: skip

    def update_matrices(self, weights: Sequence[Matrix], device_update: DeviceUpdate) -> None:
        """Matrices of one shape in one launch: many small launches would leave most of a GPU idle."""
        for trained, value in weights:
            if trained.rank > MAX_RANK:
                self._update_matrix(trained, value, device_update.update)
        supported = [matrix for matrix in weights if matrix[0].rank <= MAX_RANK]
        key = tuple((trained.name, value.data_ptr()) for trained, value in supported)
        if key not in self._noise_groups:
            self._noise_groups.clear()  # tensors that were moved in memory will not move back
            self._noise_groups[key] = group_matrices(supported, self.source.device)
        for layout, launches in self._noise_groups[key]:
            signs = device_update.keys  # any tensor: dense normal noise is generated in registers
            if layout.rank or self.source.kind == "rademacher":
                signs = layout.generate(device_update.keys, len(device_update.update.terms))
            for launch in launches:
                self._launch_update(launch, signs, device_update)

    def _launch_update(self, launch: UpdateLaunch, signs: Tensor, device_update: DeviceUpdate) -> None:
        rank, value = launch.trained.rank, launch.base
        kind = philox.FACTORS if rank else philox.KINDS[self.source.kind]
        shape = GENERATE if kind == philox.NORMALS else READ
        rows, width = launch.trained.shape if rank else (1, ALIGN)
        matrices.update[(*_grid(value.numel(), shape), len(launch.entries))](
            _bit_patterns(value), value.numel(), launch.entries, device_update.keys, device_update.coefs,
            quantiles(self.source.device), signs, signs.shape[-1], rows, width,
            float(np.float32(1 / np.sqrt(rank))) if rank else 1.0, len(device_update.update.terms),
            RANK=rank, ALIGNED=width % ALIGN == 0, KIND=kind,
            DECAY=launch.trained.decay, DTYPE=DTYPES[value.dtype], **shape, **NO_FMA,
        )  # fmt: skip

    def _perturb(self, value: Tensor, out: Tensor, keys: Tensor, numbers: Tensor | None, point: ProbePoint) -> None:
        count = value.numel()
        flat_buffer.perturb[_grid(count, GENERATE)](
            value, out, count, keys, keys if numbers is None else numbers, point.keys, point.scales,
            quantiles(self.source.device), len(point.seeds), MEMBERS=len(point.probes), SINGLE=point.single,
            KIND=philox.KINDS[self.source.kind], FLAT=numbers is not None, **GENERATE, **NO_FMA,
        )  # fmt: skip

    def _generate_signs(self, trained: Sequence[TrainedTensor], point: ProbePoint) -> Tensor:
        """The signs of these tensors at a point of one direction, generated for their whole group."""
        name = trained[0].name
        if name not in self._sign_layouts:
            self.group_signs([[(each.name, each.shape[0] * each.shape[1]) for each in trained]])
        layout = self._sign_layouts[name]
        if self._signs is None or self._signs[0] is not layout or self._signs[1] is not point:
            self._signs = None  # free the previous group's first
            self._signs = layout, point, layout.generate(point.keys, 1)
        return self._signs[2][0, layout.offsets[name] :]

    def _chunk_table(self, flat: FlatBuffer) -> tuple[Tensor, Tensor]:
        if flat not in self._chunk_tables:
            self._chunk_tables[flat] = flat_buffer.chunk_table(flat.sizes, self.source.device)
        return self._chunk_tables[flat]


def _grid(count: int, launch: dict[str, Any]) -> tuple[int]:
    return (-(-count // (ALIGN * launch["CHUNKS"])),)


def _bit_patterns(value: Tensor) -> Tensor:
    """16-bit weights as the bit patterns that kernels round."""
    return value if value.dtype == torch.float32 else value.view(torch.int16)
