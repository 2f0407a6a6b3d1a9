"""A model that a program holds, trained through a trainer with the signature of transformers'."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForMaskedLM, AutoTokenizer, TrainerCallback, TrainingArguments

import mezzo
from mezzo.errors import ConfigError

OPTIONS = {"task": "sst-2", "threads": 1, "device": "cpu", "lr": 1e-2, "eps": 1e-2}


@pytest.fixture
def parts(tiny_folder, tiny_data):
    """A model, its tokenizer and rows."""
    rows = [json.loads(line) for line in Path(tiny_data).read_text().splitlines()]
    return AutoModelForMaskedLM.from_pretrained(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder), rows


class Recorder(TrainerCallback):
    def __init__(self, stop_at: int = 0) -> None:
        self.seen: list[str] = []
        self.stop_at = stop_at

    def on_train_begin(self, args, state, control, **more):
        self.seen.append("begin")

    def on_step_end(self, args, state, control, **more):
        self.seen.append(f"step {state.global_step}")
        control.should_training_stop = state.global_step == self.stop_at

    def on_evaluate(self, args, state, control, metrics, **more):
        self.seen.append("evaluate")
        assert set(metrics) == {"eval_loss", "eval_accuracy"}

    def on_train_end(self, args, state, control, **more):
        self.seen.append("end")


def test_trainer_changes_the_model_in_place(parts, tmp_path):
    model, tokenizer, rows = parts
    before = copy.deepcopy(model.state_dict())
    args = TrainingArguments(
        str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=4, eval_steps=3, report_to="none", seed=5
    )
    recorder = Recorder()
    trainer = mezzo.MezzoTrainer(
        model, args, rows, rows, processing_class=tokenizer, callbacks=[recorder], space="full", **OPTIONS
    )
    done = trainer.train()
    assert (done.global_step, trainer.run.steps) == (3, 3)
    assert recorder.seen == ["begin", "evaluate", "step 1", "step 2", "step 3", "evaluate", "end"]
    config = mezzo.api.config_of(trainer.run.out)
    assert (config["batch_size"], config["eval_every"], config["seed"], config["method"]) == (4, 3, 5, "spsa")
    assert trainer.evaluate()["eval_accuracy"] == trainer.run.accuracy
    assert [row["text"] for row in trainer.predict(rows[:2])] == [row["text"] for row in rows[:2]]
    trainer.save_model(tmp_path / "saved")
    saved = AutoModelForMaskedLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    moved = any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert moved == (trainer.run.best_step > 0)
    assert mezzo.verify(trainer.run.out).ok


def test_trainer_trains_the_adapters_of_a_peft_model(parts, tmp_path):
    base, tokenizer, rows = parts
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=6, target_modules=["query", "value"]))
    frozen = {name: value.clone() for name, value in model.state_dict().items() if ".lora_" not in name}
    options = {**OPTIONS, "steps": 4, "batch_size": 4, "eval_every": 4, "method": "spsa", "schedule": "constant"}
    trainer = mezzo.MezzoTrainer(model, str(tmp_path / "out"), rows, processing_class=tokenizer, dev=rows, **options)
    trainer.train()
    config = mezzo.api.config_of(trainer.run.out)
    assert (config["space"], config["rank"], config["alpha"], config["targets"]) == ("lora", 2, 6.0, ["query", "value"])
    assert all(torch.equal(value, frozen[name]) for name, value in model.state_dict().items() if name in frozen)
    text = f"a warm film It was{tokenizer.mask_token}."
    inputs = tokenizer(text, return_tensors="pt")
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    words = [tokenizer.encode(word, add_special_tokens=False)[0] for word in (" terrible", " great")]
    with torch.no_grad():
        found = model.eval()(**inputs).logits[0, place, words].softmax(0)
    (row,) = mezzo.predict(["a warm film"], trainer.run.out)
    torch.testing.assert_close(found, torch.tensor(list(row["probabilities"].values())), atol=2e-6, rtol=1e-4)
    if trainer.run.best_step:
        with pytest.raises(ConfigError, match="has been trained already"):
            mezzo.MezzoTrainer(model, None, rows, processing_class=tokenizer)


def test_a_callback_stops_the_run(parts, tmp_path):
    model, tokenizer, rows = parts
    recorder = Recorder(stop_at=2)
    options = {**OPTIONS, "steps": 9, "batch_size": 4, "space": "head", "out": str(tmp_path / "out")}
    trainer = mezzo.MezzoTrainer(model, options, rows, processing_class=tokenizer, callbacks=[recorder])
    assert trainer.train().global_step == 2
    assert trainer.run.stopped == "stopped by a callback"


def test_mistakes_are_one_line(parts, tmp_path):
    model, tokenizer, rows = parts
    with pytest.raises(ConfigError, match="pass processing_class=tokenizer"):
        mezzo.MezzoTrainer(model, None, rows)
    with pytest.raises(ConfigError, match="needs train_dataset"):
        mezzo.MezzoTrainer(model, processing_class=tokenizer)
    args = TrainingArguments(str(tmp_path), num_train_epochs=2, report_to="none")
    with pytest.raises(ConfigError, match="does not count num_train_epochs: set max_steps"):
        mezzo.MezzoTrainer(model, args, rows, processing_class=tokenizer)
    with pytest.raises(ConfigError, match="call train"):
        mezzo.MezzoTrainer(model, None, rows, processing_class=tokenizer).evaluate()
