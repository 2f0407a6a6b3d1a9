"""Noise as torch tensors: the bits come from `mezzo.method.noise`, this file only spreads them over a device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.errors import ConfigError
from mezzo.method import noise, rounding

CACHED_BYTES = 16 * 2**20
WHOLE_BYTES = CACHED_BYTES // 4
"""A longer stream is made a part at a time and not remembered: noise must not take the room of the weights."""
ALIGN = 64  # tensors laid side by side start at multiples of this many elements: whole words, whatever the kind


class NoiseSource:
    """z of any tensor on one device. Remembers the packed bits of recent (seed, name): a step uses them twice."""

    def __init__(self, kind: noise.Kind, device: torch.device) -> None:
        if kind not in SPREADERS:
            raise ConfigError(f"the torch engine does not implement {kind} noise, only {' and '.join(SPREADERS)}")
        self.kind = kind
        self.device = device
        self._bytes: OrderedDict[tuple[int, str], Tensor] = OrderedDict()
        self._held = 0

    def dense(self, seed: int, name: str, count: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) of the flattened noise of a tensor of `count` elements; `start` is a multiple of 64."""
        stop, per_align = count if stop is None else stop, noise.BITS[self.kind]  # words that ALIGN elements take
        first, last = start // ALIGN * per_align, -(-stop // ALIGN) * per_align
        if self._is_long(count):
            part = self.stream(seed, name, first, last)
        else:
            part = self.packed(seed, name, count)[8 * first : 8 * last]
        return self.spread(part, None)[: stop - start]

    def rounding(self, seed: int, name: str, start: int, stop: int) -> Tensor:
        """Bytes that hold the sixteen rounding bits of each element in [start, stop)."""
        first = start // 4
        found = self.stream(seed, rounding.stream(name), first, -(-stop // 4))
        return found[2 * (start - 4 * first) :][: 2 * (stop - start)]

    def rows(self, seed: int, name: str, shape: tuple[int, int], ids: Tensor) -> Tensor:
        """Rows `ids` of a matrix's noise, without spreading the others."""
        count, width = shape
        words, rest = divmod(width * noise.BITS[self.kind], 64)
        if not rest and self._is_long(count * width):
            distinct, back = torch.unique(ids, return_inverse=True)
            parts = [self.stream(seed, name, words * row, words * (row + 1)) for row in distinct.tolist()]
            return self.spread(torch.cat(parts), None).view(-1, width)[back]
        packed = self.packed(seed, name, count * width)
        per_row, rest = divmod(width * noise.BITS[self.kind], 8)
        if rest:
            return self.spread(packed, None)[: count * width].view(count, width)[ids]
        taken = packed[: count * per_row].view(count, per_row)[ids.reshape(-1)]
        return self.spread(taken.reshape(-1), None).view(*ids.shape, width)

    def factors(self, seed: int, name: str, shape: tuple[int, ...], rank: int) -> tuple[Tensor, Tensor]:
        """±1 factors U[out, r], V[in, r] of low-rank noise."""
        out, inner = shape
        left, right = (
            _signs(self.packed(seed, f"{name}/{side}", size * rank, "rademacher"), None)[: size * rank].view(size, rank)
            for side, size in (("U", out), ("V", inner))
        )
        return left, right

    def _is_long(self, count: int) -> bool:
        return count * noise.BITS[self.kind] > 8 * WHOLE_BYTES

    def packed(self, seed: int, name: str, count: int, kind: noise.Kind | None = None) -> Tensor:
        """The stream's bytes for `count` elements, rounded up to 64 elements, on the device."""
        words = -(-count // ALIGN) * noise.BITS[kind or self.kind]
        return self._remembered((seed, name), lambda: self.stream(seed, name, 0, words))

    def side_by_side(self, seed: int, tensors: Sequence[tuple[str, int]]) -> Tensor:
        """`packed` of several (name, count), one behind the other: one transfer to the device instead of many."""
        key = (seed, "\n".join(name for name, _ in tensors))
        return self._remembered(key, lambda: self._joined(self.kind, seed, tensors))

    def rounding_side_by_side(self, seed: int, tensors: Sequence[tuple[str, int]]) -> Tensor:
        """`rounding` of several whole (name, count), laid out as `side_by_side` lays out their noise."""
        return self._joined("gaussian", seed, [(rounding.stream(name), count) for name, count in tensors])

    def stream(self, seed: int, name: str, first: int, last: int) -> Tensor:
        """Words [first, last) of a stream as bytes on the device."""
        return torch.from_numpy(_bytes(noise.words(seed, name, first, last))).to(self.device, non_blocking=True)

    def _joined(self, kind: noise.Kind, seed: int, tensors: Sequence[tuple[str, int]]) -> Tensor:
        found = [noise.words(seed, name, 0, -(-count // ALIGN) * noise.BITS[kind]) for name, count in tensors]
        return torch.from_numpy(_bytes(np.concatenate(found))).to(self.device, non_blocking=True)

    def _remembered(self, key: tuple[int, str], make: Callable[[], Tensor]) -> Tensor:
        if (found := self._bytes.get(key)) is None:
            found = self._bytes[key] = make()
            self._held += found.numel()
            while self._held > CACHED_BYTES and len(self._bytes) > 1:
                self._held -= self._bytes.popitem(last=False)[1].numel()
        return found

    def spread(self, packed: Tensor, out: Tensor | None) -> Tensor:
        """Packed bytes to float32 values."""
        return SPREADERS[self.kind](packed, out)

    def forget(self) -> None:
        """Drop what was remembered: the step is over."""
        self._bytes.clear()
        self._held = 0


def _bytes(words: noise.Words) -> npt.NDArray[np.uint8]:
    return words.astype("<u8", copy=False).view(np.uint8)


def _signs(packed: Tensor, out: Tensor | None) -> Tensor:
    if packed.device.type == "cpu":
        # One table row of eight signs per byte: 0.2 ns an element, where shifting and masking takes ten times that.
        target = torch.empty(packed.numel() * 8) if out is None else out[: packed.numel() * 8]
        torch.index_select(_sign_table(), 0, packed.int(), out=target.view(-1, 8))
        return target
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    bits = (packed[:, None] >> shifts) & 1
    return _placed(torch.where(bits.bool(), -1.0, 1.0).flatten(), out)


def _normals(packed: Tensor, out: Tensor | None) -> Tensor:
    lanes = packed.view(torch.int16).int().bitwise_and(0xFFFF).bitwise_right_shift(4)
    return _placed(quantiles(packed.device)[lanes], out)


def _placed(values: Tensor, out: Tensor | None) -> Tensor:
    return values if out is None else out[: values.numel()].copy_(values)


SPREADERS: dict[noise.Kind, Callable[[Tensor, Tensor | None], Tensor]] = {"rademacher": _signs, "gaussian": _normals}
"""Packed bytes to values, by the kind of noise."""


@cache
def _sign_table() -> Tensor:
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(1 - 2 * bits.astype(np.float32))


@cache
def quantiles(device: torch.device) -> Tensor:
    return torch.from_numpy(noise.quantiles()).to(device)
