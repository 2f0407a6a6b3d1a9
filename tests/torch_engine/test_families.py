"""Every supported architecture, as a tiny random model: population scores equal those of plain models, in every space."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mezzo.engines.torch.engine import TorchEngine
from mezzo.errors import MezzoError, SpaceError
from mezzo.method.space import Space
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout
from tests.conftest import VOCAB, make_batch, scale_up_weights
from tests.reference import plain_model, plain_scores

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
DECODER = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 1}
DISTIL = {
    "vocab_size": VOCAB,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
OPT = {**{k: v for k, v in SMALL.items() if k != "intermediate_size"}, "ffn_dim": 48, "word_embed_proj_dim": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", {**SMALL, "type_vocab_size": 2}),
    "distilbert": ("DistilBertForMaskedLM", DISTIL),
    "albert": ("AlbertForMaskedLM", {**SMALL, "embedding_size": 16, "type_vocab_size": 2}),
    "electra": ("ElectraForMaskedLM", {**SMALL, "embedding_size": 16, "type_vocab_size": 2}),
    "modernbert": ("ModernBertForMaskedLM", {**SMALL, "global_attn_every_n_layers": 2, "local_attention": 16}),
    "opt": ("OPTForCausalLM", OPT),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "qwen2": ("Qwen2ForCausalLM", {k: v for k, v in DECODER.items() if k != "head_dim"}),
    "qwen3": ("Qwen3ForCausalLM", DECODER),
    "gemma2": ("Gemma2ForCausalLM", {**DECODER, "query_pre_attn_scalar": 8, "sliding_window": 16}),
    "gemma3": ("Gemma3ForCausalLM", {**DECODER, "query_pre_attn_scalar": 8, "sliding_window": 16}),
    "mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": 16}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta": (
        "DebertaV2ForMaskedLM",
        {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    ),
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
SPACES = {
    "full": Space("full"),
    "matrices": Space("matrices", noise_rank=3),
    "lora": Space("lora", rank=4, alpha=8),
    "lora-all": Space("lora", rank=2, alpha=8, targets=("all-linear",)),
    "head": Space("head"),
}
TIED = [FAMILIES[name] for name in ("opt", "gpt2", "gemma2", "gemma3")]
"""Families whose head is their table of embeddings, with nothing of its own between it and the layers."""
PAIR = (Probe(((7, 0.02),)), Probe(((7, -0.02),)))


def make(name: str, options: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return scale_up_weights(kind(kind.config_class(**options)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_scores_equal_a_plain_model_with_perturbed_weights(family, space, dtype):
    """A CPU computes in float32 whatever the weights are stored as: the reference is a float32 model with the stored values."""
    model = make(*family).to(dtype)
    if space.kind == "head" and family in TIED:
        with pytest.raises(SpaceError, match="head is tied to its embeddings"):
            TorchEngine(model, space)
        return
    pristine, batch = copy.deepcopy(model).float(), make_batch()
    engine = TorchEngine(model, space, micro_batch=MicroBatch(4), seed=3, pad_id=1)
    rng = np.random.default_rng(1)
    engine.load_state({n: (v + rng.normal(0, 0.05, v.shape)).astype(np.float32) for n, v in engine.state().items()})
    engine.check(batch, 1e-2)
    scores = engine.score(batch, PAIR)
    for index, probe in enumerate(PAIR):
        expected = plain_scores(
            plain_model(pristine, engine.trained, engine.state(), "rademacher", probe, space), batch
        )
        np.testing.assert_allclose(scores[index], expected, rtol=1e-5, atol=2e-5)
    assert np.abs(scores[0] - scores[1]).max() > 1e-3


@pytest.mark.parametrize("family", REFUSED.values(), ids=REFUSED)
def test_unsupported_family_is_refused_in_one_line(family):
    with pytest.raises(MezzoError) as caught:
        TorchEngine(make(*family), Space("full"), pad_id=1).check(make_batch(), 1e-2)
    assert "\n" not in str(caught.value)


WINDOWED = ("mistral", "qwen3", "gemma2", "gemma3")


@pytest.mark.parametrize("window", [6, 64], ids=["reached", "out-of-reach"])
@pytest.mark.parametrize("family", WINDOWED)
def test_candidates_of_prompts_around_the_length_of_a_window(family, window):
    """Prompts are shared only where no window ends within a row, padding behind the prompt included."""
    name, options = FAMILIES[family]
    extra = {"use_sliding_window": True, "max_window_layers": 0} if family == "qwen3" else {}
    model = make(name, {**options, "sliding_window": window, **extra})
    pristine, space = copy.deepcopy(model), Space("lora", rank=4, alpha=8)
    engine = TorchEngine(model, space, seed=3, pad_id=1, micro_batch=MicroBatch(8))
    rng = np.random.default_rng(5)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.integers(5, VOCAB, size=count))

    prompts = tuple(Prompt(tokens(size), label=0, candidates=(tokens(3), tokens(4))) for size in (4, 12, 9, 20))
    batch = Batch(prompts, Readout("candidates"))
    probe = Probe(((7, 0.02),))
    found = engine.score(batch, [probe, Probe()])
    twin = plain_model(pristine, engine.trained, engine.state(), "rademacher", probe, space)
    np.testing.assert_allclose(found[0], plain_scores(twin, batch), rtol=1e-4, atol=2e-5)
    engine.check(batch, 1e-2)


@pytest.mark.parametrize("lengths", [(9, 9, 9), (4, 9, 6)], ids=["equal", "mixed"])
@pytest.mark.parametrize("kind", ["ForCausalLM", "ForSequenceClassification"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_bidirectional_decoder(family, kind, lengths):
    """With `is_causal=False` in its configuration, like embedding models."""
    labels = {"num_labels": 2} if kind != "ForCausalLM" else {}
    model = make(family + kind, {**DECODER, "is_causal": False, **labels})
    pristine, space = copy.deepcopy(model), Space("lora", rank=4, alpha=8)
    engine = TorchEngine(model, space, seed=3, pad_id=1)
    rng = np.random.default_rng(2)
    prompts = tuple(
        Prompt(tuple(int(t) for t in rng.integers(5, VOCAB, size=size)), label=0, position=2) for size in lengths
    )
    batch = Batch(prompts, Readout("words", words=(11, 47)) if not labels else Readout("head", classes=2))
    probe = Probe(((7, 0.02),))
    twin = plain_model(pristine, engine.trained, engine.state(), "rademacher", probe, space)
    with torch.no_grad():
        logits = [twin(input_ids=torch.tensor([prompt.ids])).logits[0] for prompt in prompts]
    expected = [one.numpy() if labels else one[2, [11, 47]].numpy() for one in logits]
    np.testing.assert_allclose(engine.score(batch, [probe])[0], expected, rtol=1e-4, atol=2e-5)
    engine.check(batch, 1e-2)


def test_class_of_other_code_with_a_known_name_keeps_its_forward():
    """A model's own code may call something else `LlamaRMSNorm` or `LlamaDecoderLayer`."""
    model = make("LlamaForCausalLM", DECODER)
    for module in list(model.modules()):
        if type(module).__name__.startswith("Llama"):
            other = type(type(module).__name__, (type(module),), {"__module__": "transformers_modules.other"})
            module.__class__ = other
    engine = TorchEngine(model, Space("head"), seed=3, pad_id=1)
    assert "forward" not in vars(engine.model.model.layers[-1])
    original = TorchEngine(make("LlamaForCausalLM", DECODER), Space("head"), seed=3, pad_id=1)
    assert "forward" in vars(original.model.model.layers[-1])


