"""Weights and scores that are not finite numbers: refused where they enter and leave, never taken for an answer."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from mezzo import api
from mezzo.cli import main
from mezzo.engines.hf_hub import locate
from mezzo.engines.torch.catalog import digest_of
from mezzo.errors import ConfigError, ModelError
from mezzo.evaluation.evaluate import evaluate, rank
from mezzo.journal.content import NAME, read
from mezzo.method.objectives import METRICS, get_objective
from mezzo.types import Batch, Prompt, Readout
from tests.hostile.files import read_json_lines, write_journal

EMBEDDING = "roberta.embeddings.word_embeddings.weight"


def damage(folder: Path, name: str, place: tuple[int, ...], value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][place] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def damaged(tiny_folder, tmp_path) -> Path:
    """A model with NaN in the embedding of a token that no text has."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "damaged"))
    damage(folder, EMBEDDING, (399, 0), math.nan)
    return folder


# ---- weights that enter


@pytest.mark.parametrize("space", ["lora", "full", "prefix"])
def test_base_with_nan_that_no_batch_reads_is_refused(space, damaged, tiny_run, tmp_path):
    with pytest.raises(ModelError, match=f"{EMBEDDING} holds values that are not finite numbers"):
        api.finetune(**{**tiny_run, "model": str(damaged), "space": space}, steps=2, out=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_quantized_base_with_nan_is_refused(kind, damaged, tiny_run, tmp_path):
    pytest.importorskip("bitsandbytes")
    for name in (EMBEDDING, "roberta.encoder.layer.0.intermediate.dense.weight"):
        folder = Path(shutil.copytree(tiny_run["model"], tmp_path / name))
        damage(folder, name, (3, 0), math.inf)
        with pytest.raises(ModelError, match="not finite numbers"):
            api.finetune(**{**tiny_run, "model": str(folder)}, quantize=kind, steps=2, out=str(tmp_path / "run"))


def test_base_that_float16_cannot_hold_is_refused(tiny_folder, tiny_data, tmp_path):
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "large"))
    damage(folder, EMBEDDING, (399, 0), 1e6)
    options = {"model": str(folder), "task": "sst-2", "data": tiny_data, "threads": 1, "device": "cpu"}
    assert api.evaluate(**options).n
    with pytest.raises(ModelError, match="use --dtype bfloat16"):
        api.evaluate(**options, dtype="float16")


def forge_snapshot(run: Path, value: float) -> None:
    """Write a value into every snapshot, and the digests of the result into the journal."""
    digests = {}
    for path in (run / "snapshots").iterdir():
        tensors = load_file(path)
        tensors[sorted(tensors)[0]].flat[0] = value
        save_file(tensors, path)
        step = int(path.stem.partition("-")[2])
        digests[step] = digest_of((name, torch.from_numpy(values)) for name, values in tensors.items())
    journal = read_json_lines(run / NAME)
    for line in journal:
        line |= {"digest": digests[line["mark"]]} if line.get("mark") in digests else {}
    write_journal(run / NAME, journal)


