"""What needs no SGLang: rows and their shared prefixes, the map of fused and split weights, names, versions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mezzo.engines.sglang.matrices import Matrices, Piece
from mezzo.engines.sglang.rows import SHARED, common_prefix, rows_of, shared_prompts
from mezzo.engines.sglang.shards import parts_of
from mezzo.engines.sglang.support import module_of, served
from mezzo.engines.sglang.tensor_parts import assembled
from mezzo.engines.sglang.versions import check_version
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.errors import ConfigError, ModelError
from mezzo.types import Batch, Prompt, Readout, TrainedTensor, Update

# Layers as SGLang describes them to its workers: sizes and a rank, under the names of their classes.


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


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 2), (4, 2), (2, 4), (8, 1)])
def test_parts_of_all_ranks_tile_each_matrix(ranks, kv_heads):
    """Every element of every Hugging Face matrix lies on a rank, where the fused layer has it; key heads may lie on several."""
    heads, size, inner = 8, 4, 16
    shapes = {"q_proj": (32, 32), "k_proj": (kv_heads * size, 32), "v_proj": (kv_heads * size, 32)}
    shapes |= {"gate_proj": (inner, 32), "up_proj": (inner, 32), "down_proj": (32, inner)}
    whole = {name: np.arange(np.prod(shape)).reshape(shape) for name, shape in shapes.items()}
    seen = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for rank in range(ranks):
        layers = {
            "m.qkv_proj": QKVParallelLinear(rank, ranks, heads, kv_heads, size),
            "m.gate_up_proj": MergedColumnParallelLinear(rank, ranks, inner, 32),
            "m.down_proj": RowParallelLinear(rank, ranks, inner, 32),
        }
        for path, layer in layers.items():
            parts = list(parts_of(path, layer))
            fused = np.concatenate([whole[p.module[2:]][slice(*p.rows), slice(*p.cols)] for p in parts])
            for index, part in enumerate(parts):
                assert part.index == index
                name = part.module.removeprefix("m.")
                share = whole[name][slice(*part.rows), slice(*part.cols)]
                np.testing.assert_array_equal(fused[part.local_rows], share)
                seen[name][slice(*part.rows), slice(*part.cols)] += 1
    replicas = max(1, ranks // kv_heads)
    for name, count in seen.items():
        assert (count == (replicas if name in ("k_proj", "v_proj") else 1)).all(), name


def test_an_unknown_layer_is_refused():
    with pytest.raises(ModelError, match="cannot map"):
        list(parts_of("m.o_proj", object()))


def test_pieces_of_ranks_are_put_together():
    trained = [TrainedTensor("a.weight", (4, 2), "matrix", 1)]
    value = np.arange(8, dtype=np.float32).reshape(4, 2)
    ranks = [[Piece("a.weight", (2 * r, 2 * r + 2), (0, 2), value[2 * r : 2 * r + 2])] for r in range(2)]
    np.testing.assert_array_equal(assembled(trained, ranks)["a.weight"], value)


def batch(*prompts, kind="words"):
    return Batch(tuple(prompts), Readout(kind, words=(1, 2) if kind == "words" else ()))


def test_a_causal_row_ends_where_it_is_read():
    rows = rows_of(batch(Prompt((5, 6, 7, 8), position=1), Prompt((5, 6, 7))))
    assert [(row.ids, row.where) for row in rows] == [((5, 6), (0, 0)), ((5, 6, 7), (1, 0))]
    assert rows_of(batch(Prompt((5, 6, 7, 8), position=1)), causal=False)[0].ids == (5, 6, 7, 8)


def test_a_prefix_stops_before_what_is_read():
    long = tuple(range(100, 140))
    rows = rows_of(batch(Prompt((*long, 1, 2)), Prompt((*long, 3)), Prompt((*long, 1))))
    assert common_prefix(rows) == long
    rows = rows_of(batch(Prompt(long), Prompt((*long, 3))))
    assert common_prefix(rows) == long[:-1], "the last position of the shorter prompt must be computed"
    assert common_prefix(rows[:1]) == ()
    assert common_prefix(rows_of(batch(Prompt(long[: SHARED - 1] + (1, 2)), Prompt(long[: SHARED - 1] + (3, 4))))) == ()


def test_candidates_share_their_prompt():
    long = tuple(range(100, 130))
    rows = rows_of(
        batch(
            Prompt(long, candidates=((1,), (2, 3))),
            Prompt((9, *long), candidates=((1,),)),
            Prompt((8, 7), candidates=((1,), (2,))),
            kind="candidates",
        )
    )
    assert shared_prompts(rows, 0) == [long[:-1]], "one candidate shares with nobody, and two tokens are not worth it"
    assert [row.start for row in rows if row.where[0] == 0] == [len(long) - 1] * 2


def test_names_of_the_encoder():
    assert served("roberta.encoder.layer.3.attention.self.query") == "layers.3.q_proj"
    assert served("roberta.encoder.layer.3.attention.output.dense") == "layers.3.o_proj"
    assert served("roberta.encoder.layer.3.output.dense") == "layers.3.down_proj"
    assert served("model.layers.0.mlp.up_proj") == "model.layers.0.mlp.up_proj"
    assert module_of("model.layers.0.mlp.up_proj.lora_A.weight") == "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("version", ["0.4.9", "0.5.16", "0.5.24", "0.6.0", "main"])
def test_other_versions_are_refused_with_the_remedy(version):
    with pytest.raises(ConfigError, match="pip install sglang=="):
        check_version(version)


def test_supported_versions():
    assert check_version("0.5.23") == "0.5.23"
    assert check_version("0.5.17.post1") == "0.5.17.post1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_shares_of_a_fused_weight_move_as_the_whole_does(dtype, ranks):
    """Updated part by part on every rank, rounding included, the fused weights are those of whole tensors bit for bit."""
    heads, kv_heads, size, inner = 8, 2, 4, 16
    shapes = {
        "q_proj": (32, 32),
        "k_proj": (8, 32),
        "v_proj": (8, 32),
        "gate_proj": (inner, 32),
        "up_proj": (inner, 32),
    }
    shapes |= {"down_proj": (32, inner)}
    trained = [TrainedTensor(f"m.{name}.weight", shape, "matrix", 2) for name, shape in shapes.items()]
    torch.manual_seed(0)
    whole = {t.name: torch.randn(t.shape).to(dtype) for t in trained}
    updates = [Update(((3, 2**-10), (9, -(2**-9))), keep=1 - 2**-8), Update(((4, 2**-8),))]

    reference = Population(
        [(t, whole[t.name].clone()) for t in trained], NoiseSource("rademacher", torch.device("cpu"))
    )
    reference.replay(updates)
    for rank in range(ranks):
        layers = {
            "m.qkv_proj": QKVParallelLinear(rank, ranks, heads, kv_heads, size),
            "m.gate_up_proj": MergedColumnParallelLinear(rank, ranks, inner, 32),
            "m.down_proj": RowParallelLinear(rank, ranks, inner, 32),
        }
        places = {}
        for path, layer in layers.items():
            parts = list(parts_of(path, layer))
            shares = [whole[f"{p.module}.weight"][slice(*p.rows), slice(*p.cols)] for p in parts]
            layer.weight = torch.nn.Parameter(torch.cat(shares).contiguous(), requires_grad=False)
            places |= {f"{part.module}.weight": (part, layer) for part in parts}
        matrices = Matrices(trained, places, NoiseSource("rademacher", torch.device("cpu")))
        for update in updates:
            matrices.apply(update)
        for each in trained:
            part = places[each.name][0]
            expected = reference.value(each.name)[slice(*part.rows), slice(*part.cols)]
            assert matrices.view(each).dtype == dtype
            assert torch.equal(matrices.view(each), expected), each.name
            assert not torch.equal(matrices.view(each), whole[each.name][slice(*part.rows), slice(*part.cols)])
