"""The Python API on the bundled models: every readout and objective trains, exports load in transformers and PEFT."""

from __future__ import annotations

import json
from importlib import resources

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForMaskedLM, AutoTokenizer

import mezzo
from mezzo import api
from mezzo.cli import main
from mezzo.engines.hf_hub import locate
from mezzo.errors import ConfigError, DataError, TaskError
from mezzo.signal import Signal, measure, summarize_slopes
from mezzo.tasks import get_task

QUICK = {"steps": 4, "batch_size": 4, "eval_every": 2, "eval_limit": 12, "threads": 1, "device": "cpu"}
ROBERTA, LLAMA = "mezzo/roberta-mini", "mezzo/llama-mini"


@pytest.fixture
def write_rows(tmp_path):
    """A function that writes rows to a jsonl file and returns its path."""

    def write(name: str, items: list[dict]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
        return str(path)

    return write


COPA = [
    {
        "premise": "The rain stopped.",
        "choice1": "We went out.",
        "choice2": "We put up our umbrellas.",
        "question": "effect",
        "label": 0,
    },
    {
        "premise": "The cup broke.",
        "choice1": "It was full.",
        "choice2": "It fell off the table.",
        "question": "cause",
        "label": 1,
    },
] * 6
SQUAD = [
    {"title": "A film", "context": f"The film has {n} scenes.", "question": "How many scenes?", "answers": [n]}
    for n in ["ten", "six", "two"]
] * 4
SENTIMENT = [
    {"text": f"a {word} {noun}", "label": y}
    for y, word in enumerate(("dull", "lovely"))
    for noun in ["film", "plot", "cast", "score"]
] * 2


@pytest.mark.parametrize(
    ("model", "family", "message"),
    [
        (
            ROBERTA,
            "causal",
            "task 'sst-2' is for causal models, and mezzo/roberta-mini is masked; take get_task('sst-2', 'masked')",
        ),
        (
            LLAMA,
            "masked",
            "task 'sst-2' is for masked models, and mezzo/llama-mini is causal; take get_task('sst-2', 'causal')",
        ),
    ],
)
def test_task_of_the_other_family_is_refused(model, family, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError) as caught:
        mezzo.finetune(model, task=get_task("sst-2", family), train=SENTIMENT, **QUICK)
    assert str(caught.value) == message
    assert not list(tmp_path.iterdir())


def test_task_dict_takes_the_family_of_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = {
        "columns": ["text"],
        "template": "{text} It was",
        "words": {"0": "terrible", "1": "great"},
        "id_order": ["0", "1"],
    }
    session = api.open_session(LLAMA, task=mine, train=SENTIMENT, **QUICK)
    assert session.setup.task.family == "causal"
    session.close()
    with pytest.raises(
        TaskError, match="'custom' is for masked models, and mezzo/llama-mini is causal; give it family='causal'"
    ):
        api.open_session(LLAMA, task={**mine, "family": "masked", "template": "It was [MASK]."}, train=SENTIMENT)


@pytest.mark.parametrize(
    ("model", "task", "items", "changes"),
    [
        (ROBERTA, "sst-2", SENTIMENT, {}),
        (ROBERTA, "sst-2", SENTIMENT, {"readout": "head", "space": "head"}),
        (ROBERTA, "sst-2", SENTIMENT, {"objective": "vocabulary_cross_entropy"}),
        (ROBERTA, "sst-2", SENTIMENT, {"objective": "f1"}),
        (ROBERTA, "sst-2", SENTIMENT, {"demonstrations": 2}),
        (LLAMA, "sst-2", SENTIMENT, {}),
        (LLAMA, "sst-2", SENTIMENT, {"readout": "candidates"}),
        (LLAMA, "copa", COPA, {}),
        (LLAMA, "squad", SQUAD, {"max_new_tokens": 3}),
        (LLAMA, "squad", SQUAD, {"max_new_tokens": 3, "objective": "f1", "steps": 2}),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(map(str, value.values())) if isinstance(value, dict) else ""
    ),
)
def test_every_readout_and_objective_trains_and_verifies(model, task, items, changes, write_rows, tmp_path):
    data = write_rows("train.jsonl", items)
    run = mezzo.finetune(
        model, task=task, train=data, dev=data, test=data, out=str(tmp_path / "run"), **{**QUICK, **changes}
    )
    assert run.steps == changes.get("steps", 4)
    assert run.value is not None
    assert mezzo.verify(run.out).ok
    assert "digest" in repr(run)
    if task == "sst-2":
        assert None not in (run.zero_shot_calibrated, run.calibrated, run.majority)
    else:  # a candidate's place is no label whose prior could be removed
        assert (run.zero_shot_calibrated, run.calibrated, run.majority, run.classes) == (None,) * 4
        assert "calibrated" not in f"{run}"
        assert mezzo.evaluate(run.out, data=data, eval_limit=4).calibrated is None
    assert len(run.examples) == 5
    assert mezzo.finetune(resume=run.out, steps=run.steps + 1).steps == run.steps + 1


def test_rows_with_several_right_answers_keep_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {"passage": "Ann met Bo.", "query": "@placeholder won", "entities": ["Ann", "Bo"], "answers": ["Bo", "Ann"]}
    session = api.open_session(LLAMA, task="record", train=[row] * 2, dev=[row], **QUICK)
    assert [prompt.right for prompt in session.setup.train_prompts] == [(0, 1)] * 2
    assert session.setup.evaluate(session.engine, session.setup.splits.dev).value == 1
    session.close()


def test_text_reward_function_is_an_objective(write_rows, tmp_path):
    def brevity(completion):
        return -len(completion)

    data = write_rows("train.jsonl", SQUAD)
    run = mezzo.finetune(
        LLAMA,
        task="squad",
        train=data,
        dev=data,
        objective=brevity,
        max_new_tokens=4,
        out=str(tmp_path / "r"),
        **{**QUICK, "steps": 2},
    )
    losses = [loss for record in api.records(run.out) for loss in record.losses]
    assert all(loss >= 0 for loss in losses)
    assert any(loss > 0 for loss in losses)


def test_cross_entropy_decreases_and_accuracy_objective_improves_accuracy(tmp_path):
    common = {
        "task": "reviews",
        "space": "full",
        "threads": 1,
        "batch_size": 32,
        "micro_batch": 8,
        "train_limit": 64,
        "eval_limit": 64,
    }
    train = str(resources.files("mezzo") / "bundled/data/reviews/train.jsonl")
    session = mezzo.open_session(
        ROBERTA, **common, train=train, dev=train, steps=60, lr=1e-4, eps=1e-3, eval_every=60, out=str(tmp_path / "ce")
    )
    losses = [sum(r.losses) / 2 for r in session.records()]
    session.result()
    assert np.mean(losses[-15:]) < np.mean(losses[:15]) - 0.01
    run = mezzo.finetune(
        ROBERTA,
        **{**common, "space": "lora", "train": train, "dev": train, "test": train, "schedule": "constant"},
        steps=60,
        lr=3e-3,
        eps=1e-2,
        objective="accuracy",
        eval_every=10,
        out=str(tmp_path / "acc"),
    )
    assert run.accuracy > run.zero_shot
    assert 0 < run.zero_slope_share < 1


def test_peft_adapter_and_merged_model_give_the_same_scores(write_rows, tmp_path):
    data = write_rows("train.jsonl", SENTIMENT)
    run = mezzo.finetune(
        ROBERTA, task="sst-2", train=data, dev=data, space="lora", lr=1e-2, eps=1e-2, out=str(tmp_path / "r"), **QUICK
    )
    folder = mezzo.export(run.out, "adapter", at=4)
    base = locate(ROBERTA)
    adapted = PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(base, dtype=torch.float32), folder).eval()
    merged_model = AutoModelForMaskedLM.from_pretrained(
        mezzo.export(run.out, "model", tmp_path / "merged", at=4), dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    inputs = tokenizer("A dull film. It was<mask>.", return_tensors="pt")
    words = [tokenizer.encode(word, add_special_tokens=False)[0] for word in (" terrible", " great")]
    at = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    with torch.no_grad():
        plain = AutoModelForMaskedLM.from_pretrained(base, dtype=torch.float32).eval()(**inputs).logits[0, at, words]
        with_adapter, merged = (m(**inputs).logits[0, at, words] for m in (adapted, merged_model))
    (row,) = mezzo.predict(["A dull film."], run.out, at=4)
    expected = torch.log(torch.tensor([row["probabilities"]["negative"], row["probabilities"]["positive"]]))
    for scores in (with_adapter, merged):
        torch.testing.assert_close(scores.log_softmax(0), expected, atol=1e-4, rtol=0)
        assert not torch.allclose(scores, plain, atol=1e-3), "training must have changed the scores"


def test_masked_lm_functions_and_trainer(write_rows, tmp_path):
    data = write_rows("train.jsonl", SENTIMENT)
    config = mezzo.MLMConfig("{text} All in all, it was [MASK].", {0: "bad", 1: "good"})
    run = mezzo.mezo_mlm_finetune(
        ROBERTA,
        "sst-2",
        data,
        num_steps=3,
        batch_size=4,
        learning_rate=1e-6,
        epsilon=1e-3,
        mlm_config=config,
        output_dir=tmp_path / "r",
        threads=1,
    )
    assert run.steps == 3
    header = api.open_journal(run.out).header
    assert header.config["space"] == "full"
    assert header.task["template"].startswith("{text} All in all")
    trainer = mezzo.MeZOMLMTrainer.open(ROBERTA, "sst-2", config, train=data, out=str(tmp_path / "s"), **QUICK)
    assert isinstance(trainer, mezzo.MeZOTrainer)
    assert trainer.label_words == {"negative": "bad", "positive": "good"}
    assert len(set(trainer.label_word_ids)) == 2
    assert repr(trainer) == "<MeZOMLMTrainer: step 0, 0 example-forwards>"
    steps = [record.step for record in trainer.run()]
    assert steps == [0, 1, 2, 3]
    trainer.session.close()


def test_signal_of_label_words_exceeds_that_of_accuracy():
    """Label words give a non-zero slope on every step, accuracy on few steps, and on more with a larger ε."""
    options = {"model": ROBERTA, "task": "reviews", "space": "full", "batch_size": 16, "micro_batch": 8, "threads": 1}
    by_setting = {
        (r.objective, r.readout, r.eps): r
        for r in measure(options, 6, 4, "cross_entropy,head,accuracy@1e-4,accuracy@1e-2").rows
    }
    words = by_setting["cross_entropy", "words", 1e-3]
    small, large = by_setting["accuracy", "words", 1e-4], by_setting["accuracy", "words", 1e-2]
    assert words.zero_slope_share == 0
    assert small.zero_slope_share > large.zero_slope_share
    assert small.zero_slope_share > 0.5
    assert words.signal_to_noise > small.signal_to_noise
    assert ("cross_entropy", "head", 1e-3) in by_setting


def test_signal_needs_no_options(capsys):
    """The method that a run would choose, solve, has no batch size; slopes are measured at that of SPSA."""
    assert (
        main(["signal", "--directions", "2", "--batches", "2", "--objectives", "cross_entropy", "--threads", "1"]) == 0
    )
    assert "cross_entropy @ " in capsys.readouterr().out
    assert measure({"method": "solve", "threads": 1}, 2, 2, "cross_entropy").rows[0].slopes == 4


def test_signal_recommends_only_what_differs_beyond_the_intervals():
    draw = np.random.default_rng(0).normal
    signal = {share: draw(size=(16, 1)) * share for share in (0.0, 0.3, 4.0)}
    rows = [summarize_slopes(f"o{n}", "words", 0.1, signal[0.3] + draw(size=(16, 8))) for n in range(2)]
    strong = summarize_slopes("strong", "words", 0.1, signal[4.0] + draw(size=(16, 8)))
    for row, true in ((rows[0], 0.3), (strong, 4.0)):
        assert row.interval[0] < row.signal_to_noise < row.interval[1]
        assert row.interval[0] < true < row.interval[1]
    close = Signal(tuple(rows))
    assert close.recommendation.startswith(
        "too close to tell apart: o0 @ 0.1, o1 @ 0.1; measure with more --directions"
    )
    assert Signal((*rows, strong)).recommendation.startswith("train with strong @ 0.1: signal to noise")
    assert "{:.2f} … {:.2f}".format(*strong.interval) in str(Signal((strong,)))


def test_evaluate_and_predict_take_a_task_as_finetune_does():
    stated = get_task("sst-2").replace(name="mine", words=("bad", "good"))
    rows = [{"text": "A fine film.", "label": "positive"}, {"text": "A bad film.", "label": "negative"}]
    by_name = mezzo.evaluate(model=ROBERTA, task="sst-2", words="negative=bad,positive=good", data=rows, threads=1)
    as_dict = {"name": "mine", "template": stated.template, "columns": ["text"], "words": stated.word_of}
    for task in (stated, as_dict):
        assert mezzo.evaluate(model=ROBERTA, task=task, data=rows, threads=1) == by_name
    (found,) = mezzo.predict(["A fine film."], model=ROBERTA, task=stated, threads=1)
    assert found["prediction"] in stated.labels
    with pytest.raises(TaskError, match="is for causal models"):
        mezzo.evaluate(model=ROBERTA, task=get_task("sst-2", "causal"), data=rows)


@pytest.mark.parametrize(("task", "items"), [("sst-2", SENTIMENT), ("copa", COPA), ("squad", SQUAD)])
def test_demonstrations_precede_prompts_of_every_kind(task, items, write_rows):
    options = {"model": LLAMA, "task": task, "data": items[:3], "max_new_tokens": 2, "threads": 1}
    plain = mezzo.evaluate(**options)
    data = write_rows("train.jsonl", items)
    shown = mezzo.evaluate(**options, train=data, demonstrations=len(items) - 1)
    assert shown.n == plain.n
    assert shown.loss != plain.loss
    assert shown == mezzo.evaluate(**options, train=data, demonstrations=len(items) - 1)


def test_invalid_options_are_explained_in_one_line(write_rows, tmp_path):
    data = write_rows("train.jsonl", SENTIMENT)
    valid = {"task": "sst-2", "train": data, "dev": data, "out": str(tmp_path / "r"), **QUICK}
    for changes, error, message in (
        ({"task": "copa", "train": None}, TaskError, "causal, not masked"),
        ({"words": "negative=terrible"}, TaskError, "positive"),
        ({"words": "negative=terrible,positive=terrible"}, TaskError, "terrible"),
        ({"words": "negative=unwatchable,positive=great"}, TaskError, "unwatchable"),
        ({"template": "{text} It was so."}, TaskError, "mask"),
        ({"train": str(tmp_path / "none.csv")}, DataError, "none.csv"),
        ({"k": 100}, DataError, "label"),
        ({"lr": "fast"}, ConfigError, "lr must be a number"),
        ({"stepz": 3}, ConfigError, "did you mean 'steps'"),
        ({"device": "cuda"}, ConfigError, "sees no GPU"),
    ):
        if changes.get("device") == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(error, match=message) as caught:
            mezzo.finetune(**{"model": ROBERTA, **valid, **changes})
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "r").exists(), "no run folder is left behind"


