"""What a newcomer gets wrong, from an empty folder: every mistake is answered by what happened and what to do."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import mezzo
from mezzo.api import prepare_options
from mezzo.cli import commands, main
from mezzo.config import RunConfig
from mezzo.runs.datasets import splits_with_train
from tests.conftest import SENTENCES
from tests.processes import reset_signals
from tests.tickets import make_tickets, write_csv

ROWS = [(text, label) for label, texts in SENTENCES.items() for text in texts]
GOOD = (
    "--model",
    "model",
    "--task",
    "sst-2",
    "--train",
    "reviews.csv",
    "--dev",
    "reviews.csv",
    "--steps",
    "4",
    "--threads",
    "1",
)


@pytest.fixture
def folder(tiny_folder, tmp_path, monkeypatch):
    """An empty folder and what a newcomer has put into it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "model")
    table("reviews.csv", "text,label", ((text, label) for text, label in ROWS))
    table("stars.csv", "id,note,verdict", ((number, text, label) for number, (text, label) in enumerate(ROWS)))
    table("odd.csv", "text,label", ((text, {"negative": "bad", "positive": "good"}[label]) for text, label in ROWS))
    table("ids.csv", "text,label", ((text, 1 + (label == "positive")) for text, label in ROWS))
    Path("latin.csv").write_bytes("text,label\nun café,positive\n".encode("latin-1"))
    Path("run.toml").write_text("[method]\nlearning_rate = 1e-6\n")
    Path("tickets.toml").write_text('columns = ["text"]\ntemplate = "{text} This is [MASK]."\nlabels = ["a", "b"]\n')
    maskless = Path(shutil.copytree("model", "maskless"))
    settings = json.loads((maskless / "tokenizer_config.json").read_text())
    (maskless / "tokenizer_config.json").write_text(json.dumps({**settings, "mask_token": None}))
    untold = Path(shutil.copytree("model", "untold"))
    for file in untold.glob("*token*"):
        file.unlink()
    (Path(shutil.copytree("model", "unset")) / "mezzo.json").write_text("[]")
    return tmp_path


