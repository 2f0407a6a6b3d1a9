"""Every architecture that vLLM is used with: a tiny random one scores there, with adapters, as on the torch engine."""

from __future__ import annotations

from typing import Any

import pytest

from mezzo.engines import open_engine
from mezzo.engines.base import EngineSpec
from mezzo.engines.vllm import support
from mezzo.errors import ModelError
from mezzo.method.space import Space
from tests.sglang.conftest import PAIR, candidates_batch, distance, words_batch
from tests.sglang.tiny_models import CAUSAL, GROUPED, save_tiny
from tests.vllm.conftest import open_both_engines

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
# vLLM's attention on a CPU has no kernel for heads of 16, which suffice elsewhere.
WIDER = {"hidden_size": 128, "word_embed_proj_dim": 128, "head_dim": 32, "query_pre_attn_scalar": 32}


def tiny(model_type: str, folder: Any) -> str:
    settings = {name: WIDER.get(name, value) for name, value in CAUSAL.get(model_type, GROUPED).items()}
    return save_tiny(model_type, folder, **settings)


@pytest.mark.parametrize("model_type", support.ARCHITECTURES)
def test_scores_are_those_of_the_torch_engine(model_type, tmp_path):
    space = Space("lora", rank=2, targets=("all-linear",))
    spec = EngineSpec(tiny(model_type, tmp_path), "causal", space, rows=8, seed=3, threads=1)
    for ours, reference in open_both_engines(spec):
        for batch in (words_batch(6), candidates_batch()):
            assert distance(ours.score(batch, PAIR), reference.score(batch, PAIR)) < 1e-4
        assert ours.digest() == reference.digest()


def test_a_model_without_a_kernel_is_refused_at_start(tmp_path):
    model = save_tiny("llama", tmp_path, **GROUPED)
    with pytest.raises(ModelError, match=r"vLLM cannot run this model: .*head_dim=16"):
        open_engine("vllm", EngineSpec(model, "causal", Space("lora"), rows=4, threads=1))
