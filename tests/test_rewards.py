"""Training on a reward of generated text: a habit is learned, everything follows the reward, and failures end no run."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import mezzo
from mezzo import api
from mezzo.cli.main import main
from mezzo.errors import ConfigError, DataError, JournalError, SpaceError
from mezzo.journal.content import read
from mezzo.runs.defaults import describe_defaults
from tests.processes import kill_after, start_run, wait_for_lines

LLAMA = "mezzo/llama-mini"
NOUNS = ("sea", "sky", "dog", "cat", "man", "boy", "tree", "house", "road", "film", "book", "day")
ROWS = [{"prompt": f"The {a} and the {b}", "wanted": ","} for a in NOUNS for b in NOUNS if a != b]
SIZES = {"steps": 12, "samples": 8, "batch_size": 8, "eps": 0.15, "lr": 0.15, "schedule": "linear", "eval_every": 4}
HABIT = {"train": ROWS[:60], "dev": ROWS[60:84], "test": ROWS[84:], **SIZES}
QUICK = {"task": "prompts", "threads": 1, "max_new_tokens": 6, "stop": ("",), "device": "cpu"}


def commas(completion: str, row: dict) -> float:
    """A habit that a program can check: the share of words that are followed by a comma."""
    words = completion.split()
    return sum(len(word) > 1 and word.endswith(row["wanted"]) for word in words) / max(1, len(words))


@pytest.fixture(scope="module")
def habit(tmp_path_factory):
    """A run that learns to write commas, and its events."""
    events = []
    run = mezzo.finetune(
        LLAMA,
        **QUICK,
        **HABIT,
        objective=commas,
        out=str(tmp_path_factory.mktemp("habit") / "run"),
        observe=lambda event, values: events.append((event, values)),
    )
    return run, events


def test_habit_is_learned_beyond_chance_and_rebuilt_from_the_journal(habit):
    run, _ = habit
    assert run.metric == "reward" and run.value > run.interval[0] > run.zero_shot
    assert run.verdict.startswith("worked: ") and "more than chance" in run.verdict
    assert mezzo.verify(run.out).ok, "neither the function nor the texts are needed"


def test_best_checkpoint_export_and_report_follow_the_reward(habit, tmp_path):
    run, _ = habit
    values = {point["step"]: point["value"] for point in run.curve}
    assert values[run.best_step] == max(values.values()) > values[0]
    adapter = load_file(mezzo.export(run.out, "adapter", tmp_path / "adapter") / "adapter_model.safetensors")
    assert max(np.abs(tensor).max() for name, tensor in adapter.items() if "lora_B" in name) > 0
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert f"after {run.best_step} steps of evolution strategies" in card
    losses = {point["step"]: math.exp(point["loss"]) for point in run.curve}
    assert (run.zero_shot_perplexity, run.perplexity) == pytest.approx((losses[0], losses[run.best_step]), rel=1e-4)
    before, tested = f"{losses[0]:.4g}", f"{losses[run.best_step]:.4g}"
    assert f"this checkpoint | {before} → {tested} | |" in card
    assert dict(run.table())["held-out perplexity"] == f"{before} before training, {tested} at step {run.best_step}"
    page = mezzo.report(run.out, out=tmp_path / "page.html").read_text()
    assert run.corrected > run.broken and all(len(row["rewards"]) == 2 for row in run.examples)
    assert f"Training improved {run.corrected} answers" in page and "wrong" not in str(run.examples)
    figure = f"{run.value:.4g}"
    assert figure in card and figure in page and "test reward" in page and "perplexity of the held-out text" in page
    found = mezzo.evaluate(run.out, data=ROWS[84:], objective=commas)
    assert (found.metric, found.value, found.interval) == ("reward", run.value, run.interval)
    with pytest.raises(ConfigError, match="name it again to evaluate"):
        mezzo.evaluate(run.out, data=ROWS[84:])


def test_steps_show_rewards_slopes_with_errors_and_perplexity(habit):
    run, events = habit
    steps = [values for event, values in events if event == "step"]
    assert all(0 <= step["reward"] <= 1 and step["slope"] > 0 and step["slope_error"] > 0 for step in steps)
    assert all(0 < step["tokens"] <= 16 * 8 * 6 for step in steps), "members × prompts × tokens at most"
    assert len(api.records(run.out)) == len(steps) == HABIT["steps"]
    evaluations = [values for event, values in events if event == "evaluation"]
    assert all(0 < values["loss"] < 12 for values in evaluations), "that of the held-out text"
    assert len({values["loss"] for values in evaluations}) == len(evaluations)


def test_failures_are_counted_and_shown_and_the_run_goes_on(tmp_path, capsys, monkeypatch):
    (tmp_path / "fragile.py").write_text(
        "import time\n"
        "def reward(prompt, completion, row):\n"
        "    if 'sky' in prompt:\n        time.sleep(9)\n"
        "    return 1.0 if row['id'] % 2 else 1 / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"The {noun}", "id": number} for number, noun in enumerate(("sea", "sky", "dog", "cat"))]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", LLAMA, "--task", "prompts", "--train", str(data), "--dev", str(data), "--threads", "1"]
    options += [
        "--max-new-tokens",
        "2",
        "--steps",
        "2",
        "--samples",
        "1",
        "--batch-size",
        "4",
        "--reward-seconds",
        "0.2",
    ]
    out = tmp_path / "run"
    assert main(["train", *options, "--objective", "fragile:reward", "--failed-reward=-1", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "(error): ZeroDivisionError: division by zero (fragile.py, line 5)" in shown.err
    assert "(time-out): it took more than 0.2 s. Its text has the reward -1" in shown.err
    assert "failed rewards         12 of 16 texts, and 3 of dev" in shown.out
    assert "zero-shot reward -0.5 (n=4, 3 failed rewards)" in shown.err
    assert "dev reward -0.5, 3 failed rewards  held-out perplexity" in shown.err
    assert [record.losses for record in api.records(out)] == [(0.5, 0.5)] * 2
    with pytest.raises(ConfigError, match="name it again to resume: --objective fragile:reward"):
        mezzo.finetune(resume=out, steps=3)
    resumed = mezzo.finetune(resume=out, steps=3, objective="fragile:reward")
    assert (resumed.failed_rewards, resumed.failed_test_rewards) == (18, 3)
    again = [str(out), "--data", str(data), "--objective", "fragile:reward", "--reward-seconds", "0.2", "--json"]
    assert main(["eval", *again]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["failed"] == 3 and "on 4 examples, 3 failed rewards" in shown.err
    assert "a call of the reward failed (error): ZeroDivisionError: division by zero (fragile.py, line 5)" in shown.err


def test_broken_model_is_called_forgetful_and_a_larger_eps_is_not_advised(tmp_path):
    broken = {**SIZES, "steps": 2, "samples": 2, "batch_size": 4, "lr": 1e30, "schedule": "constant", "eval_every": 1}
    run = mezzo.finetune(LLAMA, **QUICK, **broken, train=ROWS[:20], objective=commas, out=str(tmp_path / "r"))
    assert run.best_step == 0 and run.perplexity == run.zero_shot_perplexity
    assert run.verdict.startswith("forgets: the perplexity of the held-out text rose from 212.4 to ")
    assert "a smaller --lr or --eps is needed" in run.verdict and "arger" not in run.verdict
    assert "the model forgets" in " ".join(run.warnings)
    again = mezzo.finetune(resume=run.out, steps=3, objective=commas)
    assert again.verdict == run.verdict and again.warnings == (), "a resumed run remembers it"


def test_batched_rewards_answers_and_draws(tmp_path):
    seen = tmp_path / "seen.json"

    def count(prompts, completions, rows, answers):
        seen.write_text(json.dumps([prompts, rows, answers]))
        return [len(text) for text in completions]

    rows = [{"prompt": "A man", "answers": ["ran"], "extra": {"deep": [1]}}, {"prompt": "A dog"}]
    session = mezzo.open_session(
        LLAMA,
        **QUICK,
        train=rows,
        dev=rows,
        objective=count,
        out=str(tmp_path / "r"),
        steps=1,
        samples=2,
        batch_size=2,
        temperature=1.0,
        draws=3,
    )
    (record,) = session.records()
    session.close()
    prompts, rows_seen, answers = json.loads(seen.read_text())
    assert len(prompts) == len(rows_seen) == 2 * 3, "the last call is that of dev: prompts × draws"
    assert {"A man", "A dog"} == {prompt.strip() for prompt in prompts}
    assert rows_seen[0]["extra"] == {"deep": [1]} and sorted(map(tuple, answers)) == [()] * 3 + [("ran",)] * 3
    assert len(record.losses) == 4 and session.trainer.spent == 4 * 2 * 3


def deadly(completion: str, row: dict) -> float:
    """`commas`, whose process is killed once for each prompt where its row names a folder for its memory."""
    if row["marks"]:
        mark = Path(row["marks"]) / row["prompt"].replace(" ", "-")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return commas(completion, row)


def test_killing_the_run_and_its_reward_processes_loses_nothing(tmp_path):
    small = {
        "model": LLAMA,
        **QUICK,
        "objective": "tests.test_rewards:deadly",
        "samples": 2,
        "batch_size": 2,
        "steps": 6,
    }
    small |= {"schedule": "constant", "temperature": 1.0, "eval_every": 3}

    def with_marks(folder: str) -> dict:
        rows = [{**row, "marks": folder} for row in ROWS[:8]]
        return {**small, "train": rows[:6], "dev": rows[6:]}

    whole = mezzo.finetune(**with_marks(""), out=str(tmp_path / "whole"))
    (tmp_path / "marks").mkdir()
    run = tmp_path / "killed"
    process = start_run({**with_marks(str(tmp_path / "marks")), "out": str(run)})
    wait_for_lines(run / "journal.jsonl", 4)
    assert kill_after(process, 0.0), "the run finished before it was killed"
    assert 0 < read(run).steps < 6 and list((tmp_path / "marks").iterdir())
    resumed = mezzo.finetune(resume=run, objective="tests.test_rewards:deadly")
    assert (resumed.digest, resumed.failed_rewards) == (whole.digest, 0)
    assert [r.losses for r in api.records(run)] == [r.losses for r in api.records(whole.out)]
    rows = [json.loads(line) for line in Path(api.config_of(run)["train"]).read_text().splitlines()]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({**row, "wanted": "."}) + "\n" for row in rows))
    with pytest.raises(JournalError, match="the training data has changed"):
        mezzo.finetune(resume=run, steps=8, objective="tests.test_rewards:deadly", train=str(other))


def test_decay_pulls_towards_the_base_model(tmp_path):
    rows = [{**row, "answers": ["ran"]} for row in ROWS[:4]]
    session = mezzo.open_session(
        LLAMA, **QUICK, train=rows, dev=rows, objective="exact_match", out=str(tmp_path / "r"), steps=1, factors="both"
    )
    decaying = {tensor.kind: tensor.decay for tensor in session.engine.trained}
    session.close()
    assert session.setup.config.decay == "base" and decaying == {"lora_A": False, "lora_B": True}


def test_countdown_needs_neither_data_nor_an_objective(tmp_path):
    small = {"train_limit": 4, "eval_limit": 2, "steps": 1, "samples": 1, "batch_size": 2}
    run = mezzo.finetune(LLAMA, **{**QUICK, "task": "countdown"}, **small, out=str(tmp_path / "r"))
    assert (run.metric, run.n_test) == ("countdown reward", 2)
    assert mezzo.evaluate(run.out, eval_limit=2).metric == "countdown reward"


def test_what_cannot_be_trained_on_a_reward_is_refused(tmp_path):
    refused = {
        "use a causal model": {"model": "mezzo/roberta-mini", "task": "reviews", "objective": commas},
        "name one, such as --objective": {"model": LLAMA, "task": "questions", "method": "es"},
        "a reward of generated text has none: use --method es": {
            "model": LLAMA,
            **QUICK,
            "train": ROWS,
            "objective": commas,
            "method": "solve",
        },
        "goes with --space lora": {
            "model": LLAMA,
            **QUICK,
            "train": ROWS,
            "objective": commas,
            "space": "full",
            "decay": "base",
        },
        "holds no text": {
            "model": LLAMA,
            **QUICK,
            "train": ROWS,
            "objective": commas,
            "held_out": str(tmp_path / "empty"),
        },
    }
    (tmp_path / "empty").write_text("")
    for message, options in refused.items():
        with pytest.raises((ConfigError, DataError, SpaceError), match=message):
            mezzo.finetune(**options, out=str(tmp_path / "r"))
    with pytest.raises(DataError, match="no column 'answers'"):
        mezzo.finetune(LLAMA, **QUICK, train=ROWS, out=str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()


def takes_text(text):
    return 1.0


def takes_two(text, row):
    return 1.0


def needs_more(completion, reference):
    return 1.0


def always_fails(completion, row):
    return row["missing"]


def huge(completion):
    return 1e200 * (1 + len(completion))


def test_functions_that_cannot_be_called_are_refused_before_the_run(tmp_path):
    data = {"train": ROWS[:20], "out": str(tmp_path / "r")}
    no_task = {name: value for name, value in QUICK.items() if name != "task"}
    expected = "has a parameter 'completion', or 'completions' for all texts"
    with pytest.raises(ConfigError, match=r"takes \(text\). A reward of generated text " + expected):
        mezzo.finetune(LLAMA, **no_task, **data, objective=takes_text)
    for options in (QUICK, no_task):
        with pytest.raises(DataError, match=expected):
            mezzo.finetune(LLAMA, **options, **data, objective=takes_two)
    with pytest.raises(ConfigError, match="needs 'reference', which nobody gives it"):
        mezzo.finetune(LLAMA, **QUICK, **data, objective=needs_more)
    with pytest.raises(ConfigError, match="needs 'completion', which nobody gives it"):
        mezzo.finetune(LLAMA, **QUICK, **data, objective=lambda completion, completions: [])
    for named in ("f1", "exact_match"):
        with pytest.raises(DataError, match="no column 'answers'"):
            mezzo.finetune(LLAMA, **QUICK, **data, objective=named)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(("function", "reason"), [(always_fails, "KeyError: 'missing'"), (huge, "the reward 1e+20")])
def test_verdict_says_that_all_rewards_failed_and_why(function, reason, tmp_path):
    sizes = {"steps": 1, "samples": 1, "batch_size": 2, "eps": 0.01, "eval_limit": 2}
    run = mezzo.finetune(LLAMA, **QUICK, **sizes, train=ROWS[:20], objective=function, out=str(tmp_path / "r"))
    assert run.failed_rewards == run.example_forwards == 4
    assert run.verdict.startswith("no rewards: every call of the reward failed") and "--lr" not in run.verdict
    assert run.verdict.count("\n") == 0 and (reason in run.verdict or "scale it down" in run.verdict)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"demonstrations": 2}, "18 of 18 training examples have none: leave out --demonstrations"),
        ({"k": 4}, "--k 4 needs 8 rows with a right answer.* there are 0: take --train-limit"),
        ({"method": "solve"}, "use --method es"),
        ({"lr": "auto"}, "--lr auto follows the slopes of a loss, and a reward has none"),
        ({"method": "spsa", "lr": "auto"}, "--lr auto follows the slopes of a loss"),
        ({"method": "spsa", "shaping": "rank"}, "--method spsa has no --shaping, which is for --method es"),
        ({"top_p": 0.5}, "temperature 0 draws nothing: add --temperature 1"),
        ({"temperature": 1e-50}, "--temperature 1e-50 is too small"),
        ({"lr": 0.1, "weight_decay": 10.0}, "--lr 0.1 with --weight-decay 10 leaves nothing of the weights"),
    ],
)
def test_options_that_do_not_go_with_rewards_are_refused(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        mezzo.finetune(LLAMA, **QUICK, **options, train=ROWS[:20], objective=commas, out=str(tmp_path / "r"))
    with pytest.raises(ConfigError, match="--method spsa has no --shaping"):
        mezzo.finetune(LLAMA, task="questions", shaping="rank", out=str(tmp_path / "r"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "coutdown"}, "unknown objective 'coutdown'; did you mean 'countdown'"),
        ({"objective": "commas"}, "unknown objective 'commas' .*or module:function"),
        ({"method": "es"}, "name one, such as --objective module:function"),
        ({"method": "es", "objective": "cross_entropy"}, "name one, such as --objective module:function"),
        ({"method": "es", "objective": "f1"}, "no column 'answers'"),
    ],
)
def test_mistaken_objectives_are_told_before_a_task_is_looked_for(options, message, tmp_path):
    with pytest.raises((ConfigError, DataError), match=message):
        mezzo.finetune(LLAMA, **options, train=ROWS[:20], out=str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()


def test_printed_configuration_leaves_open_what_a_run_finds(tmp_path):
    """A size that is written down is taken as it is, and the one that a run begins its search with breaks some models."""
    common = {"model": LLAMA, "task": "countdown", "method": "es"}
    free, given = (api.prepared_config({**common, **more})["method"] for more in ({}, {"eps": 0.1}))
    assert (free["eps"], free["lr"]) == (None, None) and (given["eps"], given["lr"]) == (0.1, 0.1)
    assert not {"eps", "lr"} & set(describe_defaults({"model": LLAMA, "method": "es"}))
    assert "eps" in describe_defaults({"model": LLAMA, "method": "solve"})


@pytest.mark.slow
def test_command_line_tells_rewards_from_losses(tmp_path):
    """A process of its own, since what it says first depends on whether torch is loaded; there is no SGLang here."""
    if importlib.util.find_spec("sglang"):
        pytest.skip("SGLang is installed")
    (tmp_path / "own.py").write_text("def length(completion):\n    return len(completion)\n")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:20]))
    train = ["train", "--model", LLAMA, "--train", "data.jsonl", "--objective", "own:length"]

    def run(*arguments):
        command = [sys.executable, "-m", "mezzo", *arguments]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return found.returncode, found.stderr.splitlines()

    code, (announced, error) = run(*train, "--engine", "sglang")
    assert code == 2 and "by rewards of generated text" in announced and "SGLang, which is not installed" in error
    assert run(*train, "--method", "solve")[1][-1].endswith("a reward of generated text has none: use --method es")
    evaluation = ["eval", "--model", LLAMA, "--objective", "own:length", "--data", "data.jsonl", "--eval-limit", "2"]
    code, (assumed, *_) = run(*evaluation)
    assert code == 0 and assumed.startswith("no task is named: 'prompts' is assumed")
