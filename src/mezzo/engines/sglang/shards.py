"""Where a Hugging Face matrix lies in one worker: SGLang fuses query, key and value (gate and up), and splits over ranks.

A `Part` is the share of one Hugging Face matrix that this rank holds: which of its rows and columns, and where they begin
in the fused, local weight. Noise is keyed by the Hugging Face name and the global index, so this is all a rank must know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mezzo.engines.sglang.support import FUSED, leaf_of
from mezzo.errors import ModelError


@dataclass(frozen=True, slots=True)
class Part:
    """Rows and columns [start, stop) of the whole matrix; `offset` and `index` place it in the fused module."""

    module: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    offset: int
    index: int

    @property
    def local_rows(self) -> slice:
        return slice(self.offset, self.offset + self.rows[1] - self.rows[0])


def parts_of(path: str, layer: Any) -> Iterator[Part]:
    """The parts of one SGLang linear layer (fused or not) whose module path is `path`."""
    kind = next((c.__name__ for c in type(layer).__mro__ if c.__name__ in _READERS), None)
    if kind is None:
        raise ModelError(f"{path} is a {type(layer).__name__}, which this engine cannot map to Hugging Face weights")
    blocks, cols = _READERS[kind](layer)
    leaf = leaf_of(path)
    names = FUSED.get(leaf, (leaf,))
    if len(names) != len(blocks):
        raise ModelError(f"{path} holds {len(blocks)} matrices where {len(names)} were expected")
    offset = 0
    for index, (name, (start, count)) in enumerate(zip(names, blocks, strict=True)):
        yield Part(path.removesuffix(leaf) + name, (start, start + count), cols, offset, index)
        offset += count


Blocks = tuple[list[tuple[int, int]], tuple[int, int]]
"""(first global row, number of rows) of each matrix in the layer, and the range of global columns."""


def _qkv(layer: Any) -> Blocks:
    rank, query, kv = _rank(layer), layer.q_proj_shard_size, layer.kv_proj_shard_size
    shard = rank // layer.num_kv_head_replicas  # few key heads are repeated over ranks
    return [(rank * query, query), (shard * kv, kv), (shard * kv, kv)], (0, layer.input_size)


def _columns(layer: Any) -> Blocks:
    rank = _rank(layer)
    return [(rank * size, size) for size in layer.output_partition_sizes], (0, layer.input_size)


def _rows(layer: Any) -> Blocks:
    rank, size = _rank(layer), layer.input_size_per_partition
    return [(0, layer.output_size)], (rank * size, (rank + 1) * size)


def _whole(layer: Any) -> Blocks:
    return [(0, layer.output_size)], (0, layer.input_size)


_READERS = {
    "QKVParallelLinear": _qkv,
    "MergedColumnParallelLinear": _columns,
    "ColumnParallelLinear": _columns,
    "RowParallelLinear": _rows,
    "ReplicatedLinear": _whole,
}


def _rank(layer: Any) -> int:
    """Newer layers know their group instead of their rank; no group is no split."""
    if hasattr(layer, "tp_rank"):
        return int(layer.tp_rank)
    group = getattr(layer, "tp_group", None)
    return 0 if group is None else int(group.rank_in_group)
