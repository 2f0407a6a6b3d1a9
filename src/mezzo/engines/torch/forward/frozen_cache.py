"""The frozen layers below the first trained one: their output is a constant of each example, computed once and kept.

An example's state is always computed alone and unpadded, whether it is then kept or not. So scores do not depend on what is in
the cache, on its size, or on which examples share a micro-batch; only whether there is a cache at all shows, in rounding.

Where every layer is frozen and an LM head reads certain positions, only the states at these are kept, and only these are in the
forward: behind the last layer no position attends to another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.engines.torch import catalog
from mezzo.engines.torch.forward.inputs import PaddedRows
from mezzo.engines.torch.forward.modules import Forward
from mezzo.errors import ModelError

MIB = 2**20
Key = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
Inputs = Callable[[Tensor, Tensor | None], dict[str, Any]]


class _StopForward(Exception):
    """The state has been computed, and is the argument; the layers above need not run."""


class FrozenCache:
    """States of recent examples, at most `limit` bytes of them, and layers that return a given state instead of computing it.

    The states that a forward is given are working memory, as its activations are, and not counted unless they are kept for the
    next one.
    """

    def __init__(self, model: nn.Module, layers: dict[nn.Module, int], limit: int, all_frozen: bool) -> None:
        self.model, self.limit = model, limit
        self.layers = layers
        """The frozen layers, the lowest first, and how many values each returns (0: a bare tensor)."""
        self.all_frozen = all_frozen
        """True: no layer is trained, only what follows the last one."""
        self.requested = self.computed = self.held_bytes = 0
        self._states: OrderedDict[Key, Tensor] = OrderedDict()
        self._output: Tensor | None = None
        self._last: tuple[PaddedRows, int, Tensor, PaddedRows] | None = None
        self._stop_at_last = False

    @contextmanager
    def skip_layers(self, rows: PaddedRows, members: int, inputs: Inputs) -> Iterator[PaddedRows]:
        """Forwards of the rows it yields start at the first trained layer."""
        self.requested += members * rows.count
        if self.all_frozen and rows.positions is not None:
            self._output, seen = self._states_at_positions(rows, members, inputs)
        else:
            self._output, seen = self._padded_states(rows, inputs).repeat(members, 1, 1), rows
        try:
            yield seen
        finally:
            self._output = None

    def replaces(self, layer: nn.Module) -> bool:
        """Whether a layer returns a given state in the current forward."""
        return self._output is not None and layer in self.layers

    def layer_forward(self, layer: nn.Module, inner: Forward) -> Forward:
        """The forward of one of the frozen layers."""
        values, is_last = self.layers[layer], layer is list(self.layers)[-1]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._output is not None:
                return (self._output, *[None] * (values - 1)) if values else self._output
            output = inner(*args, **kwargs)
            if is_last and self._stop_at_last:
                raise _StopForward(output[0] if values else output)
            return output

        return forward

    def describe(self) -> dict[str, Any]:
        """What was saved: of all passes of an example through the frozen layers, how many were computed."""
        saved = 1 - self.computed / self.requested if self.requested else 0.0
        return {
            "frozen_layers": len(self.layers),
            "saved_share": round(saved, 4),
            "held_mb": round(self.held_bytes / MIB, 3),
        }

    def clear(self) -> None:
        self._states.clear()
        self._last = None
        self.held_bytes = 0

    def _padded_states(self, rows: PaddedRows, inputs: Inputs) -> Tensor:
        states = nn.utils.rnn.pad_sequence([self._state(key, inputs) for key in _keys(rows)], batch_first=True)
        return nn.functional.pad(states, (0, 0, 0, rows.ids.shape[1] - states.shape[1]))

    def _states_at_positions(self, rows: PaddedRows, members: int, inputs: Inputs) -> tuple[Tensor, PaddedRows]:
        """Only what is read; that of the last rows is kept stacked, for runs whose every step sees the whole set."""
        if self._last is None or self._last[0] is not rows or self._last[1] != members:
            if self._last is not None:
                self.held_bytes -= _size(self._last[2])
                self._last = None
            keys = _keys(rows, with_positions=True)
            states = torch.stack([self._state(key, inputs) for key in keys]).repeat(members, 1, 1)
            latest = rows, members, states, _rows_at_positions(rows)
            if self.held_bytes + _size(states) > self.limit:
                return latest[2:]
            self._last = latest
            self.held_bytes += _size(states)
        return self._last[2:]

    def _state(self, key: Key, inputs: Inputs) -> Tensor:
        if (cached := self._states.get(key)) is not None:
            self._states.move_to_end(key)
            return cached
        self.computed += 1
        self._stop_at_last = True
        ids, segments, positions = key
        try:
            self.model(**inputs(torch.tensor([ids]), torch.tensor([segments]) if segments else None))
        except _StopForward as stop:
            state = stop.args[0][0, list(positions)] if positions else stop.args[0][0].clone()
        else:
            raise ModelError(
                f"{type(self.model).__name__} did not run its last frozen layer, whose output was to be cached: use --cache-mb 0"
            )
        finally:
            self._stop_at_last = False
        self._states[key] = state
        self.held_bytes += _size(state)
        while self.held_bytes > self.limit and self._states:
            self.held_bytes -= _size(self._states.popitem(last=False)[1])
        return state


def find(model: nn.Module, changed: set[nn.Module], limit: int) -> FrozenCache | None:
    """A cache of the layers that have run when the first module `changed` by training runs; None where there are none, or no
    memory for it."""
    trace = catalog.trace_modules(model)
    order = trace.order
    first = min((order[module] for module in changed if module in order), default=0)
    stacks = [
        list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and all(c in order for c in m)
    ]
    if not stacks or not limit:
        return None
    stack = max(stacks, key=len)  # experts and the like are lists too, but not deeper than the stack they are in
    if not trace.repeated.isdisjoint(stack):  # ALBERT passes through one layer many times
        return None
    below = [layer for layer in stack if max(order[module] for module in layer.modules() if module in order) < first]
    layers = {layer: trace.output_values[layer] for layer in below}
    return FrozenCache(model, layers, limit, len(below) == len(stack)) if below else None


def _keys(rows: PaddedRows, with_positions: bool = False) -> Iterator[Key]:
    """Ids and segments of each example without padding, and on request the positions that are read."""
    ids = rows.ids.tolist()
    segments = rows.segments.tolist() if rows.segments is not None else [[]] * len(ids)
    positions = rows.positions.tolist() if with_positions and rows.positions is not None else [[]] * len(ids)
    for row, segment, read, length in zip(ids, segments, positions, rows.mask.sum(1).tolist(), strict=True):
        yield tuple(row[:length]), tuple(segment[:length]), tuple(read)


def _rows_at_positions(rows: PaddedRows) -> PaddedRows:
    """The rows as if they were the positions that are read and nothing else."""
    assert rows.positions is not None
    ids = rows.ids.gather(1, rows.positions)
    segments = rows.segments.gather(1, rows.positions) if rows.segments is not None else None
    return replace(rows, ids=ids, mask=torch.ones_like(ids), segments=segments, has_padding=False)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