def table(name: str, header: str, rows) -> None:
    Path(name).write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def call(*arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as left:  # argparse leaves by itself
        return int(left.code or 0)


@dataclass(frozen=True)
class Mistake:
    """What is typed, and what must be in the one line of the answer."""

    typed: tuple[str, ...]
    happened: str
    todo: str


def train(**changes: str) -> tuple[str, ...]:
    """The good command with some options changed."""
    words = dict(zip(GOOD[::2], GOOD[1::2], strict=True)) | {f"--{k.replace('_', '-')}": v for k, v in changes.items()}
    return ("train", *(part for pair in words.items() for part in pair))


MISTAKES = {
    "wrong column": Mistake(
        train(train="stars.csv"), "no column 'text'; found 'id', 'note', 'verdict'", "--columns text=NAME"
    ),
    "wrong label": Mistake(train(train="odd.csv"), "unknown label 'bad'", "labels are negative, positive"),
    "ids from one": Mistake(train(train="ids.csv"), "unknown label '2'", "ids are 0 negative, 1 positive"),
    "file not found": Mistake(train(train="review.csv"), "no file 'review.csv'", "did you mean 'reviews.csv'?"),
    "other encoding": Mistake(train(train="latin.csv", encoding="utf-8"), "not UTF-8", "--encoding latin-1"),
    "no mask in the template": Mistake(train(template="{text} It was so."), "has no mask", "put [MASK]"),
    "no mask token": Mistake(train(model="maskless"), "has no mask token", "use a masked language model"),
    "unknown model": Mistake(train(model="roberta-hugh"), "neither bundled nor a local folder", "Pass a local folder"),
    "model folder not found": Mistake(train(model="./modle"), "no folder ./modle", "pass an existing model folder"),
    "unknown task": Mistake(train(task="sts-2"), "unknown task 'sts-2'", "did you mean 'sst-2'?"),
    "task file without words": Mistake(train(task="tickets.toml"), "'tickets'", "word"),
    "word of several tokens": Mistake(
        train(words="negative=terrible,positive=magnificent"), "'magnificent' of label 'positive' is", "must be one"
    ),
    "not a number": Mistake(train(lr="small"), "lr must be a number", "not 'small'"),
    "unknown space": Mistake(train(space="lorra"), "'lorra'", "did you mean 'lora'"),
    "too few examples": Mistake(train(k="100"), "label 'negative' has 8 rows", "give more data, or k=4"),
    "option misspelt": Mistake(
        ("train", "--learning-rate", "1e-6"), "unknown option --learning-rate", "did you mean '--lr'?"
    ),
    "config misspelt": Mistake(
        ("train", "--config", "run.toml"), "unknown option 'method.learning_rate'", "did you mean 'lr'?"
    ),
    "command misspelt": Mistake(("trian",), "'trian' is not one of train", "did you mean 'train'?"),
    "no data for the task": Mistake(
        ("train", "--task", "trec"), "task 'trec' has no bundled data", "pass --train FILE"
    ),
    "labels of generated text": Mistake(
        train(model="mezzo/llama-mini", task="squad", objective="accuracy"),
        "accuracy counts labels, and task 'squad' generates texts",
        "train on cross_entropy or f1",
    ),
    "no such run": Mistake(("eval", "runs/mine"), "runs/mine does not exist", "name a run folder"),
    "a model for a run": Mistake(
        ("eval", "mezzo/roberta-mini"), "mezzo/roberta-mini does not exist", "and a model by --model"
    ),
    "no tokenizer": Mistake(train(model="untold"), "untold is a folder without a tokenizer", "save_pretrained"),
    "rank of noise": Mistake(
        train(space="matrices", noise="lowrank", noise_rank="100000"),
        "fits no trained matrix",
        "lower --noise-rank below",
    ),
    "settings of a model": Mistake(train(model="unset"), "mezzo.json cannot be used", "fix or delete it"),
    "not a finite number": Mistake(train(lr="nan"), "lr must be a finite number", "not nan"),
    "GPU wanted": Mistake(train(device="cuda"), "sees no GPU", "use --device cpu"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_before_training_is_one_line_and_leaves_nothing(name, folder, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    mistake, before = MISTAKES[name], set(folder.iterdir())
    assert call(*mistake.typed) == 2
    out, err = capsys.readouterr()
    assert mistake.happened in err
    assert mistake.todo in err
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in out + err
    assert set(folder.iterdir()) == before, "nothing is left behind"


HINTS = {
    "--learning-rate": "'--lr'",
    "--lrr": "'--lr'",
    "--stpes": "'--steps'",
    "--batch": "'--batch-size'",
    "--num_train": "'--train-limit'",
    "--lora": "'--space lora'",
    "--cosine": "'--schedule cosine'",
    "--head": "'--readout head' or '--space head'",
    "-lr": "'--lr'",
}


@pytest.mark.parametrize("flag", HINTS)
def test_an_unknown_option_is_answered_by_the_one_that_was_meant(flag, capsys):
    assert call("train", flag, "1") == 2
    assert f"unknown option {flag}; did you mean {HINTS[flag]}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag"), [("train", "--size"), ("eval", "--lora"), ("eval", "--num_train"), ("signal", "--num_train")]
)
def test_no_hint_is_better_than_a_wrong_one(command, flag, capsys):
    assert call(command, flag, "1") == 2
    assert "did you mean" not in capsys.readouterr().err


def test_the_advice_about_columns_works(folder, capsys):
    found = ("--columns", "text=note,label=verdict")
    assert call(*train(train="stars.csv", dev="stars.csv", out="run"), *found, "--json") == 0
    (first, second) = (json.loads(capsys.readouterr().out.splitlines()[-1]), call(*train(out="plain"), "--json"))
    assert second == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["digest"] == first["digest"], (
        "the same data, the same run"
    )
    assert call("eval", "run", "--data", "stars.csv") == 0, "the run remembers"
    assert call("predict", "run", "--data", "stars.csv") == 0
    capsys.readouterr()
    assert call("eval", "run", "--data", "reviews.csv") == 2
    assert "no column 'note' for 'text'; found 'text', 'label'" in capsys.readouterr().err
    assert call("eval", "run", "--data", "reviews.csv", "--columns", "text=text,label=label") == 0
    assert call(*train(columns="note")) == 2
    assert "columns are pairs such as text=body,label=stars, not 'note'" in capsys.readouterr().err


def test_a_file_in_latin_1_is_read_and_said_in_one_line(folder, capsys):
    assert call("eval", "--model", "model", "--task", "sst-2", "--data", "latin.csv") == 0
    err = capsys.readouterr().err
    assert "warning: latin.csv, line 2: not UTF-8 (byte 0xe9 at 7); the file is read as latin-1" in err
    assert len(err.strip().splitlines()) == 1, err


def test_a_k_shot_folder_gives_its_three_splits_and_says_so(folder, capsys):
    Path("SST-2/4-13").mkdir(parents=True)
    for split, rows in (("train", ROWS[4:12]), ("dev", ROWS[:6]), ("test", ROWS[:10])):
        lines = [f"{text}\t{int(label == 'positive')}" for text, label in rows]
        Path(f"SST-2/4-13/{split}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    typed = ("train", "--model", "model", "--task", "sst-2", "--steps", "1", "--out", "run", "--threads", "1")
    assert call(*typed, "--train", "SST-2/4-13", "--json") == 0
    out, err = capsys.readouterr()
    assert "SST-2/4-13 also has dev.tsv as dev and test.tsv as test\n" in err
    assert (json.loads(out)["tested_on"], json.loads(out)["n_test"]) == ("test", 10)
    config = json.loads(Path("run/config.json").read_text())
    assert (config["dev"], config["test"]) == (str(folder / "SST-2/4-13/dev.tsv"), str(folder / "SST-2/4-13/test.tsv"))
    assert "8 examples" in err, "no row of train is held out"


def test_only_what_is_not_given_is_taken_from_the_folder(folder):
    for name in ("whole/train.csv", "whole/dev.csv", "whole/test.csv", "2-7/train.csv", "2-7/dev.csv", "2-7/test.csv"):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy("reviews.csv", name)
    found = lambda **options: splits_with_train(options.get("train"), RunConfig(task="sst-2", **options))  # noqa: E731
    assert found(train="2-7") == {"dev": "2-7/dev.csv", "test": "2-7/test.csv"}
    assert found(train="2-7", dev="mine.csv") == {"test": "2-7/test.csv"}
    assert found(train="2-7", k=2) == {}
    assert found(train="whole") == {"dev": "whole/dev.csv", "test": "whole/test.csv"}
    Path("whole/test.csv").write_text("text\na film\n")
    assert found(train="whole") == {"dev": "whole/dev.csv"}, "a test file of GLUE has no labels"
    assert found(train="reviews.csv") == found() == {}

    class Dataset(list):
        features: ClassVar = {}

    rows = [{"text": text, "label": label} for text, label in ROWS]
    bare = [{"text": row["text"]} for row in rows]
    for test, splits in ((rows, {"train", "dev", "test"}), (bare, {"train", "dev"})):
        named = {"train": Dataset(rows), "validation": Dataset(rows[:4]), "test": Dataset(test)}
        options = prepare_options({"train": named, "task": "sst-2"}, None, None, None, lambda event, values: None)
        assert {name for name in options if Path(str(options[name])).suffix == ".jsonl"} == splits


def test_a_learning_rate_that_is_too_high(folder, capsys):
    wild = {"space": "full", "steps": "60", "eval_every": "30", "eps": "1e-3"}
    assert call(*train(**wild, lr="3e-2", out="wild")) == 0
    out, err = capsys.readouterr()
    assert "warning: the run is diverging: the loss was" in err
    assert "Start again with an --lr three to ten times smaller" in err
    assert re.search(r"^verdict +diverged", out, re.M)
    assert call(*train(**wild, lr="1e10", out="wilder")) == 1
    err = capsys.readouterr().err
    assert "the loss was not a number for 20 steps in a row" in err
    assert "A smaller --eps, or a smaller --lr of --method spsa, usually helps" in err
    assert call("report", "wilder") == 0
    assert "wilder: diverged" in capsys.readouterr().out


def test_a_finished_run_resumed_and_a_folder_used_twice(folder, capsys):
    assert call(*train(out="run")) == 0
    capsys.readouterr()
    assert call("train", "--resume", "run") == 0
    err = capsys.readouterr().err
    assert "this run has finished: its 4 steps are done" in err
    assert "Train on with --resume run --steps N, N more than 4" in err
    assert call("train", "--resume", "run", "--steps", "6") == 0
    shutil.copytree("run", "my run")
    capsys.readouterr()
    for typed, message in (
        (train(out="run"), "run holds a run already: continue it with --resume run, or choose another --out"),
        (
            train(out="my run"),
            "my run holds a run already: continue it with --resume 'my run', or choose another --out",
        ),
        (("train", "--resume", "run", "--lr", "1"), "a resumed run keeps its settings; lr cannot change"),
        (("export", "run", "zip"), "a run is exported as adapter, model or journal, not 'zip'"),
        (("eval", "run", "--data", "reviews.csv", "--at", "99"), "the journal holds steps 0 to 6; there is no step 99"),
    ):
        assert call(*typed) == 2
        err = capsys.readouterr().err
        assert message in err
        assert len(err.strip().splitlines()) == 1


def test_a_batch_larger_than_the_data_is_said(folder, capsys):
    assert call(*train(batch_size="512", out="run")) == 0
    assert (
        "--batch-size 512 is more than the 16 training examples: every step sees all of them" in capsys.readouterr().err
    )


LITTLE_MEMORY = """
import resource, sys
import torch, transformers, mezzo.api
from mezzo.cli import commands, main
torch.set_num_threads(1)
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 600 * 2**20,) * 2)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_a_batch_larger_than_the_memory(tmp_path):
    sizes = ["--batch-size", "900", "--micro-batch", "900", "--steps", "1", "--eval-limit", "4", "--threads", "1"]
    command = [sys.executable, "-c", LITTLE_MEMORY, "train", "--space", "matrices", *sizes]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "cpu is out of memory with 900 examples and 2 probes in one forward" in done.stderr
    assert "start again with a smaller --micro-batch" in done.stderr
    assert "Traceback" not in done.stderr


def raised(text):
    raise RuntimeError(text)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: np.empty(2**50, dtype=np.uint8),
        lambda: torch.empty(2**50, dtype=torch.uint8),
        lambda: raised(
            "could not create a primitive"
        ),  # oneDNN's words, which it has only where memory is short by little
        lambda: raised("std::bad_alloc"),
    ],
    ids=["numpy", "torch", "onednn", "c++"],
)
def test_memory_refused_anywhere_else_is_one_line(ask, monkeypatch, capsys):
    monkeypatch.setattr(commands, "tasks", lambda options: ask())
    assert call("tasks", "list") == 1
    assert re.fullmatch(r"mezzo: this machine is out of memory \(.+\); close .+\n", capsys.readouterr().err)


def test_other_failures_are_not_explained_away(monkeypatch):
    monkeypatch.setattr(commands, "tasks", lambda options: raised("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        call("tasks", "list")


# ---- from a messy file to a shared model


@pytest.fixture(scope="module")
def trained_on_tickets(tmp_path_factory):
    """A folder in which `mezzo train --train tickets.csv` has run until its dev figure was good, and Ctrl-C was pressed."""
    folder = tmp_path_factory.mktemp("newcomer")
    write_csv(folder / "tickets.csv", make_tickets())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mezzo", "train", "--train", "tickets.csv"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=folder, env=environment, preexec_fn=reset_signals, **pipes)
    said, good = [], False
    for line in process.stderr:
        said.append(line)
        found = re.search(r"dev accuracy ([\d.]+)%", line)
        if found and float(found[1]) >= 90 and not good:
            process.send_signal(signal.SIGINT)  # a second one would end it at once
            good = True
    out = process.stdout.read()
    assert process.wait() == 130, "".join(said)
    return folder, out, "".join(said)


@pytest.mark.slow
def test_five_commands_lead_from_a_messy_file_to_a_shared_model(trained_on_tickets, monkeypatch, capsys):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder, out, said = trained_on_tickets
    assert "proposed task 'tickets'" in said
    assert "data: rows without a text: " in said
    assert re.search(r"^verdict +worked: ", out, re.M), out
    assert float(re.search(r"^dev accuracy +([\d.]+)%", out, re.M)[1]) >= 85
    assert "majority class         60.0%" in out
    monkeypatch.chdir(folder)
    run = next(Path("runs").glob("tickets-*"))
    for command in (
        ("predict", str(run), "tickets.csv", "--format", "csv"),
        ("report", str(run)),
        ("export", str(run), "model", "--out", "model"),
        ("export", str(run), "journal", "--out", "tickets.mezzo"),
    ):
        assert call(*command) == 0, command
        if command[0] == "predict":
            predicted = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    rows = make_tickets()
    assert [row["id"] for row in predicted] == [row["id"] for row in rows]
    assert sum(row["prediction"] == row["category"] for row in predicted) > 0.85 * len(rows)
    assert "billing_issue" in (run / "report.html").read_text()
    model, tokenizer = (each.from_pretrained("model") for each in (AutoModelForMaskedLM, AutoTokenizer))
    text = json.loads(Path("model/mezzo.json").read_text())["task"]["template"]
    asked = text.replace("{message}", rows[0]["message"]).replace("[MASK]", tokenizer.mask_token)
    words = {"billing_issue": "issue", "Technical problem": "problem", "account_access": "access"}
    encoded = tokenizer(asked, return_tensors="pt")
    place = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero().item()
    ids = [tokenizer(" " + word, add_special_tokens=False)["input_ids"][0] for word in words.values()]
    with torch.no_grad():
        answer = list(words)[int(model(**encoded).logits[0, place, ids].argmax())]
    assert answer == predicted[0]["prediction"], "transformers alone gives the same answer"
    adapter = get_peft_model(model, LoraConfig(target_modules=["query", "value"]))
    assert adapter.get_nb_trainable_parameters()[0] > 0, "and PEFT can train it on"
    size = Path("model/model.safetensors").stat().st_size
    assert Path("tickets.mezzo").stat().st_size < size / 100, "it grows with the steps, not with the model"
    texts = [row["message"] for row in rows[:3]]
    shared = [row["prediction"] for row in mezzo.predict(texts, "tickets.mezzo")]
    assert shared == [row["prediction"] for row in predicted[:3]]
