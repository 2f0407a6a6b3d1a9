"""The benchmark verb: its contenders do what their names say, its figures have the promised keys, its mistakes one line."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from mezzo.bench import bench, contenders, published_step, shapes, timing
from mezzo.bench.memory import Memory
from mezzo.cli import main
from mezzo.method.space import Space

TINY = shapes._roberta(32, 2, 4, vocabulary=200)
CPU = torch.device("cpu")


@pytest.fixture
def setting() -> contenders.Setting:
    batch = shapes.random_batch(TINY, count=4, length=12, spread=0.5)
    return contenders.Setting(TINY, batch, 4, 1, 24, torch.float32, CPU)


def test_every_row_has_the_promised_keys(monkeypatch, capsys):
    monkeypatch.setitem(shapes.SHAPES, "roberta-mini", TINY)
    spaces = "lora,full:gaussian,matrices:lowrank"
    code = main(["bench", "--batch-size", "4", "--length", "8", "--rounds", "5", "--space", spaces, "--json"])
    out, err = capsys.readouterr()
    rows = json.loads(out.splitlines()[-1])
    assert code == 0
    assert [row["what"] for row in rows] == [
        "published, padded as released",
        "published, padded dynamically",
        "bare doubled forward",
        "mezzo lora, rademacher",
        "mezzo full, gaussian",
        "mezzo matrices, lowrank",
    ]
    for row in rows:
        assert {"what", "ms", "iqr", "ratio", "peak_mib", "model", "batch_size", "length", "samples"} <= set(row)
        assert {"spread", "micro_batch", "rank", "noise_rank", "device_name", "torch", "mezzo"} <= set(row)
        assert statistics.median(row["all_ms"]) == row["ms"] and len(row["all_ms"]) == row["rounds"] == 5
        assert row["ms"] > 0 and row["peak_mib"] > 0
        assert row["ratio"] == pytest.approx(row["ms"] / rows[2]["ms"])
    assert "mezzo lora" in err, "the table goes where a program does not read"


@pytest.mark.parametrize(
    ("sweep", "key", "values"),
    [("batch", "batch_size", [2, 4, 8, 16]), ("length", "length", [8, 16, 32]), ("population", "samples", [1, 2, 4])],
)
def test_sweeps_grow_one_thing(sweep, key, values, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "roberta-mini", TINY)
    rows = bench({"space": "lora", "batch_size": 2}, length=8, rounds=5, sweep=sweep, published=False).rows
    assert not any("published" in row.what for row in rows)
    assert [getattr(row.conditions, key) for row in rows if row.what == "bare doubled forward"] == values


def test_a_sweep_of_models_goes_through_the_larger_ones(monkeypatch):
    for name in ("roberta-base", "roberta-large"):
        monkeypatch.setitem(shapes.SHAPES, name, TINY)
    options = {"space": "lora", "batch_size": 2, "model": "roberta-base"}
    rows = bench(options, length=8, rounds=5, sweep="model", published=False).rows
    assert [row.conditions.model for row in rows if "bare" in row.what] == ["roberta-base", "roberta-large"]


def test_the_released_step_pads_to_the_maximum_and_runs_the_recipe(setting, monkeypatch):
    seen: list[tuple[int, ...]] = []
    kept = torch.nn.Embedding.forward
    monkeypatch.setattr(
        torch.nn.Embedding, "forward", lambda self, ids: (seen.append(tuple(ids.shape)), kept(self, ids))[1]
    )
    steps: list[published_step.Step] = []
    plain = published_step.step
    monkeypatch.setattr(published_step, "step", lambda *a, **k: steps.append(plain(*a, **k)))
    longest = max(len(p.ids) for p in setting.batch.prompts)
    for dynamic, width in ((False, 24), (True, longest)):
        seen.clear()
        contenders.published(setting, dynamic)(0)
        assert (4, width) in seen and all(shape[-1] == width for shape in seen)
    assert len(steps) == 2 and all(step.loss_plus != step.loss_minus for step in steps)
    # Padding must not change the loss, or the two rows would not compare the same work.
    assert steps[0].loss_plus == pytest.approx(steps[1].loss_plus, rel=1e-4)


def test_the_step_is_the_trainers_and_moves_the_weights(setting, tmp_path):
    step = contenders.ours(setting, Space("lora", rank=2), "rademacher", tmp_path)
    engine = step.__self__.engine
    before = engine.digest()
    record = step(0)
    assert record.losses[0] != record.losses[1] and engine.digest() != before
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 2


def test_the_bare_forward_doubles_the_rows_and_perturbs_nothing(setting):
    scores = contenders.bare(setting)(0)
    assert scores.shape == (2, 4, 2)
    assert (scores[0] == scores[1]).all()


def test_contenders_take_turns():
    order: list[str] = []
    found = timing.interleaved({n: lambda n=n: lambda number: order.append(n) for n in "abc"}, CPU, rounds=5)
    assert order == list("aaabbbccc" + "abcbcacababcbca")
    assert all(len(one.ms) == 5 and one.median == statistics.median(one.ms) for one in found.values())


def test_memory_counts_tensors():
    with Memory(CPU) as memory:
        kept = torch.ones(2**18) + torch.ones(2**18)
    assert (kept.numel() * 4, memory.kept, memory.peak) == (2**20, 2**20, 3 * 2**20)


MISTAKES = {
    "shape": (["--model", "roberta-larg"], "did you mean 'roberta-large'"),
    "space": (["--space", "lorra"], "did you mean 'lora'"),
    "noise": (["--space", "full:gausian"], "did you mean 'gaussian'"),
    "sweep": (["--sweep", "depth"], "sweep is one of batch, length, population, model"),
    "rounds": (["--rounds", "3"], "at least 5 rounds"),
    "length": (["--length", "2"], "length must be at least 4"),
    "spread": (["--spread", "2"], "spread is a share"),
    "batch": (["--batch-size", "0"], "batch_size must be at least 1"),
    "dtype": (["--dtype", "int8"], "dtype is one of"),
    "position": (["--length", "600"], "length 600 makes 600, which do not fit"),
    "spread out": (["--length", "300", "--spread", "0.9"], "length 300 with --spread 0.9 makes 570"),
    "padding": (["--max-length", "513"], "reads at most 512 tokens: --max-length 513 does not fit"),
    "causal": (["--model", "llama-mini", "--length", "4097"], "reads at most 4096 tokens"),
    "a later one": (["--model", "roberta-mini,robberta"], "unknown model shape 'robberta'"),
    "grown": (["--sweep", "length", "--length", "150"], "length 600 makes 600"),
    "no sweep": (["--sweep="], "sweep is one of batch, length, population, model, not ''"),
    "no batch": (["--batch-size", "99999999999999999999"], "batch_size must be at most 1048576"),
    "tokens": (["--batch-size", "1000000"], "a batch of 1000000 rows of 32 tokens is too much to time"),
    "thin": (["--space", "lora:lowrank"], "what lora trains is small already"),
}
UNKNOWN = {
    "--lenght=3": "unknown option --lenght; did you mean '--length'?",
    "--noise=gaussian": "unknown option --noise; name it with the space, as in --space full:gaussian",
    "--lr=1": "unknown option --lr: 'mezzo train' has it, 'mezzo bench' has not",
    "--per-device-train-batch-size=1": "did you mean '--batch-size'?",
    "--frobnicate": "unknown option --frobnicate ('mezzo bench --help' explains)",
    "more": "one argument too many: 'more'",
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_in_one_line(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert [message in line for line in error.splitlines()] == [True], "in one line, before anything is timed"


@pytest.mark.parametrize(("argument", "message"), UNKNOWN.items())
def test_unknown_options_are_compared_with_those_of_the_verb(argument, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", argument])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and message in error


def test_the_help_names_every_shape(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"shape of the model: {', '.join(shapes.SHAPES)}, or several" in shown


def test_figures_are_shown_as_they_come(monkeypatch, capsys):
    """What was timed before something fails is not lost."""
    monkeypatch.setitem(shapes.SHAPES, "roberta-mini", TINY)
    monkeypatch.setitem(shapes.SHAPES, "roberta-base", replace(TINY, still="no such tensor"))
    arguments = ["bench", "--model", "roberta-mini,roberta-base", "--batch-size", "2", "--length", "8", "--rounds", "5"]
    assert main([*arguments, "--space", "lora", "--no-published"]) == 2
    out, err = capsys.readouterr()
    assert "mezzo lora, rademacher" in out
    assert err.splitlines()[-1].startswith("mezzo: ")


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_bench_that_is_ended_leaves_nothing_behind(signal_number, code, tmp_path):
    command = [sys.executable, "-m", "mezzo", "bench", "--batch-size", "4", "--length", "400", "--rounds", "900"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    # As from a terminal: a test run in the background may have been told to ignore Ctrl-C.
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=_listen
    ) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("mezzo-bench-*/journal*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal_number)
        assert process.wait(60) == code
    assert not list(tmp_path.glob("mezzo-bench-*"))


def _listen() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def test_output_that_cannot_be_written():
    command = f"{sys.executable} -m mezzo tasks"
    full = subprocess.run(f"{command} > /dev/full", shell=True, capture_output=True, text=True)
    said = "mezzo: standard output cannot be written: no space left on its device\n"
    assert (full.returncode, full.stderr) == (1, said)
    closed = subprocess.run(f"{command} >&-", shell=True, capture_output=True, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")
