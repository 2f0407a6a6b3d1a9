"""The frozen cache: outputs of frozen layers are computed once, and scores do not depend on the size of the cache."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mezzo import api
from mezzo.engines.base import EngineSpec
from mezzo.engines.torch import open_engine
from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.forward.frozen_cache import MIB, FrozenCache
from mezzo.errors import ModelError
from mezzo.journal.content import read
from mezzo.method.space import Space
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout
from tests.conftest import make_batch, make_llama, make_roberta
from tests.torch_engine.test_families import FAMILIES, make

PAIR = (Probe(((7, 0.02),)), Probe(((7, -0.02),)))
UPPER = {
    "full": Space("full", layers="1:"),
    "matrices": Space("matrices", layers="1:", noise_rank=3),
    "lora": Space("lora", rank=4, layers="1:"),
    "prefix": Space("prefix", layers="1:"),
}
MAKERS = {
    **{name: (lambda f=family: make(*f)) for name, family in FAMILIES.items() if name != "albert"},
    "roberta": make_roberta,
    "llama": make_llama,
}


def engine_of(model: Any, space: Space, cache_mb: float, rows: int = 4) -> TorchEngine:
    engine = TorchEngine(copy.deepcopy(model), space, micro_batch=MicroBatch(rows), seed=3, pad_id=1, cache_mb=cache_mb)
    rng = np.random.default_rng(1)
    engine.load_state({n: (v + rng.normal(0, 0.05, v.shape)).astype(np.float32) for n, v in engine.state().items()})
    return engine


@pytest.mark.parametrize("space", UPPER.values(), ids=UPPER)
@pytest.mark.parametrize("family", MAKERS)
def test_scores_equal_those_without_a_cache(family, space):
    model, batch = MAKERS[family](), make_batch(9)
    plain = engine_of(model, space, 0)
    assert plain.frozen_cache is None
    cached = engine_of(model, space, 1)
    assert len(cached.frozen_cache.layers) == 1
    cached.check(batch, 1e-2)
    for _ in range(2):
        np.testing.assert_allclose(cached.score(batch, PAIR), plain.score(batch, PAIR), rtol=1e-5, atol=1e-5)
    again = engine_of(model, space, 1)
    assert np.array_equal(again.score(batch, PAIR), cached.score(batch, PAIR)), "a hit gives the bits of a miss"


def test_all_layers_are_cached_below_a_head():
    engine, batch = engine_of(make_roberta(), Space("head"), 1), make_batch(9)
    assert len(engine.frozen_cache.layers) == 2
    engine.score(batch, PAIR)
    engine.score(batch, PAIR)
    assert (engine.frozen_cache.requested, engine.frozen_cache.computed) == (36, 9)
    assert engine.describe()["frozen_cache"]["saved_share"] == 0.75


HEADS = {
    "roberta": "head",
    "bert": "head",
    "distilbert": "head",
    "modernbert": "head",
    "llama": "model.norm.*",
    "gpt2": "*ln_f*",
}


@pytest.mark.parametrize(("family", "space"), HEADS.items())
def test_only_positions_that_are_read_are_cached_below_a_head(family, space):
    """Scores equal those of a forward over whole rows, with one position per example in memory and in the head."""
    model, batch = MAKERS[family](), make_batch(9)
    plain, cached = engine_of(model, Space(space), 0), engine_of(model, Space(space), 1, rows=9)
    cached.check(batch, 1e-2)
    seen = []
    cached.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    for _ in range(2):
        np.testing.assert_allclose(cached.score(batch, PAIR), plain.score(batch, PAIR), rtol=1e-5, atol=1e-5)
    assert seen[-1] == (18, 1)
    kept = [*cached.frozen_cache._states.values(), cached.frozen_cache._last[2]]
    assert cached.frozen_cache.held_bytes == 4 * sum(state.numel() for state in kept)
    assert {tuple(state.shape) for state in cached.frozen_cache._states.values()} == {(1, model.config.hidden_size)}


def test_candidates_at_several_positions():
    model = make_llama()
    prompts = tuple(Prompt((5, 6, 7 + n), 0, candidates=((11, 12), (13,), (14, 15, 16 + n))) for n in range(4))
    batch = Batch(prompts, Readout("candidates"))
    space = Space("model.norm.*")
    plain, cached = engine_of(model, space, 0), engine_of(model, space, 1)
    plain.share_prompts = cached.share_prompts = False
    for _ in range(2):
        np.testing.assert_allclose(cached.score(batch, PAIR), plain.score(batch, PAIR), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("space", [Space("full"), Space("lora"), Space("prefix"), Space("*embed*")])
def test_no_cache_when_the_first_layer_or_the_embeddings_are_trained(space):
    for make_model in (make_roberta, make_llama):
        assert engine_of(make_model(), space, 100).frozen_cache is None


def test_no_cache_when_all_depths_share_one_layer():
    engine = engine_of(make(*FAMILIES["albert"]), Space("head"), 100)
    assert engine.frozen_cache is None
    engine.check(make_batch(), 1e-2)


def test_limit_is_respected_and_does_not_change_scores():
    model, batch = make_roberta(), make_batch(40)
    space = UPPER["full"]
    room = 20 * 32 * 4 * 5 / MIB  # five of the longest examples
    small, large = engine_of(model, space, room, rows=8), engine_of(model, space, 100, rows=8)
    rng = np.random.default_rng(0)
    for _ in range(6):
        some = Batch(tuple(batch.prompts[i] for i in rng.permutation(40)[:16]), batch.readout)
        assert np.array_equal(small.score(some, PAIR), large.score(some, PAIR))
        assert small.frozen_cache.held_bytes <= room * MIB
    assert small.frozen_cache.computed > large.frozen_cache.computed == len(large.frozen_cache._states) <= 40
    assert small.frozen_cache.held_bytes == sum(t.numel() * 4 for t in small.frozen_cache._states.values())


def test_stacked_states_count_towards_the_limit_and_do_not_change_scores():
    """A head's states for both probes are kept for the next step if they fit beside those of the examples."""
    model, batch = make_roberta(), make_batch(8)
    states = 8 * 32 * 4
    for room, stacked in ((2.9 * states, False), (3 * states, True)):
        engine, large = (engine_of(model, Space("head"), mb, rows=8) for mb in (room / MIB, 1))
        for _ in range(2):
            assert np.array_equal(engine.score(batch, PAIR), large.score(batch, PAIR))
            assert engine.frozen_cache.held_bytes <= room
        assert (engine.frozen_cache._last is not None) == stacked
        assert engine.frozen_cache.held_bytes == (3 if stacked else 1) * states
        engine.frozen_cache.clear()
        assert engine.frozen_cache.held_bytes == 0