@pytest.fixture
def run(tiny_run, tmp_path) -> Path:
    api.finetune(**tiny_run, steps=4, eval_every=4, out=str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_forged_snapshot_with_nan_is_not_used(value, run, tiny_data, tmp_path):
    expected = api.open_run(run, at=4)[0].digest()
    accuracy = api.evaluate(run, data=tiny_data, at=4)
    forge_snapshot(run, value)
    assert api.open_run(run, at=4)[0].digest() == expected, "rebuilt from the journal instead"
    assert api.evaluate(run, data=tiny_data, at=4) == accuracy
    api.export(run, "adapter", tmp_path / "adapter", at=4)
    exported = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(np.isfinite(tensor).all() for tensor in exported.values())
    assert api.finetune(resume=str(run), steps=6).steps == 6


def test_snapshot_that_is_not_the_journals_is_not_used(run):
    expected = api.open_run(run, at=4)[0].digest()
    journal = (run / NAME).read_bytes()
    forge_snapshot(run, 1.0)
    (run / NAME).write_bytes(journal)
    assert api.open_run(run, at=4)[0].digest() == expected


# ---- weights that leave


def test_weights_that_overflow_are_not_exported(run, tiny_data, tmp_path, capsys):
    """A journal of finite steps can lead to weights that are not."""
    journal = read_json_lines(run / NAME)
    kept = [line for line in journal if "mark" not in line]
    for line in (line for line in kept if "terms" in line):
        line["terms"] = [[seed, 3.0000000054977558e38] for seed, _ in line["terms"]]
    write_journal(run / NAME, kept)
    shutil.rmtree(run / "snapshots")
    for kind in ("adapter", "model"):
        with pytest.raises(ConfigError, match="not finite numbers"):
            api.export(run, kind, tmp_path / kind, at=4)
        assert not (tmp_path / kind).exists()
    assert main(["eval", str(run), "--at", "4", "--data", tiny_data]) == 2
    assert "not finite numbers" in capsys.readouterr().err


# ---- scores


@pytest.fixture
def nan_model(tiny_folder, tmp_path) -> Path:
    """A model with finite weights all of whose scores are NaN: its activations overflow."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "nan"))
    tensors = load_file(folder / "model.safetensors")
    name = "roberta.encoder.layer.1.output.LayerNorm.weight"
    tensors[name] = np.where(np.arange(32) % 2, 3e38, -3e38).astype(np.float32)
    tensors["lm_head.dense.weight"] = np.full_like(tensors["lm_head.dense.weight"], 3e38)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_model_whose_scores_are_nan_is_neither_evaluated_nor_used(nan_model, tiny_data, tmp_path, capsys):
    options = ["--model", str(nan_model), "--task", "sst-2", "--data", tiny_data, "--threads", "1", "--device", "cpu"]
    for command in ("eval", "predict"):
        assert main([command, *options]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert "scores that are not finite numbers" in output.err
        assert output.err.count("\n") == 1
    train = ["train", "--train", tiny_data, *options[:4], "--dev", tiny_data, "--out", str(tmp_path / "run")]
    assert main([*train, "--threads", "1"]) == 2


def test_model_whose_scores_are_nan_generates_nothing(tmp_path, capsys):
    folder = Path(shutil.copytree(locate("mezzo/llama-mini"), tmp_path / "nan"))
    tensors = load_file(folder / "model.safetensors")
    norm = "model.norm.weight"
    tensors[norm] = np.where(np.arange(len(tensors[norm])) % 2, 3e38, -3e38).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    row = {"title": "a", "context": "the cat sat", "question": "who sat?", "answers": {"text": ["the cat"]}}
    (tmp_path / "squad.jsonl").write_text(json.dumps(row) + "\n")
    for command in ("eval", "predict"):
        options = ["--model", str(folder), "--task", "squad", "--data", str(tmp_path / "squad.jsonl"), "--threads", "1"]
        assert main([command, *options]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert "scores that are not finite numbers" in output.err


class FixedScores:
    """An engine of given scores."""

    def __init__(self, scores: Any) -> None:
        self.scores = np.array([scores], dtype=np.float32)

    def score(self, batch: Batch, probes: Any) -> Any:
        return self.scores


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_numbers_count_as_wrong(metric, classes, bad):
    labels = [number % classes for number in range(12)]
    right = np.eye(classes)[labels]
    prompts = [Prompt((1,), label=label) for label in labels]
    readout = Readout("words", words=tuple(range(classes)))
    perfect = evaluate(FixedScores(right), prompts, readout, metric).evaluation
    worst = evaluate(FixedScores(np.full_like(right, bad)), prompts, readout, metric)
    mixed = evaluate(FixedScores(np.where(np.arange(12)[:, None] < 6, bad, right)), prompts, readout, metric)
    assert perfect.value == 1.0
    assert worst.evaluation.value <= 0.0 and worst.evaluation.calibrated <= 0.0 and worst.evaluation.accuracy == 0.0
    assert not any(worst.right) and mixed.right == (False,) * 6 + (True,) * 6
    assert math.isnan(worst.evaluation.loss) and math.isnan(mixed.evaluation.loss)
    evaluations = [worst.evaluation, mixed.evaluation, perfect]
    assert sorted(evaluations, key=lambda e: rank(e.value, e.loss, 0)) == evaluations


def test_absent_candidates_are_no_error():
    prompts = [Prompt((1,), label=0, candidates=((1,), (2,))), Prompt((1,), label=2, candidates=((1,), (2,), (3,)))]
    scores = [[0.0, -1.0, -math.inf], [0.0, 1.0, 2.0]]
    found = evaluate(FixedScores(scores), prompts, Readout("candidates")).evaluation
    assert found.value == 1.0 and math.isfinite(found.loss)


@pytest.mark.parametrize("metric", METRICS)
def test_metric_of_nan_scores_is_no_loss_to_train_on(metric):
    batch = Batch((Prompt((1,), label=0), Prompt((1,), label=1)), Readout("words", words=(1, 2)))
    scores = np.array([np.full((2, 2), np.nan), np.eye(2)], dtype=np.float32)
    losses = get_objective(metric).losses(scores, batch)
    assert math.isnan(losses[0]) and math.isfinite(losses[1])


def test_mistakes_are_valid_json(run):
    content = read(run)
    assert content.steps == 4
    for line in (run / "mistakes.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
