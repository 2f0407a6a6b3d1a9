"""Noise as torch tensors. The bits are those of `mezzo.method.noise`; this module unpacks them on a device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mezzo.engines.torch.gpu.availability import kernel_refusal
from mezzo.errors import ConfigError
from mezzo.method import noise, rounding

MAX_CACHED_BYTES = 16 * 2**20
# A longer stream is generated in parts and not cached: noise must not take as much memory as the weights.
MAX_CACHED_STREAM_BYTES = MAX_CACHED_BYTES // 4
# Elements. Tensors in a flat buffer start at multiples of it, so that each starts with a whole word of any kind of
# noise.
ALIGN = 64


class NoiseSource:
    """z of any tensor on one device. Caches the packed bits of recent (seed, name), because a step uses them twice."""

    def __init__(self, kind: noise.Kind, device: torch.device) -> None:
        if kind not in UNPACK:
            raise ConfigError(f"the torch engine does not implement {kind} noise, only {' and '.join(UNPACK)}")
        self.kind = kind
        self.device = device
        self._cache: OrderedDict[tuple[int, str], Tensor] = OrderedDict()
        self._cached_bytes = 0
        self._elsewhere: dict[torch.device, NoiseSource] = {}

    def on(self, device: torch.device) -> NoiseSource:
        """The same noise on a device."""
        if device.type == self.device.type and self.device.index in (None, device.index):
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = make_source(self.kind, device)
        return self._elsewhere[device]

    def dense(self, seed: int, name: str, count: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) of the flattened noise of a tensor with `count` elements; `start` is a multiple of 64."""
        stop, words_per_align = count if stop is None else stop, noise.BITS[self.kind]
        first, last = start // ALIGN * words_per_align, -(-stop // ALIGN) * words_per_align
        if self._is_long(count):
            packed = self.stream(seed, name, first, last)
        else:
            packed = self.packed_bits(seed, name, count)[8 * first : 8 * last]
        return self.unpack(packed)[: stop - start]

    def rounding_bits(self, seed: int, name: str, start: int, stop: int) -> Tensor:
        """The 16 rounding bits of each element in [start, stop), as two bytes an element."""
        first = start // 4
        packed = self.stream(seed, rounding.stream_name(name), first, -(-stop // 4))
        return packed[2 * (start - 4 * first) :][: 2 * (stop - start)]

    def rows(self, seed: int, name: str, shape: tuple[int, ...], ids: Tensor) -> Tensor:
        """Rows `ids` of a matrix's noise, without unpacking the others where rows are whole words."""
        count, width = shape
        words_per_row, rest = divmod(width * noise.BITS[self.kind], 64)
        if rest:
            return self.dense(seed, name, count * width).view(count, width)[ids]
        if self._is_long(count * width):
            distinct, inverse = torch.unique(ids, return_inverse=True)
            firsts = [words_per_row * row for row in distinct.tolist()]
            parts = [self.stream(seed, name, first, first + words_per_row) for first in firsts]
            return self.unpack(torch.cat(parts)).view(-1, width)[inverse]
        packed = self.packed_bits(seed, name, count * width)[: 8 * words_per_row * count].view(count, -1)
        return self.unpack(packed[ids.reshape(-1)].reshape(-1)).view(*ids.shape, width)

    def factors(self, seed: int, name: str, shape: tuple[int, ...], rank: int) -> tuple[Tensor, Tensor]:
        """±1 factors U[out, r], V[in, r] of low-rank noise."""
        left, right = (
            _unpack_signs(self.packed_bits(seed, f"{name}/{side}", size * rank, "rademacher"))[: size * rank].view(
                size, rank
            )
            for side, size in zip("UV", shape, strict=True)
        )
        return left, right

    def packed_bits(self, seed: int, name: str, count: int, kind: noise.Kind | None = None) -> Tensor:
        """The stream's bytes for `count` elements, rounded up to 64 elements, on the device."""
        words = -(-count // ALIGN) * noise.BITS[kind or self.kind]
        return self._get_cached((seed, name), lambda: self.stream(seed, name, 0, words))

    def flat_packed_bits(self, seed: int, sizes: Sequence[tuple[str, int]]) -> Tensor:
        """`packed_bits` of the (name, elements) of a flat buffer, concatenated: one transfer to the device instead of many."""
        key = (seed, "\n".join(name for name, _ in sizes))
        return self._get_cached(key, lambda: self._concatenate(self.kind, seed, sizes))

    def flat_rounding_bits(self, seed: int, sizes: Sequence[tuple[str, int]]) -> Tensor:
        """`rounding_bits` of whole tensors, in the layout of their flat buffer."""
        return self._concatenate("gaussian", seed, [(rounding.stream_name(name), count) for name, count in sizes])

    def stream(self, seed: int, name: str, first: int, last: int) -> Tensor:
        """Words [first, last) of a stream as bytes on the device."""
        return self._send(noise.words(seed, name, first, last))

    def unpack(self, packed: Tensor) -> Tensor:
        """Packed bytes to float32 values."""
        return UNPACK[self.kind](packed)

    def clear_cache(self) -> None:
        """Drop the cached bits, at the end of a step."""
        self._cache.clear()
        self._cached_bytes = 0
        for source in self._elsewhere.values():
            source.clear_cache()

    def _is_long(self, count: int) -> bool:
        return count * noise.BITS[self.kind] > 8 * MAX_CACHED_STREAM_BYTES

    def _concatenate(self, kind: noise.Kind, seed: int, sizes: Sequence[tuple[str, int]]) -> Tensor:
        words = [noise.words(seed, name, 0, -(-count // ALIGN) * noise.BITS[kind]) for name, count in sizes]
        return self._send(np.concatenate(words))

    def _send(self, words: noise.Words) -> Tensor:
        return torch.from_numpy(words.astype("<u8", copy=False).view(np.uint8)).to(self.device, non_blocking=True)

    def _get_cached(self, key: tuple[int, str], generate: Callable[[], Tensor]) -> Tensor:
        if (packed := self._cache.get(key)) is None:
            packed = self._cache[key] = generate()
            self._cached_bytes += packed.numel()
            while self._cached_bytes > MAX_CACHED_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].numel()
        return packed


def make_source(kind: noise.Kind, device: torch.device) -> NoiseSource:
    """The noise of a device, generated there if it can."""
    if kernel_refusal(device):
        return NoiseSource(kind, device)
    from mezzo.engines.torch.gpu.fused_ops import DeviceNoise  # needs Triton

    return DeviceNoise(kind, device)


def _unpack_signs(packed: Tensor) -> Tensor:
    if packed.device.type == "cpu":
        # One table row of eight signs per byte: 0.2 ns an element, ten times faster than shifting and masking.
        signs = torch.empty(packed.numel() * 8)
        torch.index_select(_sign_table(), 0, packed.int(), out=signs.view(-1, 8))
        return signs
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    bits = (packed[:, None] >> shifts) & 1
    return torch.where(bits.bool(), -1.0, 1.0).flatten()


def _unpack_normals(packed: Tensor) -> Tensor:
    lanes = packed.view(torch.int16).int().bitwise_and(0xFFFF).bitwise_right_shift(4)
    return quantiles(packed.device)[lanes]


UNPACK: dict[noise.Kind, Callable[[Tensor], Tensor]] = {"rademacher": _unpack_signs, "gaussian": _unpack_normals}


@cache
def _sign_table() -> Tensor:
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(1 - 2 * bits.astype(np.float32))


@cache
def quantiles(device: torch.device) -> Tensor:
    """The table of normal quantiles that `gaussian` noise indexes."""
    return torch.from_numpy(noise.quantiles()).to(device)
