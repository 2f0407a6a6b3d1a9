"""Settings, tasks and model folders of another shape than any program writes: one line, and neither a wait nor a memory full."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo.cli import main
from mezzo.config import OPTIONS
from mezzo.config.reading import from_file
from mezzo.engines.panics import caught_panics
from mezzo.errors import ConfigError, ModelError, TaskError
from mezzo.runs.export import PREFIX_FORMAT, load_prefix
from mezzo.runs.sweep import new_sweep
from mezzo.tasks import get_task
from mezzo.types import Example
from mezzo.untrusted import read_settings
from tests.conftest import make_llama
from tests.hostile.files import copy_run, eval_command, read_compact_header, read_json_lines, write_journal
from tests.processes import patience

Refusal = Callable[..., str]
HEAD = 'columns = ["text"]\ntemplate = "{text} It was [MASK]."\n'
WORDS = 'labels = ["a", "b"]\nwords = ["bad", "good"]\n'
ANSWER = 'columns = ["text"]\ntemplate = "{text} Answer:"\nfamily = "causal"\n'
HUGE = "0x" + "f" * 6000
STRANGE_TASKS = {
    "id_orders": HEAD + WORDS + 'id_order = ["a"]\nid_orders = "x"',
    "rewrite": HEAD + WORDS + 'rewrite = {text = "x"}',
    "rewrite: text: a": HEAD + WORDS + "rewrite = {text = {a = 1}}",
    "labels": HEAD + 'labels = 5\nwords = {a = "bad"}',
    "words": HEAD + 'labels = ["a", "b"]\nwords = ["bad", {x = 1}]',
    "label_aliases: x": HEAD + WORDS + "label_aliases = {x = [1]}",
    "id_orders: data": HEAD + WORDS + "id_order = {x = 1}",
    "id_order": ANSWER + 'kind = "generation"\nid_order = "nowhere"',
    "id_order 'nowhere'": ANSWER + 'kind = "choice"\ncandidates = ["c"]\nid_order = "nowhere"',
    "fill": ANSWER + 'kind = "choice"\ncandidates = ["c"]\nfill = ["text"]',
    "space_prefix": HEAD + WORDS + "space_prefix = [1]",
    "sample: text": HEAD + WORDS + "sample = {text = 2020-01-01}",
    "more than 100 digits": HEAD + WORDS + f"max_length = {HUGE}",
}


@pytest.mark.parametrize("part", STRANGE_TASKS)
def test_a_task_of_another_shape_is_refused_by_the_name_of_its_part(
    part: str, workspace: Path, expect_refusal: Refusal
) -> None:
    (workspace / "t.toml").write_text(STRANGE_TASKS[part])
    assert part in expect_refusal("tasks", "show", str(workspace / "t.toml"))


@pytest.mark.parametrize("text", ["1: 2", "method:\n  3: 4", "seed: !!bool maybe", f"steps: {HUGE}"])
def test_yaml_of_another_shape_is_refused(text: str, workspace: Path, expect_refusal: Refusal) -> None:
    (workspace / "c.yaml").write_text(text + "\n")
    assert "not valid YAML" in expect_refusal("train", "--config", str(workspace / "c.yaml"))


def test_a_hexadecimal_integer_of_any_length_is_refused(workspace: Path, expect_refusal: Refusal) -> None:
    (workspace / "c.toml").write_text(f"steps = {HUGE}\n")
    assert "more than 100 digits" in expect_refusal("train", "--config", str(workspace / "c.toml"))
    (workspace / "d.toml").write_text(f"[[a.b]]\nc = [-{int(HUGE[:300], 16)}]\n")
    with pytest.raises(ValueError, match="more than 100 digits"):
        read_settings(workspace / "d.toml")


def test_a_journal_with_a_task_of_another_shape_is_refused(
    valid_run: Path, workspace: Path, expect_refusal: Refusal
) -> None:
    run = copy_run(valid_run, workspace)
    lines = read_json_lines(run / "journal.jsonl")
    lines[0]["task"]["labels"] = 5
    lines[0]["task"]["words"] = {"a": "bad"}
    write_journal(run / "journal.jsonl", lines)
    assert "labels is 5" in expect_refusal("train", "--resume", str(run))


@pytest.mark.parametrize(
    "changes",
    [
        {"template": "x" * 100_001 + "{text} [MASK]"},
        {"words": ["bad", "g" * 100_000]},
        {"answer_end": "." * 100_001},
        {"rewrite": {"text": {"a": "b" * 100_000}}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_text_of_a_task_has_a_greatest_length(changes: dict[str, Any]) -> None:
    plain = {"columns": ["text"], "template": "{text} [MASK]", "labels": ["a", "b"], "words": ["bad", "good"]}
    get_task(plain)
    with pytest.raises(TaskError, match="characters; 100,000 are allowed"):
        get_task(plain | changes)


def test_a_rewrite_cannot_multiply_a_text() -> None:
    rewrite = {"text": {first: second * 1000 for first, second in ("ab", "bc", "cd", "de")}}
    plain = {"columns": ["text"], "template": "{text} [MASK]", "labels": ["a", "b"], "words": ["bad", "good"]}
    with pytest.raises(TaskError, match="far longer"):
        get_task(plain | {"rewrite": rewrite}).texts(Example({"text": "a"}))


# ---- model folders


def copy_model(folder: str, workspace: Path) -> Path:
    return Path(shutil.copytree(folder, workspace / "model"))


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize("part", ["sub/pipe.safetensors", "../pipe.safetensors", "/etc/hostname"])
def test_weights_named_by_an_index_are_files_of_the_folder(
    part: str, tiny_folder: str, tiny_data: str, workspace: Path, expect_refusal: Refusal
) -> None:
    model = copy_model(tiny_folder, workspace)
    (model / "sub").mkdir()
    (model / "model.safetensors").unlink()
    if not part.startswith("/etc"):
        os.mkfifo(model / part)
    index = {"metadata": {"total_size": 1}, "weight_map": {"lm_head.bias": part}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"names '{part}', which is not a file" in expect_refusal(*eval_command(model, tiny_data))


def test_weights_that_the_configuration_names_lie_beside_it(
    tiny_folder: str, tiny_data: str, workspace: Path, expect_refusal: Refusal
) -> None:
    model = copy_model(tiny_folder, workspace)
    (model / "sub").mkdir()
    os.mkfifo(model / "sub" / "pipe.safetensors")
    change_json(model / "config.json", lambda found: found.update(transformers_weights="sub/pipe.safetensors"))
    assert "put them beside its config.json" in expect_refusal(*eval_command(model, tiny_data))


@pytest.mark.parametrize("name", ["prefix.safetensors", "prefix_config.json"])
def test_a_prefix_that_is_a_pipe_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "prefix_config.json").write_text(json.dumps({"format": PREFIX_FORMAT}))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match="not a file"):
        load_prefix(torch.nn.Linear(1, 1), tmp_path)


SAY = """
import logging, sys
from mezzo.engines.hf_hub import load_config, quiet
load_config(sys.argv[1])
with quiet():
    logging.getLogger("transformers.any").error("first\\nsecond \\x1b]0;owned\\x07 %s", "\\x9b")
