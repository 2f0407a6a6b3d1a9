"""What Llama-like layers do between their products, in kernels: on a GPU, or interpreted (TRITON_INTERPRET=1) on a CPU."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from mezzo.method.space import Space
from mezzo.types import Probe
from tests.conftest import make_batch, make_llama
from tests.reference import plain_model, plain_scores
from tests.torch_engine.test_families import FAMILIES, make
from tests.torch_engine.test_kernel_forwards import PAIR, engine_of
from tests.torch_engine.triton_device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
MODELS = {
    "llama": make_llama,
    **{name: (lambda name=name: make(*FAMILIES[name])) for name in ("mistral", "qwen2", "qwen3")},
}
TYPES = {torch.float32: 1e-6, torch.float16: 1e-3}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).normal(size=shape)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [8, 24])
@pytest.mark.parametrize("own", [False, True], ids=["one-table", "a-table-a-row"])
def test_rotary_positions_equal_those_of_transformers(dtype, size, own):
    from mezzo.engines.torch.gpu.kernels import decoder

    rows, length, heads, groups = 3, 5, 6, 2
    query, key = (normal(rows, length, count * size, dtype=dtype) for count in (heads, groups))
    cos, sin = (normal(rows if own else 1, length, size + extra, dtype=dtype)[..., :size] for extra in (0, 1))
    by_head = [x.double().view(rows, length, -1, size).transpose(1, 2) for x in (query, key)]
    expected = apply_rotary_pos_emb(*by_head, cos.double(), sin.double())
    decoder.rotate(query, key, cos.contiguous(), sin.contiguous())
    for found, wanted in zip((query, key), expected, strict=True):
        wanted = wanted.transpose(1, 2).reshape(found.shape)
        assert (found.double() - wanted).norm() < TYPES[dtype] * wanted.norm()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gate_equals_silu_times_up(dtype):
    from mezzo.engines.torch.gpu.kernels import decoder

    gate, up = 20 * normal(7, 700, dtype=dtype), normal(7, 700, dtype=dtype)
    wanted = torch.nn.functional.silu(gate.double()) * up.double()
    found = decoder.gate(gate, up)
    assert found.data_ptr() == gate.data_ptr()
    assert (found.double() - wanted).norm() < TYPES[dtype] * wanted.norm()
    assert torch.isfinite(found).all(), "the exponential of a large number is hidden"


@pytest.mark.parametrize("probes", [PAIR, (Probe(), Probe()), (Probe(((7, 0.02), (8, 0.01))), Probe())],
                         ids=["a-pair", "no-direction", "two-directions"])  # fmt: skip
@pytest.mark.parametrize("family", MODELS)
def test_scores_equal_a_plain_model_with_perturbed_weights(family, probes, monkeypatch):
    """At any point, and computed by kernels: every layer's gate, every norm, and positions of query and key but for those
    of the last layer, which is trimmed."""
    from mezzo.engines.torch.gpu.kernels import decoder, norms

    ran: Counter[str] = Counter()
    for place, name in ((decoder, "rotate"), (decoder, "gate"), (norms, "norm")):
        real = getattr(place, name)

        def counted(*arguments, name=name, real=real, **options):
            ran[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(place, name, counted)
    model = MODELS[family]()
    pristine, batch, space = copy.deepcopy(model), make_batch(4), Space("lora", rank=4, alpha=8)
    engine = engine_of(model, space)
    found = engine.score(batch, probes)
    layers = model.config.num_hidden_layers
    norms = 2 * layers + 1 + (2 * layers if family == "qwen3" else 0)
    forwards = ran["gate"] // layers
    assert forwards >= 1
    wanted = {"rotate": (layers - 1) * forwards, "gate": layers * forwards, "norm": norms * forwards}
    assert {name: count for name, count in wanted.items() if count} == dict(ran)
    expected = [
        plain_scores(plain_model(pristine, engine.trained, engine.state(), "rademacher", probe, space), batch)
        for probe in probes
    ]
    for _ in range(1 if INTERPRETED else 3):  # as it comes, captured, replayed
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)
        found = engine.score(batch, probes)
