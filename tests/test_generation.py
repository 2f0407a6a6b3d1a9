"""Generated text: draws that depend on nothing but their prompt, stop texts, chat templates; and their evaluation."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import mezzo
from mezzo.config import from_mapping
from mezzo.engines.hf_hub import locate
from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.forward.generation import Sampler, leave_one
from mezzo.errors import ConfigError, TaskError
from mezzo.evaluation.rewards import RewardObjective, read_texts
from mezzo.method.space import Space
from mezzo.runs.resolve import resolve_setup
from mezzo.tasks import Encoder, get_task
from mezzo.types import Batch, Example, Generation, MicroBatch, Probe, Prompt
from tests.conftest import make_batch, make_llama

LLAMA = "mezzo/llama-mini"
SQUAD = [
    {"title": "Sea", "context": "The sea is blue and wide.", "question": "What is blue?", "answers": ["The sea"]}
] * 2
CHAT = "{% for m in messages %}<s>[{{ m.role }}] {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[bot] {% endif %}"


def engine_of(rows: int = 64) -> TorchEngine:
    return TorchEngine(make_llama(), Space("lora", rank=2), micro_batch=MicroBatch(rows=rows))


def test_draws_depend_on_seed_prompt_and_number_alone():
    batch, drawn = make_batch(4), Generation(6, temperature=1.0, draws=3, seed=5)
    (found,) = engine_of().generate(batch, [Probe()], drawn)
    assert len({tuple(map(tuple, texts)) for texts in found}) == 4 and all(len(set(texts)) == 3 for texts in found)
    (again,) = engine_of(rows=2).generate(Batch(batch.prompts[::-1], batch.readout), [Probe()], drawn)
    assert again[::-1] == found, "other batches, other micro-batches: the same texts"
    probes = [Probe(((seed, sign * 1e-7),)) for seed in (3, 4) for sign in (1, -1)]
    up, down, *others = engine_of().generate(batch, probes, drawn)
    assert up == down and others[0] == others[1], "both probes of a pair draw by the same numbers"
    assert len({repr(each) for each in (found, up, others[0])}) == 3, "and every direction by its own"
    (other,) = engine_of().generate(batch, [Probe()], Generation(6, temperature=1.0, draws=3, seed=6))
    assert other != found
    (cold,) = engine_of().generate(batch, [Probe()], Generation(6, temperature=1e-4))
    assert cold == engine_of().generate(batch, [Probe()], Generation(6))[0], (
        "a low temperature takes the likeliest token"
    )


def test_a_prompt_leaves_room_for_its_text():
    def prompt_tokens(**options):
        config = from_mapping({"model": LLAMA, "task": "prompts", "objective": "exact_match", **options})
        (prompt,) = resolve_setup(config).encode([Example({"prompt": "sea " * 600})])
        return len(prompt.ids)

    assert prompt_tokens(max_new_tokens=500) == 12, "512 tokens are the model's context"
    for options in ({"max_new_tokens": 512}, {"max_new_tokens": 100, "max_length": 413}):
        with pytest.raises(ConfigError, match=r"leaves no room for a prompt|412 tokens .* beside --max-new-tokens 100"):
            prompt_tokens(**options)


def test_generation_ends_with_a_token_that_holds_a_stop_text():
    setup = resolve_setup(
        from_mapping({"model": LLAMA, "task": "prompts", "objective": "exact_match", "stop": (" the",)})
    )
    texts = {setup.decode([token]) for token in setup.generation.stop_ids}
    assert {" the", " there"} <= texts and all(" the" in text for text in texts)
    batch, end = make_batch(4), 7
    (whole,) = engine_of().generate(batch, [Probe()], Generation(6, temperature=1.0, draws=40))
    (ended,) = engine_of().generate(batch, [Probe()], Generation(6, temperature=1.0, draws=40, stop_ids=(end,)))
    assert ended == [[ids[: [*ids, end].index(end) + 1] for ids in drawn] for drawn in whole] != whole


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (2.0, 1.0), (1.0, 0.6)])
def test_tokens_are_drawn_with_the_models_probabilities(temperature, top_p):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    expected = (logits / temperature).softmax(0)
    order = expected.argsort(descending=True)
    kept = order[: int((expected[order].cumsum(0) < top_p - 1e-6).sum()) + 1]
    expected = torch.zeros(5).scatter(0, kept, expected[kept])
    expected /= expected.sum()
    uniforms = torch.arange(4000).div(4000)[:, None]
    sampler = Sampler(Generation(1, temperature, top_p), uniforms, start=3)
    chosen = sampler(torch.zeros(4000, 3, dtype=torch.long), logits.expand(4000, -1)).argmax(-1)
    counts = Counter(chosen.tolist())
    np.testing.assert_allclose([counts[i] / 4000 for i in range(5)], expected, atol=2e-3)


def test_rounding_of_the_scores_changes_no_draw():
    """In the order of their probabilities, tokens that are as likely but for rounding would change places."""
    scores = torch.zeros(200, 1000)
    numbers = (torch.arange(200) * 5 + 0.5) / 1000
    rounded = scores + 1e-6 * torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))
    drawn, again = (leave_one(each, numbers, 1.0, 1.0).argmax(-1) for each in (scores, rounded))
    assert drawn.tolist() == again.tolist() == list(range(0, 1000, 5))


@pytest.mark.parametrize("number", [0.0, 1 - 2**-24])
def test_tokens_that_are_not_kept_are_never_drawn(number):
    scores = torch.tensor([[-30.0, 1.0, 1.0, -30.0]] * 2)
    assert leave_one(scores, torch.full((2,), number), 1.0, 0.9).argmax(-1).tolist() == [1 if number == 0 else 2] * 2


def test_stop_texts_end_an_answer_and_rewards_are_averaged_over_draws():
    words = {1: "one\n", 2: " two ", 3: "## three", 4: "\n"}
    decode = lambda ids: "".join(words[i] for i in ids)  # noqa: E731
    ids = [[[(1, 2), (2, 3)]]]
    assert read_texts(ids, decode) == [[["one", "two ## three"]]]
    assert read_texts(ids, decode, ("##",)) == [[["one\n two", "two"]]]
    assert read_texts(ids, decode, ()) == [[["one\n two", "two ## three"]]]
    assert read_texts([[[(4, 1)]]], decode) == [[[""]]], "an answer that begins with one is empty"
    objective = RewardObjective(lambda completion: len(completion), decode, Generation(3, 1.0, draws=2), ("##",))
    batch = dataclasses.replace(make_batch(1), prompts=(Prompt((2,)),))
    assert objective.losses(ids, batch)[0] == -(len("one\n two") + len("two")) / 2


def test_predict_and_evaluate_drawn_answers():
    options = {"model": LLAMA, "task": "squad", "threads": 1, "max_new_tokens": 24, "stop": ["zzzz"]}
    rows = list(mezzo.predict(SQUAD, **options, temperature=1.0, top_p=0.9, draws=3))
    assert all(len(row["draws"]) == 3 and row["draws"][0] == row["prediction"] for row in rows)
    assert len(set(rows[0]["draws"])) > 1 and max(len(text.split()) for text in rows[0]["draws"]) > 4
    assert any("\n" in row["prediction"] for row in mezzo.predict(SQUAD, **options)), "more than one line"
    assert 0 <= mezzo.evaluate(**options, data=SQUAD, temperature=1.0, draws=2).value <= 1
    with pytest.raises(ConfigError, match="add --temperature 1"):
        mezzo.evaluate(**options, data=SQUAD, draws=2)


def test_chat_template_frames_the_prompt(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(locate(LLAMA))
    tokenizer.chat_template = CHAT
    for task, row in (("squad", SQUAD[0]), ("sst-2", {"text": "A dull film."})):
        plain, chat = (Encoder(get_task(task, "causal"), tokenizer, chat=chat) for chat in (False, True))
        example = Example(row, 0)
        text = plain.tokenizer.decode(plain.encode(example).ids[len(plain.tokenizer.leading_ids) :])
        expected = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        assert chat.render(example) == expected
    assert chat.readout.words != plain.readout.words, "the answer begins the model's message, without a space"
    folder = shutil.copytree(locate(LLAMA), tmp_path / "chat")
    tokenizer.save_pretrained(folder)
    (row,) = mezzo.predict(SQUAD[:1], model=str(folder), task="squad", chat=True, threads=1)
    assert isinstance(row["prediction"], str)
    with pytest.raises(TaskError, match="no chat template; leave out --chat"):
        mezzo.evaluate(model=LLAMA, task="squad", data=SQUAD, chat=True)
    tokenizer.chat_template = "{{ raise_exception('one user\nonly') }}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(TaskError, match="tokenizer fails: one user; leave out --chat, or add --set chat=false"):
        mezzo.evaluate(model=str(folder), task="squad", data=SQUAD, chat=True)
    with pytest.raises(TaskError, match="for causal models"):
        mezzo.evaluate(model="mezzo/roberta-mini", task="sst-2", data=[{"text": "a", "label": 1}], chat=True)