"""


def test_what_transformers_says_of_a_model_is_not_shown_raw(workspace: Path) -> None:
    model = workspace / "llama"
    make_llama().config.save_pretrained(model)
    rope = {"rope_type": "\x1b]0;warned\x07", "rope_theta": 10000.0}
    change_json(model / "config.json", lambda found: found.update(rope_scaling=rope, rope_parameters=rope))
    done = subprocess.run([sys.executable, "-c", SAY, str(model)], capture_output=True, timeout=patience(120))
    assert done.returncode == 0
    assert done.stderr.count(b"\n") == 1 and b"first second \\u001b]0;owned\\u0007 \\u009b" in done.stderr


def test_a_panic_in_a_tokenizer_is_one_line(tiny_folder: str, tiny_data: str, workspace: Path) -> None:
    model = copy_model(tiny_folder, workspace)
    piece = {"SpecialToken": {"id": "<nowhere>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [piece, text], "pair": [text, text], "special_tokens": {}}
    change_json(model / "tokenizer.json", lambda found: found.update(post_processor=template))
    command = [sys.executable, "-m", "mezzo", *eval_command(model, tiny_data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 2
    assert done.stderr.startswith("mezzo: ") and done.stderr.count("\n") == 1, done.stderr
    assert "cannot be loaded" in done.stderr


def test_standard_error_is_delayed_but_not_lost_while_panics_are_caught(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        _say_and_interrupt()
    os.write(2, b"said later\n")
    assert capfd.readouterr().err == "said meanwhile\nsaid later\n"


def _say_and_interrupt() -> None:
    with caught_panics():
        os.write(2, b"said meanwhile\n")
        raise KeyboardInterrupt


# ---- runs


def test_a_sweep_has_a_greatest_number_of_runs(workspace: Path, expect_refusal: Refusal) -> None:
    (workspace / "run").mkdir()
    names = (
        "lr",
        "eps",
        "alpha",
        "clip",
        "cache_mb",
        "momentum",
        "weight_decay",
        "server_timeout",
        "reward_mb",
        "seed",
    )
    grid = {name: list(range(1, 400)) for name in names if name in OPTIONS}
    (workspace / "run" / "sweep.json").write_text(json.dumps({"options": {}, "grid": grid}))
    assert "10,000 are allowed" in expect_refusal("train", "--resume", str(workspace / "run"))
    seeds = ",".join(map(str, range(10_001)))
    assert "10,001 runs" in expect_refusal("train", "--seeds", seeds, "--out", str(workspace / "new"))


def test_values_added_to_a_sweep_count_too(workspace: Path) -> None:
    (workspace / "sweep.json").write_text(json.dumps({"options": {}, "grid": {"seed": list(range(10_000))}}))
    with pytest.raises(ConfigError, match="10,001 runs"):
        new_sweep(str(workspace), "x", {}, {"seed": [10_000]})


def test_a_run_has_a_greatest_number_of_workers(expect_refusal: Refusal) -> None:
    assert "workers must be at most 1024" in expect_refusal("train", "--workers", "1025")


def test_credentials_in_the_task_of_a_journal_are_not_shared(valid_run: Path, workspace: Path) -> None:
    run = copy_run(valid_run, workspace)
    lines = read_json_lines(run / "journal.jsonl")
    lines[0]["task"]["sample"] = {"text": "see http://user:hunter2@host/?key=hunter2"}
    write_journal(run / "journal.jsonl", lines)
    assert main(["export", str(run), "journal", "--out", str(run / "j.mezzo")]) == 0
    assert main(["export", str(run), "model", "--out", str(run / "model")]) == 0
    shared = [json.dumps(read_compact_header(run / "j.mezzo"))]
    shared += [(run / "model" / name).read_text() for name in ("README.md", "mezzo.json")]
    assert "see http://host/" in shared[0]
    assert not [text for text in shared if "hunter2" in text]


def test_no_template_is_suggested_by_a_model_that_gives_no_numbers(
    tiny_folder: str, workspace: Path, expect_refusal: Refusal
) -> None:
    model = copy_model(tiny_folder, workspace)
    change_json(model / "config.json", lambda found: found.update(layer_norm_eps=math.nan))
    (workspace / "d.csv").write_text("text,label\n" + "a fine film,positive\na dull film,negative\n" * 20)
    command = ["tasks", "suggest", str(workspace / "d.csv"), "--model", str(model), "--threads", "1", "--device", "cpu"]
    assert "not finite numbers" in expect_refusal(*command)


def test_more_workers_than_cores_are_named_again(valid_run: Path, workspace: Path, expect_refusal: Refusal) -> None:
    count = (os.cpu_count() or 1) + 8
    (workspace / "c.toml").write_text(f"workers = {count}\n")
    assert "give --workers N" in expect_refusal("train", "--config", str(workspace / "c.toml"))
    assert from_file(workspace / "c.toml", given=["workers"]) == {}
    (workspace / "c.toml").write_text("workers = 8\n")
    assert from_file(workspace / "c.toml") == {"workers": 8}
    run = copy_run(valid_run, workspace)
    change_json(run / "config.json", lambda found: found.update(workers=count))
    assert f"this run used --workers {count}" in expect_refusal("train", "--resume", str(run))
