"""On a GPU: the weights of a CPU to the bit, and scores to the precision of the dtype."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from mezzo import api
from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.weights import flat_buffer
from mezzo.method.space import Space
from mezzo.types import Generation, MicroBatch, Probe, Update
from tests.conftest import make_batch, make_llama, make_roberta
from tests.reference import plain_model, plain_scores
from tests.torch_engine.test_families import FAMILIES, PAIR, make
from tests.torch_engine.test_memory import beside, large_engine, step_of

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SPACES = {
    "full": Space("full"),
    "lowrank": Space("full", noise_rank=3),
    "lora": Space("lora", rank=4, alpha=8),
}


def make_updates(count: int) -> list[Update]:
    rng = np.random.default_rng(0)
    return [
        Update(
            tuple((int(rng.integers(2**63)), float(np.float32(rng.normal() * 1e-3))) for _ in range(1 + n % 2)),
            keep=float(np.float32(1 - 1e-4 * (n % 3))),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("small", [flat_buffer.MAX_SMALL_ELEMENTS, 0], ids=["flat", "one-by-one"])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_weights_after_updates_are_those_of_a_cpu(space, kind, dtype, small, monkeypatch):
    monkeypatch.setattr(flat_buffer, "MAX_SMALL_ELEMENTS", small)
    digests = []
    for device in ("cpu", "cuda"):
        engine = TorchEngine(make_roberta().to(dtype), space, noise_kind=kind, device=device)
        engine.apply(make_updates(20))
        digests.append(engine.digest())
    assert engine.population.ops.uses_kernels
    assert digests[0] == digests[1] != TorchEngine(make_roberta().to(dtype), space).digest()


@pytest.mark.parametrize("small", [flat_buffer.MAX_SMALL_ELEMENTS, 0], ids=["flat", "one-by-one"])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_scores_equal_weights_written_in(family, dtype, small, monkeypatch):
    """At most about as far from float32 as an ordinary forward in the dtype, which rounds in another order."""
    monkeypatch.setattr(flat_buffer, "MAX_SMALL_ELEMENTS", small)
    model = make(*family).to(dtype)
    pristine, batch = copy.deepcopy(model).float(), make_batch()
    for space in SPACES.values():
        engine = TorchEngine(copy.deepcopy(model), space, micro_batch=MicroBatch(4), seed=3, pad_id=1, device="cuda")
        engine.check(batch, 1e-2)
        scores = engine.score(batch, PAIR)
        assert np.abs(scores[0] - scores[1]).max() > 1e-3
        for index, probe in enumerate(PAIR):
            twin = plain_model(pristine, engine.trained, engine.state(), "rademacher", probe, space)
            expected = plain_scores(twin, batch)
            ordinary = plain_scores(twin.to("cuda", dtype), batch)
            rounding = max(2e-4, float(torch.finfo(dtype).eps)) * max(1.0, np.abs(expected).max())
            allowed = 2 * np.abs(ordinary - expected).max() + rounding
            assert np.abs(scores[index] - expected).max() <= allowed, space


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("space", ["full", "lora"])
def test_a_run_on_a_gpu_is_verified_and_continued_on_a_cpu(tiny_folder, tiny_data, tmp_path, space, dtype):
    data: dict[str, Any] = {"model": tiny_folder, "task": "sst-2", "train": tiny_data, "dev": tiny_data}
    method = {
        "steps": 20,
        "batch_size": 8,
        "eval_every": 10,
        "lr": 1e-3,
        "eps": 1e-2,
        "weight_decay": 0.1,
        "samples": 2,
    }
    run = api.finetune(**data, **method, space=space, dtype=dtype, device="cuda", out=str(tmp_path / "r"))
    for device in ("cpu", "cuda"):
        found = api.verify(tmp_path / "r", device=device)
        assert found.ok
        assert found.digest == run.digest
    assert api.finetune(resume=str(tmp_path / "r"), steps=24, device="cpu").steps == 24
    assert api.verify(tmp_path / "r", device="cuda").ok


def test_candidates_and_generation_in_16_bits():
    """Causal models run in the dtype; log-probabilities come from float32 logits."""
    engine = TorchEngine(make_llama().to(torch.bfloat16), Space("full"), device="cuda")
    batch = make_batch(3)
    assert len(engine.generate(batch, PAIR, Generation(3))) == 2
    scores = engine.score(batch, PAIR)
    assert scores.dtype == np.float32
    assert len(np.unique(scores.astype(np.float16))) > 0.8 * scores.size  # bfloat16 logits have few distinct values


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_peak_memory_of_a_step(dtype, kind):
    from mezzo.engines.torch.gpu.noise_layout import MAX_SIGN_ELEMENTS

    engine, batch = large_engine(dtype, kind, "cuda")
    engine.graphs = None  # a capture takes as much, and once the workspace of a library
    step_of(engine, batch)  # compile the kernels and allocate the workspaces of libraries

    def peak(work: Any) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated()

    engine.population.scratch = torch.empty(0)
    inference = peak(lambda: engine.score(batch, [Probe(), Probe()]))
    step = peak(lambda: step_of(engine, batch))
    module = max(value.numel() for name, value in engine.population.large.items() if "embed" not in name)
    print(f"{dtype} {kind}: inference {inference / 2**20:.1f} MiB, step {step / 2**20:.1f} MiB")
    signs = MAX_SIGN_ELEMENTS // 8 if kind == "rademacher" else 0
    assert step <= inference + 2 * module * dtype.itemsize + beside(engine) + signs
