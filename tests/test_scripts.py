"""The scripts that made the bundled models and data, on little text; and two benchmark scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from tests.conftest import SENTENCES
from tests.processes import patience

SCRIPTS = Path(__file__).parents[1] / "scripts"
TINY = [
    "--layers",
    "1",
    "--hidden",
    "32",
    "--heads",
    "2",
    "--ffn",
    "32",
    "--vocab",
    "600",
    "--tokens",
    "20000",
    "--batch-tokens",
    "2048",
    "--device",
    "cpu",
]


def write_sst2(folder: Path) -> None:
    """SENTENCES, twice, laid out as the benchmarks read SST-2."""
    (folder / "SST-2").mkdir()
    rows = "".join(f"{t}\t{y}\n" for y, texts in enumerate(SENTENCES.values()) for t in texts * 2)
    for split in ("train", "dev"):
        (folder / "SST-2" / f"{split}.tsv").write_text("sentence\tlabel\n" + rows)


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(300), env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "loader"), [("pretrain_mlm.py", AutoModelForMaskedLM), ("pretrain_clm.py", AutoModelForCausalLM)]
)
def test_pretraining_writes_a_model_that_loads(script, loader, tmp_path):
    lines = [text for texts in SENTENCES.values() for text in texts]
    text = "".join(
        f"{a.capitalize()}. It was {word}. {b.capitalize()}.\n"
        for a in lines
        for b in lines
        for word in ("great", "terrible")
    )
    (tmp_path / "text.txt").write_text(text)
    rows = "".join(f"{t}\t{y}\n" for y, texts in enumerate(SENTENCES.values()) for t in texts)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\n" + rows)
    out = tmp_path / "model"
    done = run_script(
        script,
        str(tmp_path / "text.txt"),
        "--out",
        str(out),
        "--eval-tsv",
        str(tmp_path / "dev.tsv"),
        "--lengths",
        "32:1",
        *TINY,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((out / "pretraining.json").read_text())
    assert {"heldout_loss", "zero_shot", "zero_shot_calibrated"} <= set(record["results"])
    model, tokenizer = loader.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert str(model.dtype) == "torch.float16"
    for word in (" terrible", " great", " Description", " Maybe"):
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1, word


def test_missing_text_file_is_reported_in_one_line():
    done = run_script("pretrain_mlm.py", "no-such-text.txt", "--out", "x")
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1] == "error: no such file: no-such-text.txt"


def test_bundled_data_is_split_by_the_script():
    sys.path.insert(0, str(SCRIPTS))
    try:
        from split_data import split_of
    finally:
        sys.path.pop(0)
    folder = SCRIPTS.parent / "src" / "mezzo" / "bundled" / "data"
    for path in folder.glob("*/*.jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert rows
        assert {split_of(row) for row in rows} == {path.stem}, path


@pytest.mark.slow
def test_results_script_tabulates_zeroth_order_and_adam_runs(tmp_path):
    """`benchmarks/results.py` trains with forward passes and with Adam on the same examples."""
    write_sst2(tmp_path)
    grid = ["--data", str(tmp_path), "--k", "4", "--seeds", "13", "--steps", "2", "--device", "cpu", "--at-once", "1"]
    methods = "full@lr=1e-4,adam@lr=1e-3"
    done = run_script("../benchmarks/results.py", *grid, "--methods", methods, "--out", str(tmp_path / "out.jsonl"))
    assert done.returncode == 0, done.stderr
    full, adam = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert full["zero_shot"] == adam["zero_shot"]
    assert full["zero_shot_calibrated"] == adam["zero_shot_calibrated"]
    assert (full["example_forwards"], adam["steps"]) == (32, 2)
    assert all(0 <= row["dev"] <= 1 and 0 <= row["value"] <= 1 for row in (full, adam))
    assert f"| sst-2 | 4 | full@lr=1e-4 | {100 * full['zero_shot']:.1f} |" in done.stdout


@pytest.mark.slow
def test_step_kernels_script_reports_step_time_and_kernels():
    """`benchmarks/step_kernels.py` shows the time of consecutive steps and of the kernels in them."""
    tiny = ["--model", "roberta-mini", "--batch-size", "2", "--length", "8", "--dtype", "float32", "--space", "lora"]
    done = run_script("../benchmarks/step_kernels.py", *tiny, "--steps", "2", "--rounds", "1", "--top", "3")
    assert done.returncode == 0, done.stderr
    bare, *_, lora = (line for line in done.stdout.splitlines() if "ms in a row" in line)
    assert bare.startswith("bare doubled forward: ")
    assert lora.startswith("mezzo lora, rademacher: ")
    assert len(re.findall(r"^ +[0-9.]+ ms +[0-9]+ x +[0-9.]+ µs  matrix products$", done.stdout, re.M)) == 2
    wrong = run_script("../benchmarks/step_kernels.py", "--model", "robberta")
    assert wrong.returncode == 2
    assert "robberta" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_no_question_resembles_one_of_another_split(tmp_path):
    folder = SCRIPTS.parent / "src" / "mezzo" / "bundled" / "data" / "questions"
    done = run_script("near_duplicates.py", str(folder))
    assert (done.returncode, done.stdout) == (0, "0 pairs above 0.4 in 3514 sentences\n")
    for split, text in (("train", "How tall is the garden fence?"), ("test", "How tall is the garden wall?")):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    done = run_script("near_duplicates.py", str(tmp_path))
    assert done.returncode == 1
    assert "How tall is the garden" in done.stdout


def test_parts_of_a_step_of_solve_are_timed():
    sizes = ("--model", "roberta-mini", "--batch", "4", "--length", "8", "--directions", "4", "--rounds", "2")
    done = run_script("../benchmarks/solve_step.py", *sizes, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows[2:]] == [
        *(f"{space} {part}" for space in ("lora", "full") for part in ("population", "candidates")),
        "solver",
    ]
    assert all(float(row[1]) > 0 and float(row[3]) > 0 for row in rows)
