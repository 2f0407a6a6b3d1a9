"""The trained matrices of one rank, updated in place from (seed, coefficient) in SGLang's fused and split weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from mezzo.engines.arrays import Array, to_numpy, to_tensor
from mezzo.engines.sglang.internals.shards import Shard
from mezzo.engines.sglang.tensor_parts import TensorPart
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.engines.torch.weights.reference_ops import update_values
from mezzo.errors import RunFailed
from mezzo.method import noise, rounding
from mezzo.types import TrainedTensor, Update


class MatrixShards:
    """One rank's shards of the trained matrices, by tensor name."""

    def __init__(self, trained: Sequence[TrainedTensor], shards: Mapping[str, Shard], source: NoiseSource) -> None:
        self.trained, self.shards, self.source = tuple(trained), shards, source
        for each in self.trained:
            shard = shards[each.name]
            shape = tuple(shard.weight.shape)
            if shape != (shard.rows[1] - shard.rows[0], shard.cols[1] - shard.cols[0]):
                raise RunFailed(f"SGLang stores {each.name} in another layout: {shape} on this rank")

    def apply(self, updates: Sequence[Update]) -> None:
        """Update with the rounding that every engine uses; U·Vᵀ has integer entries, exact in any order and on any shard."""
        for update in updates:
            if not update.empty:
                self._apply(update)
            self.source.clear_cache()

    def _apply(self, update: Update) -> None:
        for trained in self.trained:
            scaled = tuple((seed, noise.factor_scale(coef, trained.rank)) for seed, coef in update.terms)
            update_values(
                self.shards[trained.name].weight,
                trained.decay,
                Update(scaled, update.keep),
                lambda seed, t=trained: self._noise(t, seed),  # type: ignore[misc]
                lambda t=trained: self._rounding_bits(t, rounding.first_seed(update)),  # type: ignore[misc]
            )

    def _noise(self, trained: TrainedTensor, seed: int) -> Tensor:
        shard = self.shards[trained.name]
        left, right = self.source.factors(seed, trained.name, trained.shape, trained.rank)
        return left[slice(*shard.rows)] @ right[slice(*shard.cols)].T

    def _rounding_bits(self, trained: TrainedTensor, seed: int) -> Tensor:
        """The rounding bits of a shard, two bytes per element: its columns of complete rows."""
        shard, width = self.shards[trained.name], trained.shape[1]
        rows = self.source.rounding_bits(seed, trained.name, shard.rows[0] * width, shard.rows[1] * width)
        first, last = shard.cols
        return rows.view(-1, 2 * width)[:, 2 * first : 2 * last].contiguous()

    def state(self) -> list[TensorPart]:
        shards = [(t.name, self.shards[t.name]) for t in self.trained]
        return [TensorPart(name, shard.rows, shard.cols, to_numpy(shard.weight)) for name, shard in shards]

    def load(self, tensors: Mapping[str, Array]) -> None:
        """Copy this rank's shares of complete matrices into their places."""
        for name, values in tensors.items():
            self.shards[name].load(to_tensor(values))