# ---- the rows beside a row

NEO = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": 64,
    "intermediate_size": 48,
    "window_size": 6,
    "pad_token_id": 1,
}
MPT = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "pad_token_id": 1}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
PHI3 = {
    **DECODER,
    "original_max_position_embeddings": 12,
    "rope_parameters": {**LONG, "original_max_position_embeddings": 12},
}
BOTH_WAYS = {**DECODER, "query_pre_attn_scalar": 8, "sliding_window": 16, "use_bidirectional_attention": True}


def prompts_of(lengths: tuple[int, ...], continued: bool = False) -> tuple[Prompt, ...]:
    rng = np.random.default_rng(5)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.integers(5, VOCAB, size=count))

    return tuple(
        Prompt(tokens(size), label=0, position=size - 1, candidates=(tokens(3), tokens(4)) if continued else ())
        for size in lengths
    )


@pytest.mark.parametrize(
    ("name", "options", "shares"),
    [
        ("LlamaForCausalLM", DECODER, True),
        ("GPTNeoForCausalLM", NEO, True),
        ("MptForCausalLM", MPT, False),
        ("RobertaForCausalLM", {**SMALL, "is_decoder": True}, False),
        ("Phi3ForCausalLM", PHI3, False),
    ],
)
def test_prompts_are_shared_only_where_positions_place_a_continuation(name, options, shares):
    """And not where the model counts places in the cache."""
    model = make(name, options)
    pristine = copy.deepcopy(model)
    engine = TorchEngine(model, Space("*norm*", noise_rank=0) if name.startswith("Mpt") else Space("full"), pad_id=1)
    assert engine.share_prompts == shares
    batch = Batch(prompts_of((5, 5, 4, 6, 7), continued=True), Readout("candidates"))
    np.testing.assert_allclose(engine.score(batch, [Probe()])[0], plain_scores(pristine, batch), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Gemma3ForCausalLM", BOTH_WAYS),
        ("RobertaForCausalLM", {**SMALL, "is_decoder": False}),
        ("BertLMHeadModel", {**SMALL, "is_decoder": False}),
    ],
)
def test_model_with_a_causal_name_may_be_bidirectional(name, options):
    model = make(name, options)
    pristine = copy.deepcopy(model)
    engine = TorchEngine(model, Space("full"), pad_id=1)
    assert not engine.causal
    batch = Batch(prompts_of((9, 9, 4, 14)), Readout("words", words=(11, 47)))
    np.testing.assert_allclose(engine.score(batch, [Probe()])[0], plain_scores(pristine, batch), rtol=1e-4, atol=2e-5)
    engine.check(batch, 1e-2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FNetForMaskedLM", {**SMALL, "type_vocab_size": 2, "tpu_short_seq_length": 16}),
        ("Phi3ForCausalLM", PHI3),
    ],
)
def test_model_that_attends_to_padding_is_refused(name, options):
    """FNet mixes all positions of a row; rotary positions of the "longrope" kind depend on the longest row of a forward."""
    engine = TorchEngine(make(name, options), Space("*[nN]orm*"), pad_id=1)
    batch = Batch(prompts_of((9, 9, 5, 14)), Readout("words", words=(11, 47)))
    with pytest.raises(MezzoError, match=r"a row's scores change by .* next to longer rows"):
        engine.check(batch, 1e-2)
    alone = TorchEngine(make(name, options), Space("*[nN]orm*"), pad_id=1, micro_batch=MicroBatch(1))
    alone.check(batch, 1e-2)


