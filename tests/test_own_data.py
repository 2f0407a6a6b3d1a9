"""A stranger's file trains with no further option, and everything that follows works on such a run."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mezzo
from mezzo import api
from mezzo.cli import main
from mezzo.errors import DataError
from mezzo.runs.datasets import hold_out
from mezzo.runs.resolve import resolve_setup
from mezzo.runs.suggestion import mutual_information
from mezzo.tasks import Task, get_task, load_examples
from mezzo.tasks.task_file import to_toml
from mezzo.types import Example
from tests.tickets import make_tickets, write_csv

TEMPLATE = ("--template", "It was [MASK].")
"""Nothing to compare, so that the model is loaded once."""
QUICK = ("--steps", "2", "--eval-every", "2", "--batch-size", "4", "--threads", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def tickets(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_csv(tmp_path_factory.mktemp("data") / "tickets.csv", make_tickets())


@pytest.fixture(scope="module")
def trained(tickets: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the bundled model on the tickets, never changed."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", "--train", tickets, *QUICK, "--out", str(out)]) == 0
    return out


def call(*words: str) -> int:
    try:
        return main(list(words))
    except SystemExit as left:  # argparse leaves by itself
        return int(left.code or 0)


def refused(capsys: Any, *words: str) -> str:
    """The one line that refuses a command."""
    assert call(*words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


# ---- a proposed task


def test_proposal_is_shown_before_it_is_used(tickets, tmp_path, capsys):
    assert call("train", "--train", tickets, *QUICK, "--out", str(tmp_path / "run")) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "proposed task 'tickets':",
        "  text      message",
        "  label     category: account_access → access, billing_issue → issue, Technical problem → problem",
    ]
    assert lines[3].startswith("  template  ")
    assert "[MASK]" in lines[3] and "{message}" in lines[3]
    assert any(line.startswith("training ") for line in lines[4:])


def test_proposed_task_is_recorded(trained, tickets):
    config = json.loads((trained / "config.json").read_text())
    task = json.loads(config["task"])
    assert (task["name"], task["columns"], task["label_column"]) == ("tickets", ["message"], "category")
    header = json.loads((trained / "journal.jsonl").read_text().splitlines()[0])
    assert header["task"] == task
    assert header["config"]["task"] == config["task"]


def test_proposed_run_can_be_used(trained, tickets, tmp_path, capsys):
    row = {"message": "My password is refused.", "category": "account_access"}
    data = write_csv(tmp_path / "new.csv", [row])
    assert call("predict", str(trained), "--data", data) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert predicted["message"] == row["message"]
    assert predicted["prediction"] in ("account_access", "billing_issue", "Technical problem")
    assert [each["prediction"] for each in mezzo.predict([row["message"]], trained)] == [predicted["prediction"]]
    assert call("eval", str(trained), "--data", tickets, "--eval-limit", "20") == 0
    assert call("verify", str(trained)) == 0
    assert call("report", str(trained), "--out", str(tmp_path / "report.html")) == 0
    assert "billing_issue → issue" in (tmp_path / "report.html").read_text()
    template = ("--template", "{message} It was [MASK].")
    assert call("eval", str(trained), "--data", tickets, "--eval-limit", "20", *template) == 0


def test_proposed_run_is_resumed_and_repeated(trained, tickets, tmp_path, capsys):
    first, again = tmp_path / "first", tmp_path / "again"
    assert call("train", "--train", tickets, *QUICK, "--out", str(first)) == 0
    assert call("train", "--resume", str(first), "--steps", "3") == 0
    assert call("train", "--config", str(trained / "config.json"), "--out", str(again)) == 0
    capsys.readouterr()
    assert mezzo.verify(again).digest == mezzo.verify(trained).digest, "the same task was proposed"


def test_compact_journal_of_a_proposed_run_predicts(trained, tmp_path):
    compact = mezzo.export(trained, "journal", out=tmp_path / "run.mezzo")
    texts = ["The app closes when I open my photos."]
    assert list(mezzo.predict(texts, compact)) == list(mezzo.predict(texts, trained))


def test_rows_in_python_need_no_task(tmp_path):
    options = {"steps": 1, "batch_size": 4, "threads": 1, "device": "cpu", "out": tmp_path / "run"}
    seen: list[str] = []
    run = mezzo.finetune(train=iter(make_tickets(40)), observe=lambda event, _: seen.append(event), **options)
    assert seen[0] == "proposal"
    assert next(iter(mezzo.predict(["Hello?"], run.out)))["message"] == "Hello?"


def test_labels_without_words_train_a_head(tiny_folder, tickets, tmp_path, capsys):
    out = str(tmp_path / "run")
    assert call("train", "--model", tiny_folder, "--train", tickets, *QUICK, "--space", "head", "--out", out) == 0
    assert "a fresh classification head is trained instead" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "config.json").read_text())["readout"] == "head"
    assert call("predict", out, "--data", tickets) == 0
    assert call("verify", out) == 0


def test_causal_model_gets_a_causal_template(tickets, tmp_path, capsys):
    out = str(tmp_path / "run")
    assert call("train", "--model", "mezzo/llama-mini", "--train", tickets, *QUICK, "--out", out) == 0
    assert "[MASK]" not in capsys.readouterr().err
    assert call("verify", out) == 0


def test_file_named_like_a_task_is_not_that_task(tmp_path, capsys):
    data = write_csv(tmp_path / "reviews.csv", make_tickets(40))
    assert call("train", "--train", data, *TEMPLATE, *QUICK, "--out", str(tmp_path / "run")) == 0
    capsys.readouterr()
    assert "task 'own-reviews' has no bundled data: pass --data FILE" in refused(capsys, "eval", str(tmp_path / "run"))


def test_refused_proposal_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{**row, "category": "billing"} for row in make_tickets(40)]
    write_csv(Path("one.csv"), rows)
    assert "holds only 'billing'; training needs at least two labels" in refused(capsys, "train", "--train", "one.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["one.csv"]


def test_task_in_json_that_is_broken_is_refused(capsys):
    assert "not valid JSON" in refused(capsys, "train", "--task", "{broken")


def test_mutual_information_wants_confident_and_balanced_answers():
    import numpy as np

    sure, unsure = np.eye(3) * 20.0, np.zeros((3, 3))
    one_sided = np.tile([20.0, 0.0, 0.0], (3, 1))
    assert mutual_information(sure) == pytest.approx(np.log2(3), abs=1e-6)
    assert mutual_information(unsure) == pytest.approx(0)
    assert mutual_information(one_sided) == pytest.approx(0)


def test_print_config_shows_the_proposed_task(tickets, capsys):
    assert call("train", "--train", tickets, "--print-config") == 0
    assert '"name\\": \\"tickets\\"' in capsys.readouterr().out


def test_template_is_chosen_by_a_model_in_host_memory(tickets, tmp_path):
    """Only LoRA and prefixes can be trained beside it; comparing templates trains nothing."""
    assert (
        call("train", "--train", tickets, *QUICK, "--offload", "--space", "lora", "--out", str(tmp_path / "run")) == 0
    )


def test_missing_file_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, "train", "--train", "nowhere.csv") == "mezzo: no file 'nowhere.csv'; check the path"
    with pytest.raises(DataError, match="is not data"):
        mezzo.finetune(train=3)


# ---- mezzo tasks suggest, mezzo tasks new


def test_suggest_prints_the_proposal_with_its_ranking(tickets, capsys):
    assert call("tasks", "suggest", tickets, "--model", "mezzo/llama-mini", "--threads", "1", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    bits = [each["bits"] for each in found["ranking"]]
    assert bits == sorted(bits, reverse=True)
    assert len(bits) == len({each["template"] for each in found["ranking"]}) == 5
    assert found["task"]["template"] == found["ranking"][0]["template"]
    assert found["rows"] == {"account_access": 40, "billing_issue": 240, "Technical problem": 120}
    assert [line.split(" bits  ")[1] for line in err.splitlines() if " bits  " in line] == [
        each["template"].replace("\n", "\\n") for each in found["ranking"]
    ]


def test_new_writes_a_task_file_that_trains(tickets, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call("tasks", "new", tickets, "--threads", "1") == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"wrote tickets.toml; edit it, then: mezzo train --task tickets.toml --train {tickets}"
    )
    task = get_task("tickets.toml")
    assert task == api.suggest_task(tickets, threads=1).task
    assert call("train", "--task", "tickets.toml", "--train", tickets, *QUICK, "--out", "run") == 0
    capsys.readouterr()
    assert "tickets.toml exists already" in refused(capsys, "tasks", "new", tickets)
    assert "ends in .toml" in refused(capsys, "tasks", "new", tickets, "--out", "task.json")
    assert "name the data file to new" in refused(capsys, "tasks", "new")


TEXTS = st.text(max_size=8)


@given(labels=st.lists(TEXTS.filter(str.strip), min_size=2, max_size=4, unique=True), column=TEXTS, alias=TEXTS)
def test_task_file_is_read_back_whatever_its_texts(labels, column, alias):
    columns, aliases = (column, column + "2"), {column: (alias, "b")}
    task = Task("x", "{0} [MASK] {1}", columns, tuple(labels), tuple(labels), column_aliases=aliases, metric="f1")
    assert get_task(tomllib.loads(to_toml(task, ["a comment"], ["[MASK]"]))) == task


# ---- a task from --template and --words


def test_template_and_words_are_a_task(tickets, tmp_path, capsys):
    words = "billing_issue=money,Technical problem=computer,account_access=key"
    own = ("--template", "{message} It is about [MASK].", "--words", words)
    out = tmp_path / "run"
    assert call("train", "--train", tickets, *own, *QUICK, "--out", str(out)) == 0
    task = json.loads((out / "journal.jsonl").read_text().splitlines()[0])["task"]
    assert task["template"] == "{message} It is about [MASK]."
    assert task["labels"] == ["billing_issue", "Technical problem", "account_access"]
    assert task["words"] == ["money", "computer", "key"]
    assert call("train", "--resume", str(out), "--steps", "3") == 0
    assert call("eval", str(out), "--data", tickets, "--eval-limit", "20") == 0
    compact = mezzo.export(out, "journal", out=tmp_path / "run.mezzo")
    assert (
        call("eval", str(compact), "--data", tickets, "--eval-limit", "20", "--template", "{message} So [MASK].") == 0
    )
    capsys.readouterr()
    message = refused(capsys, "train", "--train", tickets, "--words", "billing_issue=money,account_access=key", *QUICK)
    assert "no word for the label 'Technical problem' (120 rows); --words needs one for every label" in message


# ---- unlabelled rows, separators


def with_gaps() -> list[dict[str, str]]:
    """Tickets of which every eighth has no category."""
    return [
        {**row, "category": "" if number % 8 == 0 else row["category"]} for number, row in enumerate(make_tickets(80))
    ]


def test_rows_without_a_label_are_listed_or_skipped(tmp_path, capsys):
    data = write_csv(tmp_path / "gaps.csv", with_gaps())
    out = str(tmp_path / "run")
    assert call("train", "--train", data, *TEMPLATE, *QUICK, "--out", out) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "gaps.csv, lines 2, 10, 18, 26, 34, 42, 50, 58, 66, 74: no label; " in message
    assert "--skip-unlabelled" in message
    assert call("train", "--train", data, *TEMPLATE, *QUICK, "--out", out, "--skip-unlabelled") == 0
    assert "data: rows without a label, which are skipped: 10\n" in capsys.readouterr().err
    assert call("eval", out, "--data", data) == 0, "the run remembers"
    assert " on 70 examples" in capsys.readouterr().out


def test_rows_in_python_without_a_label_are_skipped(tmp_path):
    seen: list[str] = []
    options = {"steps": 1, "batch_size": 4, "threads": 1, "device": "cpu", "out": tmp_path / "run"}
    mezzo.finetune(
        train=with_gaps(),
        skip_unlabelled=True,
        observe=lambda _, values: seen.append(str(values.get("text"))),
        **options,
    )
    assert "rows without a label, which are skipped: 10" in seen


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_separators_make_no_difference(delimiter, tickets, trained, tmp_path):
    data = write_csv(tmp_path / "tickets.csv", make_tickets(), delimiter)
    assert api.suggest_task(data, template="{message} Topic: [MASK].").counts == {
        "account_access": 40,
        "billing_issue": 240,
        "Technical problem": 120,
    }
    (first, *_), (second, *_) = (load_examples(path, recorded_task(trained)) for path in (tickets, data))
    assert first == second


def recorded_task(run: Path) -> Task:
    return get_task(json.loads((run / "journal.jsonl").read_text().splitlines()[0])["task"])


# ---- a look at the data


def test_data_is_looked_at_before_training(tmp_path, capsys):
    rows = [{key: row[key] for key in ("message", "category")} for row in make_tickets(100, seed=1)]
    rows = list({row["message"]: row for row in rows}.values())  # without repeated texts
    rows[0] = {**rows[1], "category": "account_access"}
    rows[2] = dict(rows[3])
    rows[4]["message"] = ""
    rows[5]["message"] = " ".join(["again and"] * 100)
    train, test = write_csv(tmp_path / "train.csv", rows), write_csv(tmp_path / "test.csv", rows[1:4])
    out = tmp_path / "run"
    assert call("train", "--train", train, "--dev", test, "--test", test, *TEMPLATE, *QUICK, "--out", str(out)) == 0
    seen = [line for line in capsys.readouterr().err.splitlines() if line.startswith("data: ")]
    assert re.fullmatch(
        r"data: \d+ rows to train on: billing_issue \d+, Technical problem \d+, account_access \d+; "
        r"imbalanced: always answering 'billing_issue' would be right for \d\d%",
        seen[0],
    )
    assert seen[1:] == [
        "data: rows without a text: 2",
        "data: rows that repeat the text of another: 2; texts with different labels: 1",
        "data: rows of dev that are also in train: 3 of 3; figures will be too good",
        "data: rows of test that are also in train: 3 of 3; figures will be too good",
        f"data: rows cut to 128 tokens: 1 of {len(rows)}, the longest from 207 (--max-length takes more if the model does)",
    ]
    assert call("report", str(out)) == 0
    assert "rows without a text: 2" in (out / "report.html").read_text()
    capsys.readouterr()
    assert call("train", "--resume", str(out), "--steps", "3") == 0
    assert "data: " not in capsys.readouterr().err, "it was said when the run began"


def test_data_without_surprises_has_one_line(tmp_path, capsys):
    rows = [{"text": f"ticket number {n}", "label": ("problem", "question")[n % 2]} for n in range(20)]
    data = write_csv(tmp_path / "a.csv", rows)
    assert call("train", "--train", data, *TEMPLATE, *QUICK, "--out", str(tmp_path / "run")) == 0
    seen = [line for line in capsys.readouterr().err.splitlines() if line.startswith("data: ")]
    assert seen == ["data: 18 rows to train on: problem 9, question 9"]


def test_data_of_one_class_is_refused(tmp_path, capsys):
    rows = [{"text": f"film {n}", "label": "positive"} for n in range(20)]
    data = write_csv(tmp_path / "one.csv", rows)
    message = refused(capsys, "train", "--task", "sst-2", "--train", data)
    assert "all 20 rows have the label 'positive'; training needs rows of at least two labels" in message


# ---- held-out examples


@given(counts=st.lists(st.integers(1, 60), min_size=2, max_size=6).filter(lambda counts: sum(counts) >= 10))
def test_held_out_examples_have_a_tenth_of_every_label(counts):
    examples = [Example({"text": f"{label} {n}"}, label) for label, count in enumerate(counts) for n in range(count)]
    train, dev = hold_out(examples)
    assert sorted((*train, *dev), key=examples.index) == examples
    assert len(dev) == sum(counts) // 10
    held = Counter(example.label for example in dev)
    for label, count in enumerate(counts):
        assert held[label] < count, "training keeps every label"
        assert held[label] <= math.ceil(count / 10) + 1
        assert held[label] >= 1 or count == 1 or len(dev) < len(counts), "the best checkpoint is chosen on every label"


def test_held_out_examples_do_not_depend_on_the_seed_of_the_run(tickets):
    def dev(**options: Any) -> list[Example]:
        template = {"template": "{message} Topic: [MASK]."}
        values = api.with_task({"train": tickets, **template, **options})
        return resolve_setup(api.resolve(values)).splits.dev

    assert dev(seed=1) == dev(seed=2)
    assert dev(data_seed=3) != dev(data_seed=4)
    held = Counter(example.label for example in dev())
    assert sorted(held.values()) == [4, 12, 24]


# ---- predicting after --columns


def test_predict_needs_no_label_column(tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"id": str(n), "body": f"film {n}", "stars": ("negative", "positive")[n % 2]} for n in range(20)]
    named = ("--columns", "text=body,label=stars")
    task = ("--model", tiny_folder, "--task", "sst-2")
    assert call("train", *task, "--train", write_csv(Path("a.csv"), rows), *named, *QUICK, "--out", "run") == 0
    compact = mezzo.export("run", "journal", out="run.mezzo")
    new = write_csv(Path("new.csv"), [{"id": row["id"], "body": row["body"]} for row in rows[:3]])
    Path("lines.txt").write_text("film 0\nfilm 1\nfilm 2\n")
    capsys.readouterr()
    for run in ("run", str(compact)):
        for data in (new, "lines.txt"):
            assert call("predict", run, "--data", data) == 0
            assert len(capsys.readouterr().out.splitlines()) == 3
        assert len(list(mezzo.predict(["film 0", {"body": "film 1"}], run))) == 2
        assert "no column 'stars' for 'label'" in refused(capsys, "eval", run, "--data", new)
    Path("wrong.csv").write_text("id,text\n1,film\n")
    assert "no column 'body' for 'text'" in refused(capsys, "predict", "run", "--data", "wrong.csv")


def test_proposed_run_with_stated_columns_predicts(tickets, tmp_path, capsys):
    out, named = str(tmp_path / "run"), ("--columns", "text=message,label=channel")
    assert call("train", "--train", tickets, *named, *TEMPLATE, *QUICK, "--out", out) == 0
    new = write_csv(tmp_path / "new.csv", [{"message": "Hello?", "id": "7"}])
    capsys.readouterr()
    assert call("predict", out, "--data", new) == 0
    assert json.loads(capsys.readouterr().out)["prediction"] in ("email", "phone", "web")
