"""A prefix: scores equal keys and values prepended by hand, in every family; runs learn, rebuild and export exactly."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch.nn.functional import gelu, layer_norm, linear
from transformers import AutoModelForMaskedLM, DynamicCache

import mezzo
from mezzo import api
from mezzo.engines.torch.engine import TorchEngine
from mezzo.errors import ConfigError, JournalError, MezzoError, ModelError
from mezzo.evaluation.evaluate import score_prompts
from mezzo.journal import content as journal_content
from mezzo.journal import journal as journal_file
from mezzo.journal.content import read
from mezzo.journal.journal import START, Journal
from mezzo.method.space import Space
from mezzo.types import Batch, Generation, MicroBatch, Probe, Prompt, Readout
from tests.conftest import make_batch, make_llama, make_roberta
from tests.reference import z_of
from tests.torch_engine.test_families import FAMILIES, REFUSED, make

PREFIX = Space("prefix", tokens=3)
PAIR = (Probe(((7, 0.3),)), Probe(((7, -0.3),)))
CAUSAL = ("opt", "gpt2", "qwen2", "qwen3", "gemma2", "gemma3", "mistral")


def engine_of(model: torch.nn.Module, space: Space = PREFIX, rows: int = 4) -> TorchEngine:
    engine = TorchEngine(model, space, micro_batch=MicroBatch(rows), seed=3, pad_id=1)
    rng = np.random.default_rng(1)
    engine.load_state({n: (v + rng.normal(0, 0.3, v.shape)).astype(np.float32) for n, v in engine.state().items()})
    return engine


def moved(engine: TorchEngine, probe: Probe) -> dict[str, torch.Tensor]:
    """The prefix at a probe, by NumPy alone."""
    state = engine.state()
    return {
        t.name: torch.from_numpy(
            (state[t.name] + sum(c * z_of(t, "rademacher", s) for s, c in probe.terms)).astype(np.float32)
        )
        for t in engine.trained
    }


EXACTLY = {"rtol": 1e-5, "atol": 3e-5}


def compared(
    engine: TorchEngine, batch: Batch, by_hand: Any, scores: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Both members' scores, the engine's and those by hand; the perturbation is seen in them."""
    scores = engine.score(batch, PAIR) if scores is None else scores
    assert np.abs(scores[0] - scores[1]).max() > 1e-3
    words = list(batch.readout.words)
    with torch.no_grad():
        expected = [
            [by_hand(p.ids, tensors)[p.position][words].numpy() for p in batch.prompts]
            for tensors in (moved(engine, probe) for probe in PAIR)
        ]
    return scores, np.array(expected)


