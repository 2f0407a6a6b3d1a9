"""Where one rank holds the Hugging Face matrices: SGLang fuses query, key and value (gate and up), and splits over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mezzo.engines.lora_factors import projection_of
from mezzo.engines.sglang.module_names import FUSED
from mezzo.errors import RunFailed


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a Hugging Face matrix: its rows and columns [start, stop), and where SGLang's layer holds them.

    Noise is keyed by Hugging Face name and global index, so this is all that a rank has to know.
    """

    module: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    layer: Any
    offset: int
    """The first row of the shard in the layer's weight."""
    index: int
    """Its place among the matrices that the layer fuses."""

    @property
    def local_rows(self) -> slice:
        return slice(self.offset, self.offset + self.rows[1] - self.rows[0])

    @property
    def weight(self) -> Tensor:
        """The shard itself, a view of the layer's weight."""
        return self.layer.weight.data[self.local_rows]

    def load(self, matrix: Tensor) -> None:
        """Copy this rank's share of the complete matrix into its place."""
        self.weight.copy_(matrix[slice(*self.rows), slice(*self.cols)])


def layer_shards(path: str, layer: Any) -> Iterator[Shard]:
    """The shards in one of SGLang's linear layers (fused or not) at a module path."""
    kind = next((c.__name__ for c in type(layer).__mro__ if c.__name__ in _LAYOUTS), None)
    if kind is None:
        raise RunFailed(f"{path} is a {type(layer).__name__}, which this engine cannot map to Hugging Face weights")
    blocks, cols = _LAYOUTS[kind](layer)
    projection = projection_of(path)
    names = FUSED.get(projection, (projection,))
    if len(names) != len(blocks):
        raise RunFailed(f"{path} holds {len(blocks)} matrices where {len(names)} were expected")
    offset = 0
    for index, (name, (start, count)) in enumerate(zip(names, blocks, strict=True)):
        yield Shard(path.removesuffix(projection) + name, (start, start + count), cols, layer, offset, index)
        offset += count


def model_shards(model: nn.Module) -> dict[str, Shard]:
    """The shards in all layers that SGLang has given adapters, by module."""
    shards: dict[str, Shard] = {}
    for path, module in model.named_modules():
        if (layer := getattr(module, "base_layer", None)) is not None:
            shards |= {shard.module: shard for shard in layer_shards(path, layer)}
    return shards


# (first global row, number of rows) of each matrix in the layer, and the range of global columns.
Layout = tuple[list[tuple[int, int]], tuple[int, int]]


def _qkv(layer: Any) -> Layout:
    rank, query, kv = _rank(layer), layer.q_proj_shard_size, layer.kv_proj_shard_size
    shard = rank // layer.num_kv_head_replicas  # key-value heads fewer than ranks are replicated
    return [(rank * query, query), (shard * kv, kv), (shard * kv, kv)], (0, layer.input_size)


def _column_parallel(layer: Any) -> Layout:
    rank = _rank(layer)
    return [(rank * size, size) for size in layer.output_partition_sizes], (0, layer.input_size)


def _row_parallel(layer: Any) -> Layout:
    rank, size = _rank(layer), layer.input_size_per_partition
    return [(0, layer.output_size)], (rank * size, (rank + 1) * size)


def _replicated(layer: Any) -> Layout:
    return [(0, layer.output_size)], (0, layer.input_size)


_LAYOUTS = {
    "QKVParallelLinear": _qkv,
    "MergedColumnParallelLinear": _column_parallel,
    "ColumnParallelLinear": _column_parallel,
    "RowParallelLinear": _row_parallel,
    "ReplicatedLinear": _replicated,
}


def _rank(layer: Any) -> int:
    """The layer's rank. Newer layers hold their group instead; without a group they are not split."""
    if hasattr(layer, "tp_rank"):
        return int(layer.tp_rank)
    group = getattr(layer, "tp_group", None)
    return 0 if group is None else int(group.rank_in_group)
