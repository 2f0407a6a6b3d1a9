"""Masked language models on SGLang: this package's own model, trained through SGLang's adapters, in process and on a server."""

from __future__ import annotations

import dataclasses
import shlex

import numpy as np
import pytest

from mezzo.engines import open_engine
from mezzo.engines.base import EngineSpec
from mezzo.engines.sglang.model_facts import mask_token_of
from mezzo.engines.sglang.server.loader import LOADER
from mezzo.engines.sglang.server.replica import Replica
from mezzo.errors import ModelError
from mezzo.method.space import Space
from mezzo.types import Batch, Probe
from tests.sglang.conftest import PAIR, UPDATES, distance, open_both_engines, update
from tests.sglang.servers import Server
from tests.sglang.tiny_models import MASKED, masked_batch, save_tiny

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
ROBERTA = EngineSpec("mezzo/roberta-mini", "masked", Space("lora", rank=4, alpha=8), rows=8, seed=3, threads=1)
ATTENTION = Space("matrices", noise_rank=4, only=("*attention*",))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """BERT in process, its matrices over two ranks."""
    model = save_tiny("bert", tmp_path_factory.mktemp("bert"), "masked", **MASKED["bert"])
    yield from open_both_engines(dataclasses.replace(ROBERTA, model=model, space=Space("matrices", noise_rank=4), tp=2))


@pytest.mark.parametrize("vocabulary", [False, True])
@pytest.mark.parametrize("probes", [(Probe(),), PAIR], ids=["base", "pair"])
def test_scores_match_torch_engine(bert, probes, vocabulary):
    ours, reference = bert
    batch = masked_batch(vocabulary)
    scores = ours.score(batch, probes)
    assert distance(scores, reference.score(batch, probes)) < 1e-4
    if len(probes) > 1:
        assert np.abs(scores[0] - scores[1]).max() > 1e-3


def test_same_updates_give_same_digest_as_torch_engine(bert):
    ours, reference = bert
    assert ours.base_digest == reference.base_digest and ours.trained == reference.trained
    for step in range(20):
        for engine in bert:
            engine.apply([update((30 + step, 1e-3), keep=0.9999)])
    assert ours.digest() == reference.digest()
    assert distance(ours.score(masked_batch(), PAIR), reference.score(masked_batch(), PAIR)) < 1e-4


def test_encoder_takes_no_tokens_from_the_cache(bert):
    bert[0].score(masked_batch(), PAIR)
    assert bert[0].token_counts.cached == 0


# ---- RoBERTa on a server, started as the refusal of another server says


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    command = shlex.split(Replica("http://127.0.0.1:1", "m", None, mask_token=mask_token_of(ROBERTA)).command)
    name, _, package = command[0].partition("=")
    options = command[command.index("--is-embedding") :]
    started = Server(
        ROBERTA.model,
        tmp_path_factory.mktemp("server") / "log",
        targets=("q_proj", "k_proj", "v_proj", "o_proj"),
        more=(*options, "--custom-weight-loader", LOADER),
        environment={name: package},
    )
    try:
        yield started.ready()
    finally:
        started.kill()


def at_masks(batch: Batch) -> Batch:
    """The batch with a mask wherever it is read."""
    mask = mask_token_of(ROBERTA)
    placed = [(*p.ids[: p.position], mask, *p.ids[p.position + 1 :]) for p in batch.prompts]
    prompts = tuple(dataclasses.replace(p, ids=ids) for p, ids in zip(batch.prompts, placed, strict=True))
    return dataclasses.replace(batch, prompts=prompts)


@pytest.mark.parametrize("space", [ROBERTA.space, ATTENTION], ids=["lora", "matrices"])
def test_server_scores_and_updates_as_the_torch_engine_does(server, space):
    spec = dataclasses.replace(ROBERTA, space=space)
    reference = open_engine("torch", spec)
    ours = open_engine("sglang", dataclasses.replace(spec, urls=(server.url,), exclusive_server=True))
    try:
        for engine in (ours, reference):
            engine.apply(UPDATES)
        for vocabulary in (False, True):
            batch = at_masks(masked_batch(vocabulary))
            scores = ours.score(batch, PAIR)
            assert distance(scores, reference.score(batch, PAIR)) < 1e-4
            assert np.abs(scores[0] - scores[1]).max() > 1e-3
        assert ours.digest() == reference.digest()
        with pytest.raises(ModelError, match="first mask of a prompt"):
            ours.score(masked_batch(), PAIR)
    finally:
        ours.close()
