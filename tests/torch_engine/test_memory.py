"""A full-parameter step takes the memory of its forward and of two modules, on a CPU as on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.weights import reference_ops
from mezzo.engines.torch.weights.noise import MAX_CACHED_BYTES
from mezzo.method.space import Space
from mezzo.types import Batch, Probe, Update
from tests.conftest import make_batch


def large_engine(dtype: torch.dtype, kind: Any, device: str = "cpu") -> tuple[TorchEngine, Batch]:
    """Two layers as wide as RoBERTa-large's, and short prompts: weights take more memory than activations."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "intermediate_size": 4096}
    config = RobertaConfig(vocab_size=2000, max_position_embeddings=66, type_vocab_size=1, **sizes)
    model = RobertaForMaskedLM(config).to(dtype)
    return TorchEngine(model, Space("full"), noise_kind=kind, device=device), make_batch(2, lengths=(4, 8))


def step_of(engine: TorchEngine, batch: Batch) -> None:
    engine.score(batch, [Probe(((7, 1e-3),)), Probe(((7, -1e-3),))])
    engine.apply([Update(((7, 2.0**-17),), keep=1 - 2.0**-10)])


def beside(engine: TorchEngine) -> int:
    """What is beside the two modules: both members of the vectors and their noise, in float32, and some small change."""
    return 4 * 4 * sum(held.values.numel() for held in engine.population.flat_buffers) + 2**20


class Live(TorchDispatchMode):
    """Bytes of torch storages made under it that are alive, and the most there were."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.there = {tensor.untyped_storage()._cdata for tensor in weights}
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.there:
                    self.held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.held = {key: value for key, value in self.held.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.held.values()))
        return out


def peak(engine: TorchEngine, work: Any) -> int:
    """The most that was allocated beside the weights; NumPy's words count as the tensors they become."""
    with Live([*engine.model.parameters(), *engine.model.buffers()]) as live:
        work()
    return live.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_peak_memory_of_a_step(dtype, kind):
    engine, batch = large_engine(dtype, kind)
    inference = peak(engine, lambda: engine.score(batch, [Probe(), Probe()]))
    step = peak(engine, lambda: step_of(engine, batch))
    module = max(value.numel() for name, value in engine.population.large.items() if "embed" not in name)
    print(f"{dtype} {kind}: inference {inference / 2**20:.1f} MiB, step {step / 2**20:.1f} MiB")
    pieces = 8 * 4 * reference_ops.CPU_CHUNK_ELEMENTS  # a matrix is worked on a piece at a time
    remembered = (
        MAX_CACHED_BYTES if kind == "gaussian" else sum(v.numel() for v in engine.population.large.values()) // 8
    )
    assert step <= inference + 2 * module * 4 + beside(engine) + pieces + remembered  # members are float32 on a CPU