def test_layer_that_never_runs_is_an_error():
    model, other = make_roberta(), make_roberta(1)
    frozen = FrozenCache(model, {other.roberta.encoder.layer[0]: 0}, MIB, all_frozen=False)
    with pytest.raises(ModelError, match=r"RobertaForMaskedLM did not run its last frozen layer.*use --cache-mb 0"):
        frozen._state(((5, 6, 7), (), ()), lambda ids, _: {"input_ids": ids})


def test_segments_are_part_of_the_key():
    model = MAKERS["bert"]()
    ids = (5, 6, 7, 8)
    prompts = tuple(Prompt(ids, 0, 2, segments=segments) for segments in ((0, 0, 1, 1), (0, 0, 0, 0)))
    batch = Batch(prompts, Readout("words", words=(11, 47)))
    cached, plain = engine_of(model, UPPER["full"], 1), engine_of(model, UPPER["full"], 0)
    np.testing.assert_allclose(cached.score(batch, PAIR), plain.score(batch, PAIR), atol=1e-5)
    assert np.abs(cached.score(batch, PAIR)[:, 0] - cached.score(batch, PAIR)[:, 1]).max() > 1e-3


def test_run_records_what_was_saved_and_its_journal_does_not_depend_on_the_limit(tiny_folder, tiny_data, tmp_path):
    options = {"space": "lora", "layers": "1:", "steps": 30, "batch_size": 4, "eval_every": 10, "threads": 1, "seed": 5}

    def run(name: str, cache_mb: float) -> api.Run:
        out = str(tmp_path / name)
        return api.finetune(
            tiny_folder,
            task="sst-2",
            train=tiny_data,
            dev=tiny_data,
            device="cpu",
            **options,
            cache_mb=cache_mb,
            out=out,
        )

    large, small = run("large", 100), run("small", 0.005)
    assert read(Path(large.out)).records == read(Path(small.out)).records
    assert large.digest == small.digest
    notes = [json.loads(line) for line in (tmp_path / "large" / "metrics.jsonl").read_text().splitlines()]
    last = [note for note in notes if note["event"] == "engine"][-1]
    assert last["frozen_cache"]["frozen_layers"] == 1
    assert last["frozen_cache"]["saved_share"] > 0.8
    with pytest.raises(api.ConfigError, match="cache_mb cannot change"):
        api.finetune(resume=large.out, steps=31, cache_mb=0)


def test_head_alone_uses_large_micro_batches_and_one_thread(tiny_folder):
    """Under any name, not only as the space `head`; a classification head, which reads whole rows, uses small micro-batches."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for space, classes, rows, threads in (("lm_head.*", 0, 256, 1), ("head", 2, 16, 2), ("lora", 0, 16, 2)):
            spec = EngineSpec(
                tiny_folder, "masked", Space(space), 64, fewer_rows=True, classes=classes, cache_mb=1, device="cpu"
            )
            engine = open_engine(spec)
            assert (engine.micro_batch.rows, torch.get_num_threads()) == (rows, threads)
            engine.close()
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
