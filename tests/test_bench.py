"""`mezzo bench`: contenders do what their names say, results have the documented keys, errors are one line."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mezzo.bench import bench, contenders, published_step, shapes, timing
from mezzo.bench.memory import TensorMemory
from mezzo.cli import main
from mezzo.method.space import Space
from tests.processes import patience, reset_signals, wait_until

TINY = shapes.roberta_shape(32, 2, 4, vocabulary=200)
CPU = torch.device("cpu")


@pytest.fixture
def setting() -> contenders.Setting:
    batch = shapes.random_batch(TINY, count=4, length=12, spread=0.5)
    return contenders.Setting(TINY, batch, 4, 1, 24, torch.float32, CPU)


def test_json_rows_have_the_documented_keys(monkeypatch, capsys):
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
    assert "mezzo lora" in err, "with --json the table goes to standard error"


def test_plan_is_printed_instead_of_timings(monkeypatch, capsys):
    monkeypatch.setitem(shapes.SHAPES, "roberta-mini", TINY)
    assert main(["bench", "--plan", "--space", "lora,full:gaussian", "--device", "cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    lora, full = json.loads(out.splitlines()[-1])
    assert (lora["model"], lora["space"], full["space"], full["noise"]) == ("roberta-mini", "lora", "full", "gaussian")
    reason = "no kernels: they need a GPU"
    line = {"count": 4, "module": "Linear", "forward": "population linear (LoRA)", "reason": reason}
    assert line in lora["lines"]
    assert "roberta-mini, lora, rademacher, float32, cpu\n    1  RobertaModel" in err


@pytest.mark.parametrize(
    ("sweep", "key", "values"),
    [("batch", "batch_size", [2, 4, 8, 16]), ("length", "length", [8, 16, 32]), ("population", "samples", [1, 2, 4])],
)
def test_sweep_grows_one_dimension(sweep, key, values, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "roberta-mini", TINY)
    timings = bench({"space": "lora", "batch_size": 2}, length=8, rounds=5, sweep=sweep, published=False).timings
    assert not any("published" in timing.what for timing in timings)
    bare = [timing for timing in timings if timing.what == "bare doubled forward"]
    assert [timing.conditions[key] for timing in bare] == values


def test_model_sweep_includes_the_larger_models(monkeypatch):
    for name in ("roberta-base", "roberta-large"):
        monkeypatch.setitem(shapes.SHAPES, name, TINY)
    options = {"space": "lora", "batch_size": 2, "model": "roberta-base"}
    timings = bench(options, length=8, rounds=5, sweep="model", published=False).timings
    assert [timing.conditions["model"] for timing in timings if "bare" in timing.what] == [
        "roberta-base",
        "roberta-large",
    ]


def test_published_step_pads_to_max_length_and_runs_the_recipe(setting, monkeypatch):
    seen: list[tuple[int, ...]] = []
    forward = torch.nn.Embedding.forward
    monkeypatch.setattr(
        torch.nn.Embedding, "forward", lambda self, ids: (seen.append(tuple(ids.shape)), forward(self, ids))[1]
    )
    steps: list[published_step.StepResult] = []
    plain = published_step.step
    monkeypatch.setattr(published_step, "step", lambda *a, **k: steps.append(plain(*a, **k)))
    longest = max(len(p.ids) for p in setting.batch.prompts)
    for dynamic, width in ((False, 24), (True, longest)):
        seen.clear()
        contenders.make_published_step(setting, dynamic)(0)
        assert (4, width) in seen and all(shape[-1] == width for shape in seen)
    assert len(steps) == 2 and all(step.loss_plus != step.loss_minus for step in steps)
    # Padding must not change the loss, or the two rows would not compare the same work.
    assert steps[0].loss_plus == pytest.approx(steps[1].loss_plus, rel=1e-4)


def test_mezzo_step_is_the_trainers_step_and_changes_weights(setting, tmp_path):
    step = contenders.make_mezzo_step(setting, Space("lora", rank=2), "rademacher", tmp_path)
    engine = step.__self__.engine
    before = engine.digest()
    record = step(0)
    assert record.losses[0] != record.losses[1] and engine.digest() != before
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 2


def test_bare_forward_doubles_the_rows_without_perturbation(setting):
    scores = contenders.make_bare_forward(setting)(0)
    assert scores.shape == (2, 4, 2)
    assert (scores[0] == scores[1]).all()


def test_contenders_are_timed_in_turns():
    order: list[str] = []
    factories = {n: lambda n=n: lambda number: order.append(n) for n in "abc"}
    contenders_timed = timing.time_in_turns(factories, CPU, rounds=5)
    assert order == list("aaabbbccc" + "abcbcacababcbca")
    assert all(len(each.ms) == 5 and each.median == statistics.median(each.ms) for each in contenders_timed.values())


def test_tensor_memory_counts_tensors():
    with TensorMemory(CPU) as memory:
        total = torch.ones(2**18) + torch.ones(2**18)
    assert (total.numel() * 4, memory.allocated, memory.peak) == (2**20, 2**20, 3 * 2**20)


ERRORS = {
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
    "low-rank noise": (["--space", "lora:lowrank"], "space lora trains no matrices of the model"),
}
UNKNOWN_OPTIONS = {
    "--lenght=3": "unknown option --lenght; did you mean '--length'?",
    "--noise=gaussian": "unknown option --noise; name it with the space, as in --space full:gaussian",
    "--lr=1": "unknown option --lr: 'mezzo train' has it, 'mezzo bench' has not",
    "--per-device-train-batch-size=1": "did you mean '--batch-size'?",
    "--frobnicate": "unknown option --frobnicate ('mezzo bench --help' explains)",
    "more": "one argument too many: 'more'",
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_invalid_options_give_a_one_line_error(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert [message in line for line in error.splitlines()] == [True], "in one line, before anything is timed"


@pytest.mark.parametrize(("argument", "message"), UNKNOWN_OPTIONS.items())
def test_unknown_option_suggests_one_of_bench(argument, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", argument])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and message in error


def test_help_lists_every_shape(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"shape of the model: {', '.join(shapes.SHAPES)}, or several" in shown


def test_results_are_shown_as_soon_as_each_case_is_done(monkeypatch, capsys):
    """Timings are not lost if a later case fails."""
    monkeypatch.setitem(shapes.SHAPES, "roberta-mini", TINY)
    monkeypatch.setitem(shapes.SHAPES, "roberta-base", replace(TINY, small_tensor="no such tensor"))
    arguments = ["bench", "--model", "roberta-mini,roberta-base", "--batch-size", "2", "--length", "8", "--rounds", "5"]
    assert main([*arguments, "--space", "lora", "--no-published"]) == 2
    out, err = capsys.readouterr()
    assert "mezzo lora, rademacher" in out
    assert err.splitlines()[-1].startswith("mezzo: ")


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_bench_removes_its_folders_when_terminated(signal_number, code, tmp_path):
    command = [sys.executable, "-m", "mezzo", "bench", "--batch-size", "4", "--length", "400", "--rounds", "900"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=reset_signals
    ) as process:
        wait_until(lambda: bool(list(tmp_path.glob("mezzo-bench-*/journal*"))))
        process.send_signal(signal_number)
        assert process.wait(patience(60)) == code
    assert not list(tmp_path.glob("mezzo-bench-*"))


def test_unwritable_standard_output_is_one_line():
    command = f"{sys.executable} -m mezzo tasks"
    full = subprocess.run(f"{command} > /dev/full", shell=True, capture_output=True, text=True)
    message = "mezzo: standard output cannot be written: no space left on its device\n"
    assert (full.returncode, full.stderr) == (1, message)
    closed = subprocess.run(f"{command} >&-", shell=True, capture_output=True, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")