@pytest.mark.parametrize("family", CAUSAL)
def test_scores_equal_a_cache_filled_by_hand(family):
    """An ordinary causal model that finds the prefix in its key-value cache, its tokens at positions 0, 1, …"""
    model = make(*FAMILIES[family])
    pristine = copy.deepcopy(model)
    engine, batch = engine_of(model), make_batch(lengths=(4, 12))  # shorter than the windows: a cache would slide
    engine.check(batch, 1e-1)

    def by_hand(ids: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        cache, values = DynamicCache(), list(tensors.values())
        for layer in range(len(values) // 2):
            cache.update(values[2 * layer][None], values[2 * layer + 1][None], layer)
        return pristine(
            input_ids=torch.tensor([ids]),
            position_ids=torch.arange(len(ids))[None],
            attention_mask=torch.ones(1, len(ids) + PREFIX.tokens),
            past_key_values=cache,
        ).logits[0]

    np.testing.assert_allclose(*compared(engine, batch, by_hand), **EXACTLY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", [*FAMILIES, "roberta", "llama"])
def test_scores_equal_a_plain_attention_with_longer_keys(family, dtype, monkeypatch):
    """Every family, windows included: one softmax over [prefix, keys], written out, in place of the model's own.

    A CPU computes in float32 whatever the weights are stored as: it is compared with the stored values in float32.
    """
    model = {"roberta": make_roberta, "llama": make_llama}.get(family, lambda: make(*FAMILIES[family]))().to(dtype)
    pristine = copy.deepcopy(model).float()
    pristine.set_attn_implementation("eager")
    engine, batch = engine_of(model), make_batch(lengths=(4, 30))
    scores = engine.score(batch, PAIR)  # before the model's own functions are replaced
    paths = {module: path for path, module in pristine.named_modules()}
    tensors: dict[str, torch.Tensor] = {}

    def plain(module, query, key, value, attention_mask, scaling=None, softcap=None, **_):
        before = [tensors[f"{paths[module]}.prefix_{kind}"] for kind in ("key", "value")]
        key, value = (
            torch.cat([b[None].expand(len(key), -1, -1, -1), own], 2)
            for b, own in zip(before, (key, value), strict=True)
        )
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.mT * (scaling or query.shape[-1] ** -0.5)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        if attention_mask is not None:
            scores[..., PREFIX.tokens :] += attention_mask
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    files = {type(module).__module__ for module in pristine.modules()}
    for file in (sys.modules[name] for name in files):
        if hasattr(file, "eager_attention_forward"):
            monkeypatch.setattr(file, "eager_attention_forward", plain)

    def by_hand(ids: tuple[int, ...], now: dict[str, torch.Tensor]) -> torch.Tensor:
        tensors.update(now)
        return pristine(input_ids=torch.tensor([ids])).logits[0]

    np.testing.assert_allclose(*compared(engine, batch, by_hand, scores), **EXACTLY)


def test_scores_equal_roberta_in_plain_torch():
    """The whole encoder in a dozen lines of plain torch."""
    model = make_roberta()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    engine, batch = engine_of(model), make_batch()

    def part(name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), 4, 8).transpose(0, 1)

    def by_hand(ids: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        table = "roberta.embeddings."
        x = weights[f"{table}word_embeddings.weight"][list(ids)]
        x = x + weights[f"{table}position_embeddings.weight"][2 : 2 + len(ids)]
        x = norm(f"{table}LayerNorm", x + weights[f"{table}token_type_embeddings.weight"][0])
        for layer in (f"roberta.encoder.layer.{n}." for n in range(2)):
            own = f"{layer}attention.self."
            query, key, value = (heads(part(own + name, x)) for name in ("query", "key", "value"))
            key = torch.cat([tensors[f"{own}prefix_key"], key], 1)
            value = torch.cat([tensors[f"{own}prefix_value"], value], 1)
            mixed = (query @ key.mT / 8**0.5).softmax(-1) @ value
            mixed = part(f"{layer}attention.output.dense", mixed.transpose(0, 1).reshape(len(ids), 32))
            x = norm(f"{layer}attention.output.LayerNorm", x + mixed)
            inner = part(f"{layer}output.dense", gelu(part(f"{layer}intermediate.dense", x)))
            x = norm(f"{layer}output.LayerNorm", x + inner)
        return part("lm_head.decoder", norm("lm_head.layer_norm", gelu(part("lm_head.dense", x))))

    np.testing.assert_allclose(*compared(engine, batch, by_hand), **EXACTLY)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "unshared"])
def test_candidates_and_generation_with_a_prefix(shared):
    model = make_llama()
    twin = copy.deepcopy(model)
    engine = engine_of(model, rows=3)
    engine.share_prompts = shared
    rng = np.random.default_rng(5)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(5, 120, size=rng.integers(low, high)))

    prompts = tuple(Prompt(tokens(2, 12), 0, candidates=(tokens(1, 5), tokens(1, 5))) for _ in range(4))
    batch = Batch(prompts, Readout("candidates", reduce="sum"))
    scores, texts = engine.score(batch, PAIR), engine.generate(batch, PAIR, Generation(5))
    from mezzo.engines.torch.forward import prefix

    for index, probe in enumerate(PAIR):
        prefix.set_prefix(twin, moved(engine, probe))
        for row, prompt in enumerate(prompts):
            for number, candidate in enumerate(prompt.candidates):
                with torch.no_grad():
                    logits = twin(input_ids=torch.tensor([prompt.ids + candidate])).logits[0].log_softmax(-1)
                places = range(len(prompt.ids) - 1, len(prompt.ids) + len(candidate) - 1)
                expected = sum(float(logits[p, t]) for p, t in zip(places, candidate, strict=True))
                assert abs(scores[index, row, number] - expected) < 1e-4
            plain = twin.generate(torch.tensor([prompt.ids]), max_new_tokens=5, do_sample=False)[0, len(prompt.ids) :]
            assert texts[index][row][0][: len(plain)] == tuple(plain.tolist())
    assert texts[0] != texts[1]


