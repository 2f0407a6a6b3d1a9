"""The frozen layers below the first trained one: their outcome is a constant of each example, computed once and kept.

An example's state is always computed alone and unpadded, whether it is then kept or not. So scores do not depend on what happens
to be in the cache, on its size, or on who shares a micro-batch: only whether there is a cache at all shows, in rounding.

Where every layer is frozen and an LM head reads certain positions, the states of these are all that is kept, and all that the
forward sees: behind the last layer no position looks at another one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.engines.torch import catalog
from mezzo.engines.torch.forward.inputs import Rows
from mezzo.errors import ModelError

MIB = 2**20
Key = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
Inputs = Callable[[Tensor, Tensor | None], dict[str, Any]]


class _Reached(Exception):
    """The state is there; the layers above need not run."""

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state = state


class FrozenCache:
    """States of recent examples, at most `limit` bytes of them, and layers that step aside when a state is given.

    What a forward is given is working memory, as its activations are, and not counted unless it is kept for the next one.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module], shapes: list[int], limit: int, whole: bool) -> None:
        self.model, self.layers, self.limit = model, layers, limit
        self.whole = whole
        """True: no layer is trained, only what follows the last one."""
        self.asked = self.computed = self.held = 0
        self._kept: OrderedDict[Key, Tensor] = OrderedDict()
        self._given: Tensor | None = None
        self._last: tuple[Rows, int, Tensor, Rows] | None = None
        self._stopping = False
        for layer, shape in zip(layers, shapes, strict=True):
            layer.forward = self._stepping_aside(layer.forward, shape, layer is layers[-1])  # type: ignore[method-assign]

    @contextmanager
    def standing_in(self, rows: Rows, members: int, inputs: Inputs) -> Iterator[Rows]:
        """Forwards of the rows it yields start at the first trained layer."""
        self.asked += members * rows.count
        if self.whole and rows.positions is not None:
            self._given, seen = self._read(rows, members, inputs)
        else:
            self._given, seen = self._padded(rows, inputs).repeat(members, 1, 1), rows
        try:
            yield seen
        finally:
            self._given = None

    def _padded(self, rows: Rows, inputs: Inputs) -> Tensor:
        states = nn.utils.rnn.pad_sequence([self._state(key, inputs) for key in _keys(rows)], batch_first=True)
        return nn.functional.pad(states, (0, 0, 0, rows.ids.shape[1] - states.shape[1]))

    def _read(self, rows: Rows, members: int, inputs: Inputs) -> tuple[Tensor, Rows]:
        """Only what is read; that of the last rows is at hand, for runs that see the whole set at every step."""
        if self._last is None or self._last[0] is not rows or self._last[1] != members:
            self._drop_last()
            states = torch.stack([self._state(key, inputs) for key in _keys(rows, narrow=True)]).repeat(members, 1, 1)
            found = rows, members, states, _at_positions(rows)
            if self.held + _size(states) > self.limit:
                return found[2:]
            self._last = found
            self.held += _size(states)
        return self._last[2:]

    def _drop_last(self) -> None:
        if self._last is not None:
            self.held -= _size(self._last[2])
            self._last = None

    def describe(self) -> dict[str, Any]:
        """What was saved: of all passes of an example through the frozen layers, how many were computed."""
        saved = 1 - self.computed / self.asked if self.asked else 0.0
        return {"frozen_layers": len(self.layers), "saved_share": round(saved, 4), "held_mb": round(self.held / MIB, 3)}

    def forget(self) -> None:
        self._kept.clear()
        self._last = None
        self.held = 0

    def _state(self, key: Key, inputs: Inputs) -> Tensor:
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return found
        self.computed += 1
        self._stopping = True
        ids, segments, positions = key
        try:
            self.model(**inputs(torch.tensor([ids]), torch.tensor([segments]) if segments else None))
        except _Reached as reached:
            state = reached.state[0, list(positions)] if positions else reached.state[0].clone()
        else:
            raise ModelError(
                f"{type(self.model).__name__} passed over its last frozen layer, whose outcome was to be kept: use --cache-mb 0"
            )
        finally:
            self._stopping = False
        self._kept[key] = state
        self.held += _size(state)
        while self.held > self.limit and self._kept:
            self.held -= _size(self._kept.popitem(last=False)[1])
        return state

    def _stepping_aside(self, original: Callable[..., Any], shape: int, last: bool) -> Callable[..., Any]:
        def forward(*args: Any, **options: Any) -> Any:
            if self._given is not None:
                return (self._given, *[None] * (shape - 1)) if shape else self._given
            output = original(*args, **options)
            if last and self._stopping:
                raise _Reached(output[0] if shape else output)
            return output

        return forward


def find(model: nn.Module, trained: set[nn.Module], inputs: Mapping[str, Any], limit: int) -> FrozenCache | None:
    """The layers that have run when the first of the `trained` modules runs; None when there are none, or no room."""
    order, shapes, again = catalog.watched(model, inputs)
    first = min((order[module] for module in trained if module in order), default=0)
    stacks = [
        list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and all(c in order for c in m)
    ]
    if not stacks or not limit:
        return None
    stack = max(stacks, key=len)  # experts and the like are lists too, but not deeper than the stack they are in
    if not again.isdisjoint(stack):  # ALBERT passes through one layer many times
        return None
    below = [layer for layer in stack if max(order[module] for module in layer.modules() if module in order) < first]
    return (
        FrozenCache(model, below, [shapes[layer] for layer in below], limit, len(below) == len(stack))
        if below
        else None
    )


def _keys(rows: Rows, narrow: bool = False) -> Iterator[Key]:
    """Ids and segments of each example without padding, and with `narrow` the positions that are read."""
    ids = rows.ids.tolist()
    segments = rows.segments.tolist() if rows.segments is not None else [[]] * len(ids)
    positions = rows.positions.tolist() if narrow and rows.positions is not None else [[]] * len(ids)
    for row, segment, read, length in zip(ids, segments, positions, rows.mask.sum(1).tolist(), strict=True):
        yield tuple(row[:length]), tuple(segment[:length]), tuple(read)


def _at_positions(rows: Rows) -> Rows:
    """The rows as if they were the positions that are read and nothing else."""
    assert rows.positions is not None
    ids = rows.ids.gather(1, rows.positions)
    segments = rows.segments.gather(1, rows.positions) if rows.segments is not None else None
    return replace(rows, ids=ids, mask=torch.ones_like(ids), segments=segments, padded=False)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
