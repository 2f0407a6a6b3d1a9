"""`mezzo predict` in a pipeline: every row comes back with its own columns, whatever it came as."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

import mezzo
from mezzo.cli import main
from mezzo.errors import DataError

TEXTS = ["a warm film", "", 'a "dull", long film']
ROWS = [{"id": f"00{n}", "text": text, "label": "?"} for n, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def run(tiny_folder: str, tiny_data: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("predict") / "run")
    data = {"task": "sst-2", "train": tiny_data, "dev": tiny_data}
    return mezzo.finetune(tiny_folder, **data, space="full", steps=2, batch_size=4, threads=1, out=out).out


@pytest.fixture(scope="module")
def model(run: str) -> Path:
    return mezzo.export(run, "model")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def predict(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Lines of standard output, and standard error, of `mezzo predict`."""

    def call(*arguments: str, stdin: str | io.StringIO = "") -> tuple[list[str], str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin)
        assert main(["predict", *arguments, "--threads", "1"]) == 0
        out, err = capsys.readouterr()
        return out.splitlines(), err

    return call


def as_table(delimiter: str) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue()


INPUTS = {
    "rows.csv": as_table(","),
    "semicolons.csv": as_table(";"),
    "rows.tsv": as_table("\t"),
    "rows.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
}


@pytest.fixture(scope="module")
def expected(run: str) -> list[dict[str, Any]]:
    return list(mezzo.predict(ROWS, run, threads=1))


def test_rows_keep_their_columns(expected):
    for row, given in zip(expected, ROWS, strict=True):
        assert {key: row[key] for key in given} == given
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-4)
        assert row["prediction"] == max(row["probabilities"], key=row["probabilities"].get)


@pytest.mark.parametrize("name", INPUTS)
def test_a_file_and_standard_input_are_read_alike(name, run, expected, predict, tmp_path):
    (tmp_path / name).write_text(INPUTS[name])
    from_file, _ = predict(run, str(tmp_path / name))
    from_stdin, _ = predict(run, stdin=INPUTS[name])
    assert [json.loads(line) for line in from_file] == [json.loads(line) for line in from_stdin] == expected
    assert [row["id"] for row in map(json.loads, from_stdin)] == ["000", "001", "002"]


@pytest.mark.parametrize(("format", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_tables_are_written_and_read_again(format, delimiter, run, expected, predict):
    lines, _ = predict(run, "--format", format, stdin=INPUTS["rows.jsonl"])
    found = list(csv.DictReader(lines, delimiter=delimiter))
    assert [{key: row[key] for key in ROWS[0]} for row in found] == ROWS
    assert [row["prediction"] for row in found] == [row["prediction"] for row in expected]
    assert [float(row["probability"]) for row in found] == [max(row["probabilities"].values()) for row in expected]
    again, _ = predict(run, "--format", format, stdin="\n".join(lines) + "\n")
    assert again == lines, "its own output is data too"


def test_every_line_of_text_has_an_answer(run, expected, predict, tmp_path):
    text = "\n" + "\n".join(TEXTS) + "\n"
    (tmp_path / "texts.txt").write_text(text)
    (tmp_path / "latin").write_bytes("un café\n".encode("latin-1"))
    for lines in (predict(run, stdin=text)[0], predict(run, str(tmp_path / "texts.txt"))[0]):
        rows = [json.loads(line) for line in lines]
        assert [row["text"] for row in rows] == ["", *TEXTS]
        assert [row["prediction"] for row in rows[1:]] == [row["prediction"] for row in expected]
    assert json.loads(predict(run, str(tmp_path / "latin"))[0][0])["text"] == "un café"
    (line,) = predict(run, stdin="A review, a text, a label\n")[0]
    assert json.loads(line)["text"] == "A review, a text, a label", "a sentence is no header"


def test_a_terminal_and_an_empty_input_get_a_hint(run, predict):
    lines, err = predict(run, stdin=Terminal("a warm film\n"))
    assert len(lines) == 1
    assert err.startswith("type texts, one per line; Ctrl-D ends")
    lines, err = predict(run, stdin="")
    assert (lines, err) == ([], "standard input is empty: pipe lines into it, or name a file: mezzo predict RUN FILE\n")


def test_rows_that_cannot_be_read_are_one_line(run, monkeypatch, capsys, tmp_path):
    for stdin, message in (
        ('{"text": "a"}\n{"text": \n', "standard input, line 2: not valid JSON"),
        ("id,text\n1,a\n2,b,c\n", "standard input, row 2: 3 columns where 2 are expected; quote cells"),
    ):
        file = io.StringIO(stdin)
        file.name = "<stdin>"
        monkeypatch.setattr("sys.stdin", file)
        assert main(["predict", run]) == 2
        assert message in capsys.readouterr().err
    latin = io.TextIOWrapper(io.BytesIO(b"un caf\xe9\n"), "utf-8", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", latin)
    assert main(["predict", run]) == 2
    assert "is not UTF-8 text; convert it, or name it as a file" in capsys.readouterr().err
    rows = [*({"text": "a film"} for _ in range(258)), {"text": None}]
    with pytest.raises(DataError, match="the data, row 259: 'text' is null"):
        list(mezzo.predict(rows, run, threads=1))
    with pytest.raises(DataError, match="the data, row 2: a row of task 'sst-2' is an object with text, not '3'"):
        list(mezzo.predict(["a film", 3], run, threads=1))
    assert main(["predict", run, "nowhere.txt"]) == 2
    assert "no file 'nowhere.txt'" in capsys.readouterr().err
    assert main(["predict", run, "a.csv", "--data", "b.csv"]) == 2
    assert "two data files are named" in capsys.readouterr().err


def test_an_exported_model_carries_its_task(run, model, expected, predict):
    for named in ([str(model)], ["--model", str(model)]):
        lines, err = predict(*named, stdin=INPUTS["rows.csv"])
        assert [json.loads(line) for line in lines] == expected
        assert err == f"the task is 'sst-2', as {model}/mezzo.json says\n"
    _, err = predict("--model", str(model), "--task", "sst-2", stdin="a film\n")
    assert err == ""


def test_a_task_that_is_assumed_is_said(tiny_folder, predict):
    _, err = predict("--model", "mezzo/roberta-mini", stdin="Who?\n")
    assert err == "no task is named: 'questions' is assumed (--task NAME; 'mezzo tasks' lists them)\n"


def test_an_exported_model_carries_its_columns_and_its_head(tiny_folder, tmp_path, predict):
    rows = [{"body": f"film {n}", "stars": ("bad", "fine")[n % 2]} for n in range(20)]
    task = {"columns": ["text"], "template": "{text} It was [MASK].", "words": {"bad": "terrible", "fine": "great"}}
    options = {"space": "head", "readout": "head", "columns": {"text": "body", "label": "stars"}, "threads": 1}
    run = mezzo.finetune(tiny_folder, task=task, train=rows, **options, steps=2, batch_size=4, out=tmp_path / "run")
    before = list(mezzo.predict(rows[:3], run.out, threads=1))
    model = mezzo.export(run.out, "model")
    after, _ = predict(str(model), stdin="".join(json.dumps(row) + "\n" for row in rows[:3]))
    assert [json.loads(line) for line in after] == before