@pytest.mark.parametrize("padding", [None, 0, 2], ids=["none", "another", "the-same"])
@pytest.mark.parametrize(("family", "options"), [("Llama", DECODER), ("GPT2", GPT2)])
def test_head_reads_the_last_token_whatever_the_configured_padding_id(family, options, padding, tmp_path):
    from mezzo.engines.base import EngineSpec
    from mezzo.engines.torch import open_engine

    model = make(f"{family}ForSequenceClassification", {**options, "num_labels": 2, "pad_token_id": padding})
    model.save_pretrained(tmp_path)
    spec = EngineSpec(
        model=str(tmp_path), family="causal", space=Space("full"), classes=2, pad_id=2, device="cpu", rows=8
    )
    engine = open_engine(spec)
    batch = Batch(prompts_of((9, 4, 6, 9)), Readout("head", classes=2))
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([prompt.ids])).logits[0].numpy() for prompt in batch.prompts]
    np.testing.assert_allclose(engine.score(batch, [Probe()])[0], expected, rtol=1e-4, atol=2e-5)
    engine.check(batch, 1e-2)


@pytest.mark.parametrize(("padding", "end", "expected"), [(0, 2, 0), (None, 2, 2), (None, None, 0)])
def test_rows_are_padded_with_end_of_text_if_there_is_no_padding_token(padding, end, expected):
    from types import SimpleNamespace

    from mezzo.runs.setup import Setup

    tokenizer = SimpleNamespace(pad_token_id=padding, eos_token_id=end)
    assert Setup(None, "causal", None, tokenizer, 64, 0).pad_id == expected