def test_too_small_lr_is_warned_about(write_rows, tmp_path):
    data = write_rows("train.jsonl", SENTIMENT)
    common = {
        **QUICK,
        "task": "sst-2",
        "train": data,
        "dev": data,
        "space": "lora",
        "steps": 52,
        "eval_every": 52,
        "batch_size": 2,
    }
    too_small = mezzo.finetune(ROBERTA, **common, lr=1e-6, eps=1e-2, out=str(tmp_path / "small"))
    assert "--lr 1e-06 is very small for space 'lora'" in too_small.warnings[0]
    usual = mezzo.finetune(ROBERTA, **common, lr=1e-3, eps=1e-2, out=str(tmp_path / "usual"))
    assert usual.warnings == ()


@pytest.mark.parametrize(
    ("model", "task", "items"), [(ROBERTA, "sst-2", SENTIMENT), (LLAMA, "copa", COPA), (LLAMA, "squad", SQUAD)]
)
def test_rows_in_python_give_the_same_digest_as_a_file(model, task, items, write_rows, tmp_path):
    data = write_rows("train.jsonl", items)
    common = {**QUICK, "task": task, "steps": 2, "max_new_tokens": 2}
    from_file = mezzo.finetune(model, **common, train=data, dev=data, out=str(tmp_path / "file"))
    from_rows = mezzo.finetune(model, **common, train=items, dev=items, out=str(tmp_path / "rows"))
    assert from_rows.digest == from_file.digest
    assert mezzo.finetune(resume=from_rows.out, steps=3).steps == 3


def test_keywords_override_the_config_file_and_config_json_reproduces_the_run(write_rows, tmp_path):
    data = write_rows("train.jsonl", SENTIMENT)
    (tmp_path / "run.toml").write_text(
        f'[task]\ntask = "sst-2"\ntrain = "{data}"\ndev = "{data}"\n[method]\nlr = 0.5\nsteps = 3\n'
    )
    run = mezzo.finetune(
        ROBERTA, config=tmp_path / "run.toml", lr=1e-6, batch_size=4, eval_limit=4, out=str(tmp_path / "r"), threads=1
    )
    config = api.config_of(run.out)
    assert (config["lr"], config["steps"]) == (1e-6, 3)
    again = mezzo.finetune(**{**config, "out": str(tmp_path / "again")})
    assert again.digest == run.digest, "a run folder's config.json reproduces the run"
