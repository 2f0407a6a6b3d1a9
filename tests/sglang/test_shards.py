"""Fused and split weights: where a rank holds each Hugging Face matrix, and updates of its shards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mezzo.engines.lora_factors import module_of
from mezzo.engines.sglang.internals.shards import layer_shards
from mezzo.engines.sglang.matrices import MatrixShards
from mezzo.engines.sglang.module_names import sglang_path
from mezzo.engines.sglang.tensor_parts import TensorPart, assemble_tensors
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.errors import RunFailed
from mezzo.types import TrainedTensor, Update

# Stand-ins for SGLang's layers, which are recognised by class name: sizes and a rank.


class QKVParallelLinear:
    def __init__(self, rank, ranks, heads, kv_heads, size):
        self.tp_rank, self.input_size = rank, heads * size
        self.q_proj_shard_size = heads // ranks * size
        self.num_kv_head_replicas = max(1, ranks // kv_heads)
        self.kv_proj_shard_size = max(1, kv_heads // ranks) * size


class MergedColumnParallelLinear:
    def __init__(self, rank, ranks, inner, size):
        self.tp_rank, self.input_size = rank, size
        self.output_partition_sizes = [inner // ranks] * 2


class RowParallelLinear:
    def __init__(self, rank, ranks, inner, size):
        self.tp_rank, self.output_size = rank, size
        self.input_size_per_partition = inner // ranks


HEADS, HEAD_SIZE, INNER = 8, 4, 16
WIDTH = HEADS * HEAD_SIZE


def make_layers(rank, ranks, kv_heads):
    """The layers of one rank, by module path."""
    return {
        "m.qkv_proj": QKVParallelLinear(rank, ranks, HEADS, kv_heads, HEAD_SIZE),
        "m.gate_up_proj": MergedColumnParallelLinear(rank, ranks, INNER, WIDTH),
        "m.down_proj": RowParallelLinear(rank, ranks, INNER, WIDTH),
    }


def matrix_shapes(kv_heads):
    """The shapes of the Hugging Face matrices that these layers hold."""
    key_value = (kv_heads * HEAD_SIZE, WIDTH)
    shapes = {"q_proj": (WIDTH, WIDTH), "k_proj": key_value, "v_proj": key_value}
    return shapes | {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 2), (4, 2), (2, 4), (8, 1)])
def test_shards_of_all_ranks_tile_each_matrix(ranks, kv_heads):
    """Every element of every matrix is on one rank, at its place in the fused layer; key-value heads may be on several."""
    shapes = matrix_shapes(kv_heads)
    matrices = {name: np.arange(np.prod(shape)).reshape(shape) for name, shape in shapes.items()}
    counts = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for rank in range(ranks):
        for path, layer in make_layers(rank, ranks, kv_heads).items():
            shards = list(layer_shards(path, layer))
            fused = np.concatenate([matrices[s.module[2:]][slice(*s.rows), slice(*s.cols)] for s in shards])
            for index, shard in enumerate(shards):
                assert shard.index == index
                name = shard.module.removeprefix("m.")
                expected = matrices[name][slice(*shard.rows), slice(*shard.cols)]
                np.testing.assert_array_equal(fused[shard.local_rows], expected)
                counts[name][slice(*shard.rows), slice(*shard.cols)] += 1
    replicas = max(1, ranks // kv_heads)
    for name, count in counts.items():
        assert (count == (replicas if name in ("k_proj", "v_proj") else 1)).all(), name


def test_unknown_layer_is_refused():
    with pytest.raises(RunFailed, match="cannot map"):
        list(layer_shards("m.o_proj", object()))


def test_parts_of_all_ranks_are_assembled():
    trained = [TrainedTensor("a.weight", (4, 2), "matrix", 1)]
    value = np.arange(8, dtype=np.float32).reshape(4, 2)
    ranks = [[TensorPart("a.weight", (2 * r, 2 * r + 2), (0, 2), value[2 * r : 2 * r + 2])] for r in range(2)]
    np.testing.assert_array_equal(assemble_tensors(trained, ranks)["a.weight"], value)


def test_sglang_paths_of_modules():
    assert sglang_path("roberta.encoder.layer.3.attention.self.query") == "layers.3.q_proj"
    assert sglang_path("roberta.encoder.layer.3.attention.output.dense") == "layers.3.o_proj"
    assert sglang_path("roberta.encoder.layer.3.output.dense") == "layers.3.down_proj"
    assert sglang_path("model.layers.0.mlp.up_proj") == "model.layers.0.mlp.up_proj"
    assert module_of("model.layers.0.mlp.up_proj.lora_A.weight") == "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_of_shards_equal_updates_of_complete_matrices(dtype, ranks):
    """Bit for bit, with stochastic rounding, on every rank."""
    kv_heads = 2
    trained = [TrainedTensor(f"m.{name}.weight", shape, "matrix", 2) for name, shape in matrix_shapes(kv_heads).items()]
    torch.manual_seed(0)
    initial = {t.name: torch.randn(t.shape).to(dtype) for t in trained}
    updates = [Update(((3, 2**-10), (9, -(2**-9))), keep=1 - 2**-8), Update(((4, 2**-8),))]

    reference = Population(
        [(t, initial[t.name].clone()) for t in trained], NoiseSource("rademacher", torch.device("cpu"))
    )
    reference.apply_all(updates)
    for rank in range(ranks):
        shards = {}
        for path, layer in make_layers(rank, ranks, kv_heads).items():
            layer_map = {f"{shard.module}.weight": shard for shard in layer_shards(path, layer)}
            values = [initial[name][slice(*shard.rows), slice(*shard.cols)] for name, shard in layer_map.items()]
            layer.weight = torch.nn.Parameter(torch.cat(values).contiguous(), requires_grad=False)
            shards |= layer_map
        matrices = MatrixShards(trained, shards, NoiseSource("rademacher", torch.device("cpu")))
        matrices.apply(updates)
        for each in trained:
            shard = shards[each.name]
            index = slice(*shard.rows), slice(*shard.cols)
            assert shard.weight.dtype == dtype
            assert torch.equal(shard.weight, reference.value(each.name)[index]), each.name
            assert not torch.equal(shard.weight, initial[each.name][index])