def test_keys_alone_and_upper_layers():
    for space in (Space("prefix", only=("*prefix_key",)), Space("prefix", layers="1:")):
        engine = TorchEngine(make_roberta(), space, pad_id=1)
        engine.check(make_batch(), 1e-1)
        assert len(engine.trained) == 2


def test_prefix_starts_at_the_activations_of_a_text():
    model = make_roberta()
    seen = []
    hook = model.roberta.encoder.layer[1].attention.self.key.register_forward_hook(lambda *a: seen.append(a[2]))
    ids = [9, 30, 77]
    model(input_ids=torch.tensor([ids]))
    hook.remove()
    engine = TorchEngine(model, PREFIX, prefix_ids=ids)
    start = engine.state()["roberta.encoder.layer.1.attention.self.prefix_key"]
    np.testing.assert_allclose(start, seen[0][0].detach().view(3, 4, 8).transpose(0, 1), rtol=2**-8)


@pytest.mark.parametrize("family", ["deberta", "t5"])
def test_unsupported_family_is_refused_in_one_line(family):
    small = {"vocab_size": 120, "d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 48}
    model = make(*REFUSED.get(family, ("T5ForConditionalGeneration", {**small, "pad_token_id": 1})))
    with pytest.raises(MezzoError) as caught:
        TorchEngine(model, PREFIX, pad_id=1).check(make_batch(), 1e-1)
    assert "\n" not in str(caught.value)


# ---- runs


@pytest.fixture
def run(tiny_folder: str, tiny_data: str, tmp_path: Any) -> Any:
    options = {"space": "prefix", "steps": 12, "batch_size": 4, "eval_every": 6, "threads": 1, "device": "cpu"}
    return api.finetune(
        tiny_folder, task="sst-2", train=tiny_data, dev=tiny_data, **options, lr=1e-2, out=str(tmp_path / "run")
    )


def test_run_is_verified_resumed_and_rebuilt_from_a_compact_journal(run, tmp_path, tiny_folder, tiny_data):
    assert api.verify(run.out).ok
    longer = api.finetune(resume=run.out, steps=20)
    options = {"space": "prefix", "steps": 20, "batch_size": 4, "eval_every": 6, "threads": 1, "device": "cpu"}
    whole = api.finetune(
        tiny_folder, task="sst-2", train=tiny_data, dev=tiny_data, **options, lr=1e-2, out=str(tmp_path / "whole")
    )
    assert longer.digest == whole.digest != run.digest
    api.export(run.out, "journal", tmp_path / "j.mezzo")
    assert api.open_run(tmp_path / "j.mezzo", at=20)[0].digest() == longer.digest


def test_initial_values_come_from_the_run_folder(run, tmp_path):
    """Rebuilding does not depend on a forward pass of the machine that rebuilds; values that the header does not know are
    refused."""
    content = read(tmp_path / "run")
    start = (tmp_path / "run" / START).read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    with Journal.create(other, content.header, start[2:] + start[:2]) as journal:
        for record in content.records:
            journal.append(record)
        journal.mark(content.steps, content.marks[content.steps])
    assert not api.verify(other).ok
    for data in (start, start[:-2], b""):
        (other / START).write_bytes(data)
        with pytest.raises(JournalError, match="not what the journal's header says"):
            api.verify(other)
    (other / START).unlink()
    with pytest.raises(JournalError, match="No such file"):
        api.verify(other)


def test_run_with_a_long_prefix_can_be_read_again(tiny_folder, tiny_data, tmp_path, monkeypatch):
    """Its start alone would be more than a line may have, as is that of 300 tokens in a larger model."""
    for module in (journal_content, journal_file):
        monkeypatch.setattr(module, "MAX_LINE", 2**13)
    sizes = {"space": "prefix", "prefix_tokens": 40, "steps": 1, "batch_size": 2, "eval_limit": 2}
    options = {"task": "sst-2", "train": tiny_data, "dev": tiny_data, "threads": 1, "device": "cpu", "lr": 1e-2}
    run = api.finetune(tiny_folder, **sizes, **options, out=str(tmp_path / "run"))
    assert api.verify(run.out).ok
    assert api.finetune(resume=run.out, steps=2).steps == 2


def test_exported_prefix_gives_the_same_scores(run, tmp_path, tiny_folder):
    engine, _ = api.open_run(run.out, at=12)
    out = api.export(run.out, "adapter", tmp_path / "prefix", at=12)
    model = mezzo.load_prefix(AutoModelForMaskedLM.from_pretrained(tiny_folder), out)
    batch = make_batch(words=(7, 9))
    expected = engine.score(batch, [Probe()])[0]
    for row, prompt in enumerate(batch.prompts):
        logits = model(input_ids=torch.tensor([prompt.ids])).logits[0, prompt.position, [7, 9]]
        np.testing.assert_allclose(logits.detach(), expected[row], rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="export the adapter instead"):
        api.export(run.out, "model", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_damaged_or_unsuitable_prefix_is_refused(run, tmp_path, tiny_folder):
    out = api.export(run.out, "adapter", tmp_path / "prefix")
    model = AutoModelForMaskedLM.from_pretrained(tiny_folder)
    tensors = load_file(out / "prefix.safetensors")
    name = next(iter(tensors))
    broken = {
        "another model": {**tensors, name: tensors[name][:1]},
        "does not fit": {**tensors, "../../evil": tensors[name]},
        "not finite numbers": {**tensors, name: tensors[name] * np.float32(np.inf)},
        f"{name} holds values": {**tensors, name: tensors[name].astype(np.int64)},
        "different length": {**tensors, name: np.repeat(tensors[name], 2, axis=1)},
    }
    for message, content in broken.items():
        (tmp_path / "prefix" / "prefix.safetensors").unlink()
        save_file(content, out / "prefix.safetensors")
        with pytest.raises(ModelError, match=message):
            mezzo.load_prefix(model, out)
    (out / "prefix.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match="cannot be read"):
        mezzo.load_prefix(model, out)
    (out / "prefix_config.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(ModelError, match="not a prefix that this mezzo reads"):
        mezzo.load_prefix(model, out)


def test_prefix_longer_than_the_models_positions_is_refused(tiny_folder, tiny_data, tmp_path):
    with pytest.raises(ConfigError, match="--prefix-tokens 9999 is more than the 64 tokens"):
        api.finetune(
            tiny_folder, task="sst-2", train=tiny_data, space="prefix", prefix_tokens=9999, out=str(tmp_path / "r")
        )
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_bundled_model_generalises_to_other_sentences(tmp_path):
    """With label words that say little about films, so that there is something to learn: on sentences that were not trained on,
    better than zero-shot scores with the best offset that could be found afterwards.

    Moving the threshold is all that calibration can do, so what is below that loss has been learned.
    """
    prompt = {"template": "{text} It was<mask>.", "words": "negative=short,positive=long"}
    how = {"steps": 160, "batch_size": 32, "lr": 0.3, "eps": 0.1, "schedule": "constant", "eval_every": 160}
    session = api.open_session(
        "mezzo/roberta-mini",
        task="reviews",
        space="prefix",
        **prompt,
        **how,
        threads=1,
        device="cpu",
        out=str(tmp_path / "r"),
    )
    unseen = session.setup.encode(session.setup.splits.dev)
    signs = np.array([2 * prompt.label - 1 for prompt in unseen])
    scores = score_prompts(session.engine, unseen, session.setup.readout)
    margins = scores[:, 1] - scores[:, 0]
    calibrated = min(np.logaddexp(0, -signs * (margins - offset)).mean() for offset in np.linspace(-20, 20, 2001))
    for _ in session.records():
        pass
    session.result()
    before, after = (look.evaluation for look in session.trainer.history)
    assert after.loss < calibrated - 0.01
    assert after.value > before.calibrated + 0.02
