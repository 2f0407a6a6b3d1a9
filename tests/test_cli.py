"""The commands as a user runs them, on a tiny model in a folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mezzo.cli import main
from mezzo.method import noise

FAST = ["--method", "spsa", "--steps", "12", "--batch-size", "4", "--eval-every", "6", "--threads", "1"]


@pytest.fixture
def tiny(tiny_folder: str, tiny_data: str) -> list[str]:
    return ["--model", tiny_folder, "--task", "sst-2", "--train", tiny_data, "--dev", tiny_data, *FAST]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict, str]:
    """Exit code, the JSON object of the last line, standard error."""
    code = main([*arguments, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]) if out.strip() else {}, err


@pytest.mark.parametrize("space", ["lora", "full", "matrices", "head", "*attention*"])
def test_train_verify_eval_export(space, tiny, tmp_path, capsys):
    out = str(tmp_path / "run")
    code, result, _ = run(capsys, "train", *tiny, "--space", space, "--out", out)
    assert code == 0
    assert {
        "out",
        "steps",
        "accuracy",
        "zero_shot",
        "zero_shot_calibrated",
        "zero_slope_share",
        "digest",
        "seconds",
    } <= set(result)
    assert result["steps"] == 12
    code, checked, _ = run(capsys, "verify", out)
    assert (code, checked["ok"], checked["digest"], checked["steps"]) == (0, True, result["digest"], 12)
    code, evaluated, _ = run(capsys, "eval", out, "--data", tiny[tiny.index("--train") + 1])
    assert code == 0
    assert evaluated["accuracy"] == result["accuracy"]
    loss = [json.loads(x) for x in (Path(out) / "metrics.jsonl").read_text().splitlines() if '"evaluation"' in x]
    assert evaluated["loss"] == next(e["loss"] for e in loss if e["step"] == result["best_step"])
    assert {"metric", "n", "interval"} <= set(evaluated)
    code, _, _ = run(capsys, "export", out, "journal", "--out", str(tmp_path / "j.mezzo"))
    assert code == 0
    code, again, _ = run(capsys, "verify", str(tmp_path / "j.mezzo"))
    assert (again["ok"], again["digest"]) == (True, result["digest"])


QUICK = {
    "the package": "import mezzo",
    "configuration": "import mezzo.config",
    "engines": "import mezzo.engines.registry",
    "help": "from mezzo.cli.parser import build_parser; build_parser().format_help()",
}


@pytest.mark.parametrize("code", QUICK.values(), ids=QUICK)
def test_help_and_configuration_import_neither_torch_nor_numpy(code):
    check = "import sys; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=False).returncode == 0


@pytest.mark.parametrize("named", [[], ["--model", "mezzo/llama-mini"], ["--method", "spsa", "--space", "full"]])
def test_help_shows_the_defaults_of_the_model_at_hand(named, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help", *named])
    shown = " ".join(capsys.readouterr().out.split())
    assert main(["train", *named, "--print-config"]) == 0
    config = tomllib.loads(capsys.readouterr().out)
    for group, name in (("space", "space"), ("method", "eps"), ("method", "budget"), ("method", "lr")):
        value = config[group].get(name)
        flag = f"--{name} {name[0].upper()} "
        assert value is None or name in str(named) or f"[{value}" in shown.split(flag)[1].split(" --")[0]


def test_help_about_a_model_that_is_not_here_does_not_guess(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--model", "somebody/unknown", "--help"])
    assert "size of the perturbation [by model and space; es finds it before the first step]" in capsys.readouterr().out


def test_eval_of_a_model_with_demonstrations(tiny_folder, tiny_data, capsys):
    common = ["--model", tiny_folder, "--task", "sst-2", "--data", tiny_data, "--threads", "1"]
    _, plain, _ = run(capsys, "eval", *common)
    code, shown, _ = run(capsys, "eval", *common, "--train", tiny_data, "--demonstrations", "2")
    assert code == 0
    assert shown["n"] == plain["n"] == 16
    assert shown["loss"] != plain["loss"], "the demonstrations must reach the model"


def test_tasks_are_listed_and_shown(capsys):
    code, listed, _ = run(capsys, "tasks")
    assert code == 0
    assert {"sst-2", "trec", "copa", "squad", "reviews"} <= {task["name"] for task in listed}
    code, shown, _ = run(capsys, "tasks", "show", "mnli")
    assert shown["words"] == {"contradiction": "No", "entailment": "Yes", "neutral": "Maybe"}
    assert {"name", "template", "words", "metric", "example"} <= set(shown)
    assert "[MASK]" in shown["example"]
    assert run(capsys, "tasks", "mnli")[1] == shown
    assert run(capsys, "tasks", "mnli", "--family", "causal")[1]["example"].startswith("Suppose A man")
    assert {task["family"] for task in run(capsys, "tasks", "--family", "causal")[1]} == {"causal"}
    assert main(["tasks", "mnli"]) == 0
    assert "for causal models: mezzo tasks mnli --family causal" in capsys.readouterr().out
    assert main(["tasks", "mlni"]) == main(["tasks", "show"]) == main(["tasks", "rte", "mnli"]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown == [
        "mezzo: unknown task 'mlni'; did you mean 'mnli'?",
        "mezzo: name the task to show: mezzo tasks NAME ('mezzo tasks' lists them)",
        "mezzo: one task at a time: mezzo tasks rte",
    ]


def test_resume_extends_a_run_to_the_same_weights(tiny, tmp_path, capsys):
    whole = run(capsys, "train", *tiny, "--out", str(tmp_path / "a"), "--steps", "12")[1]
    run(capsys, "train", *tiny, "--out", str(tmp_path / "b"), "--steps", "7")
    resumed = run(capsys, "train", "--resume", str(tmp_path / "b"), "--steps", "12")[1]
    assert resumed["steps"] == 12
    assert resumed["digest"] == whole["digest"]


MISTAKES = {
    "bundled typo": (["train", "--model", "mezzo/roberta-mimi"], "there is no bundled model"),
    "negative eps": (["train", "--eps", "-1"], "eps must be positive"),
    "resume nothing": (["train", "--resume", "nothing-here"], "is not a run folder"),
    "verify nothing": (["verify", "nothing-here"], "does not exist"),
    "export kind": (["export", "nothing-here", "zip"], "adapter, model or journal"),
    "odd device": (
        ["eval", "--model", "mezzo/roberta-mini", "--task", "reviews", "--device", "meta"],
        "not a device to compute on",
    ),
    "task to show": (["tasks", "show"], "name the task"),
    "--quantize on sglang": (["train", "--engine", "sglang", "--quantize", "8bit"], "--quantize belongs to the torch"),
    "full on sglang": (
        ["train", "--engine", "sglang", "--model", "mezzo/llama-mini", "--space", "full"],
        "the sglang engine trains --space lora or matrices, where a probe is an adapter: use --engine torch for 'full'",
    ),
    "prefix by a reward on sglang": (
        ["train", "--engine", "sglang", "--task", "countdown", "--objective", "countdown", "--space", "prefix"]
        + ["--model", "mezzo/llama-mini"],
        "trains --space lora or matrices",
    ),
    "matrices on vllm": (
        ["train", "--engine", "vllm", "--model", "mezzo/llama-mini", "--space", "matrices", "--method", "spsa"],
        "the vllm engine trains --space lora, where",
    ),
    "--tp on torch": (["train", "--tp", "2"], "--tp belongs to the sglang engine: add --engine sglang"),
}


@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_get_one_line_and_exit_2(case, tmp_path, capsys, monkeypatch):
    """More of them, and what newcomers do first, are in test_newcomer.py."""
    monkeypatch.chdir(tmp_path)
    arguments, expected = case
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.glob("runs/*"))


def test_run_is_not_reopened_on_an_engine_that_does_not_train_its_space(tiny, tmp_path, capsys):
    """Whether that engine is installed or not."""
    out = str(tmp_path / "run")
    assert main(["train", *tiny, "--space", "full", "--out", out]) == 0
    capsys.readouterr()
    assert main(["eval", out, "--engine", "sglang"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "trains --space lora or matrices" in line and line.endswith("use --engine torch for 'full'")


def test_noise_without_an_implementation_is_refused(tiny, tmp_path, capsys, monkeypatch):
    """A new kind must not run as one of the others."""
    monkeypatch.setitem(noise.NOISES, "cauchy", noise.Noise("cauchy"))
    assert main(["train", *tiny, "--space", "full", "--noise", "cauchy", "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert "the torch engine does not implement cauchy noise, only rademacher and gaussian" in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_sigterm_before_the_first_step_is_ctrl_c(monkeypatch, capsys):
    def open_session(**options):
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "it would end this process"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("mezzo.api.open_session", open_session)
    assert main(["train"]) == 130
    assert "mezzo: interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
