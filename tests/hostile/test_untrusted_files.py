"""Malicious files: none runs code, redirects writes through links, contacts a host, or exhausts memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from mezzo import api
from mezzo.config.reading import TYPES
from mezzo.errors import ConfigError, DataError, JournalError
from mezzo.journal.compact import MAGIC, export_compact
from mezzo.journal.content import NAME, read
from mezzo.replay.snapshots import Snapshots
from mezzo.runs.folder import Folder
from mezzo.tasks import load_examples, readers
from tests.hostile.files import (
    copy_run,
    eval_command,
    read_compact_header,
    read_json_lines,
    replace_compact_header,
    write_journal,
)
from tests.processes import patience

ROOT = Path(__file__).parents[2]

PICKLING_MODULES = (
    "engines/sglang/server/replica.py",
    "parallel/messages.py",
)


# ---- code


def test_package_has_no_pickle_eval_or_shell():
    """Except for messages between processes of one run, sent through socket pairs and private folders."""
    dangerous = re.compile(
        r"torch\.load\(|import pickle|(?<![.\w])(eval|exec)\(|os\.system|shell=True|marshal|__import__"
        r"|yaml\.(?!SafeLoader|AliasEvent|YAMLError|load\(text, Loader\))"
    )
    matches = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "src").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if dangerous.search(line) and str(path.relative_to(ROOT / "src" / "mezzo")) not in PICKLING_MODULES
    ]
    assert not matches


@pytest.fixture
def model_with_code(tiny_folder, tmp_path):
    """A model folder with custom code, and the file that this code creates when it runs."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    created_file = tmp_path / "executed"
    (folder / "evil.py").write_text(f"open({str(created_file)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForMaskedLM": "evil.Evil"}
    config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    return folder, created_file


def test_model_code_does_not_run_by_default(model_with_code, tiny_data, expect_refusal):
    folder, created_file = model_with_code
    expect_refusal(*eval_command(folder, tiny_data))
    assert not created_file.exists()


def test_model_code_does_not_run_when_a_journal_enables_it(model_with_code, valid_run, expect_refusal, workspace):
    folder, created_file = model_with_code
    run = copy_run(valid_run, workspace)
    journal = read_json_lines(run / NAME)
    journal[0]["config"] |= {"remote_code": True, "model": str(folder)}
    write_journal(run / NAME, journal)
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"remote_code": True}))
    for command in (
        ["verify", str(run)],
        ["export", str(run), "--out", str(run / "x"), "adapter"],
        ["train", "--resume", str(run)],
        ["eval", str(run)],
    ):
        expect_refusal(*command)
    assert not created_file.exists()


def test_function_named_in_a_journal_is_not_imported(valid_run, expect_refusal, workspace):
    (workspace / "here" / "evil.py").write_text(
        "open('executed', 'w')\ndef loss(scores, batch): return scores.sum((1, 2))\n"
    )
    run = copy_run(valid_run, workspace)
    journal = read_json_lines(run / NAME)
    journal[0]["config"]["objective"] = "evil:loss"
    write_journal(run / NAME, journal)
    assert "--objective evil:loss" in expect_refusal("train", "--resume", str(run), "--steps", "5")
    assert "resumed run keeps it" in expect_refusal("train", "--resume", str(run), "--objective", "accuracy")
    assert not (workspace / "here" / "executed").exists()
    assert api.finetune(resume=str(run), steps=5, objective="evil:loss").steps == 5  # named by the user
    assert (workspace / "here" / "executed").exists()


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_config_file_cannot_run_code_or_name_hosts(model_with_code, tiny_data, expect_refusal, workspace, suffix):
    (workspace / "here" / "evil.py").write_text(
        "open('executed', 'w')\ndef loss(scores, batch): return scores.sum((1, 2))\n"
    )
    folder, created_file = model_with_code
    file = workspace / f"untrusted.{suffix}"
    for name, value, flag in (
        ("objective", "evil:loss", "--objective MODULE:FUNCTION"),
        ("remote_code", True, "--remote-code"),
        ("url", ["http://127.0.0.1:9\nmezzo: all is well"], "--url ADDRESS"),
        ("ray_address", "127.0.0.1:9", "--ray-address ADDRESS"),
    ):
        settings = {"model": str(folder), "train": tiny_data, "task": "sst-2", name: value}
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        file.write_text(json.dumps(settings) if suffix == "json" else "\n".join(lines))
        for extra in ([], ["--print-config"]):
            message = expect_refusal("train", "--config", str(file), *extra)
            assert f"{name} is not taken from a file" in message
            assert flag in message
    assert not created_file.exists()
    assert not (workspace / "here" / "executed").exists()


def test_objective_passed_beside_a_config_file_is_used(tiny_folder, tiny_data, workspace):
    (workspace / "here" / "own_objective.py").write_text("def loss(scores, batch): return scores.sum((1, 2))\n")
    (workspace / "c.toml").write_text('objective = "own_objective:loss"\nsteps = 2\nbatch_size = 2\n')
    options = {"task": "sst-2", "train": tiny_data, "config": workspace / "c.toml", "threads": 1, "device": "cpu"}
    for number, objective in enumerate(("own_objective:loss", "accuracy", lambda scores, batch: scores.sum((1, 2)))):
        assert api.finetune(tiny_folder, objective=objective, out=str(workspace / f"r{number}"), **options).steps == 2


@pytest.mark.parametrize("where", ["journal", "config.json"])
@pytest.mark.parametrize(("name", "extra"), [("url", {"engine": "sglang"}), ("ray_address", {"workers": 1})])
def test_address_in_a_run_folder_is_not_contacted(name, extra, where, valid_run, expect_refusal, workspace):
    """Prompts, weights and (through Ray) code would be sent there, so the user must pass the address again."""
    run = copy_run(valid_run, workspace)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        port.listen()
        port.settimeout(0)
        address = f"127.0.0.1:{port.getsockname()[1]}\nmezzo: all is well"
        setting = {name: [f"http://{address}"] if name == "url" else address}
        journal = read_json_lines(run / NAME)
        journal[0]["config"] |= extra | (setting if where == "journal" else {})
        write_journal(run / NAME, journal)
        settings = json.loads((run / "config.json").read_text())
        others = {key: value for key, value in settings.items() if key != name}
        (run / "config.json").write_text(json.dumps(others | extra | (setting if where == "config.json" else {})))
        message = expect_refusal("train", "--resume", str(run), "--steps", "6")
        assert f"--{name.replace('_', '-')} ADDRESS" in message
        assert api.verify(run).steps == 4
        if name == "url":
            with pytest.raises(ConfigError, match="needs SGLang, which is not installed"):  # in process, not at the URL
                api.evaluate(run, data=[{"text": "good", "label": "positive"}], engine="sglang")
        with pytest.raises(BlockingIOError):
            port.accept()


def test_pickled_weights_are_not_loaded(tiny_folder, tiny_data, expect_refusal, workspace):
    folder = workspace / "pickled"
    shutil.copytree(tiny_folder, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    message = expect_refusal(*eval_command(folder, tiny_data))
    assert "no weights as .safetensors" in message
    assert "pickle" in message
    assert not (workspace / "here" / "executed").exists()


# ---- writes outside the run folder


@pytest.mark.parametrize("name", [NAME, "metrics.jsonl", "config.json", "snapshots"])
def test_resume_does_not_write_through_links(name, valid_run, expect_refusal, workspace):
    run = copy_run(valid_run, workspace)
    outside = workspace / "outside"
    (run / name).rename(outside)
    (run / name).symlink_to(outside)
    size = outside.stat().st_size
    assert "is a symbolic link" in expect_refusal("train", "--resume", str(run), "--steps", "6")
    assert outside.stat().st_size == size
    empty = workspace / "empty"
    empty.mkdir()
    (empty / name).symlink_to(workspace / "new")
    with pytest.raises(JournalError, match="is a symbolic link"):
        Folder.create(str(empty), "x")
    assert not (workspace / "new").exists()


def test_exports_and_temporary_files_are_not_written_through_links(valid_run, run_command, expect_refusal, workspace):
    run = copy_run(valid_run, workspace)
    elsewhere = workspace / "elsewhere"
    elsewhere.mkdir()
    (run / "model").symlink_to(elsewhere)
    (run / "adapter").symlink_to(elsewhere)
    (run / ".journal.mezzo.tmp").symlink_to(elsewhere / "x")
    (run / f".journal.mezzo.{os.getpid()}.tmp").symlink_to(elsewhere / "y")
    (run / "journal.mezzo").symlink_to(elsewhere / "z")
    for kind in ("model", "adapter"):
        assert "exists already" in expect_refusal("export", str(run), kind)
    assert run_command("export", str(run), "journal")[0] == 0
    assert list(elsewhere.iterdir()) == []
    assert (run / "journal.mezzo").read_bytes().startswith(MAGIC)


def test_task_name_cannot_leave_the_runs_folder(tiny_folder, tiny_data, workspace):
    task = {
        "name": "../../../evil\x00/..",
        "columns": ["text"],
        "template": "{text} It was [MASK].",
        "labels": ["negative", "positive"],
        "words": ["terrible", "great"],
    }
    run = api.finetune(
        tiny_folder,
        task=task,
        train=tiny_data,
        dev=tiny_data,
        steps=1,
        batch_size=2,
        eval_every=1,
        threads=1,
        space="lora",
    )
    assert Path(run.out).parent == Path("runs")
    assert (workspace / "here" / run.out / NAME).is_file()


# ---- memory


def run_with_memory_limit(code: str, *arguments: str, megabytes: int = 900) -> subprocess.CompletedProcess[str]:
    """Run code in a process that may use this much more memory than it has after its imports."""
    head = f"""
import resource, sys
import numpy, json
import mezzo.api, mezzo.journal.compact, mezzo.tasks
pages = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + {megabytes} * 2**20,) * 2)
"""
    return subprocess.run(
        [sys.executable, "-c", head + code, *arguments], capture_output=True, text=True, timeout=patience(120)
    )


def test_compact_journal_bomb_is_refused_within_memory(valid_run, tmp_path):
    export_compact(read(valid_run), tmp_path / "valid.mezzo")
    header = read_compact_header(tmp_path / "valid.mezzo")
    bomb = zlib.compress(bytes(300 * 2**20), 9)
    counts = zlib.compress(b"\xff" * 4 * header["steps"])
    bombs = {
        "too many steps": replace_compact_header(tmp_path / "valid.mezzo", header | {"steps": 10**9}, bomb, bomb),
        "too many directions": replace_compact_header(tmp_path / "valid.mezzo", header, bomb, bomb, counts),
        "decompresses to more": replace_compact_header(tmp_path / "valid.mezzo", header, bomb, bomb),
        "long header": replace_compact_header(tmp_path / "valid.mezzo", header | {"x": " " * (80 * 2**20)}),
    }
    for number, data in enumerate(bombs.values()):
        (tmp_path / f"{number}.mezzo").write_bytes(data)
    code = """
from pathlib import Path
for path in sys.argv[1:]:
    try:
        mezzo.journal.compact.import_compact(Path(path))
    except mezzo.journal.compact.JournalError as error:
        print("refused", error)
"""
    done = run_with_memory_limit(code, *(str(tmp_path / f"{number}.mezzo") for number in range(4)), megabytes=250)
    assert done.stdout.count("refused") == 4, done.stderr
    assert "claims 1000000000 steps" in done.stdout
    assert f"claims {(2**32 - 1) * header['steps']} directions" in done.stdout
    assert "unpacks to more than it says" in done.stdout


def test_parquet_bomb_is_refused(tmp_path, monkeypatch):
    import pyarrow as arrow
    from pyarrow import parquet

    monkeypatch.setattr(readers, "MAX_TABLE", 50 * 2**20)
    table = arrow.table({"text": ["x" * 2**20] * 100, "label": ["negative"] * 100})
    parquet.write_table(table, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=False)
    assert (tmp_path / "bomb.parquet").stat().st_size < 2**20
    with pytest.raises(DataError, match="too many to read at once"):
        load_examples(str(tmp_path / "bomb.parquet"), "sst-2")
    wide = arrow.table({f"c{n}": arrow.nulls(1_000_000) for n in range(60)})
    parquet.write_table(wide, tmp_path / "nothing.parquet", compression="zstd")
    with pytest.raises(DataError, match="too many to read at once"):
        load_examples(str(tmp_path / "nothing.parquet"), "sst-2")


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zip", ".bz2"])
def test_compressed_files_are_refused(suffix, tmp_path):
    (tmp_path / f"data.jsonl{suffix}").write_bytes(b"\x1f\x8b" + bytes(100))
    with pytest.raises(DataError, match="is a gzip file, not text"):
        load_examples(str(tmp_path / f"data.jsonl{suffix}"), "sst-2")


def test_pipes_devices_and_huge_files_are_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="is not a file"):
        load_examples(str(tmp_path / "pipe.jsonl"), "sst-2")
    for name in ("zero.jsonl", "zero.json", "zero.csv"):
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(DataError, match="is not a file"):
            load_examples(str(tmp_path / name), "sst-2")
    monkeypatch.setattr(readers, "MAX_TABLE", 10)
    (tmp_path / "big.json").write_text(json.dumps([{"text": "a", "label": "positive"}]))
    with pytest.raises(DataError, match="too many to read at once"):
        load_examples(str(tmp_path / "big.json"), "sst-2")


def test_model_config_of_a_huge_model_is_refused_within_memory(tiny_folder, tiny_data, tmp_path):
    config = json.loads((Path(tiny_folder) / "config.json").read_text())
    huge_values = {
        "layers": {"num_hidden_layers": 10**6},
        "words": {"vocab_size": 10**9},
        "positions": {"max_position_embeddings": 10**10},
        "width": {"hidden_size": 2**20, "intermediate_size": 2**22},
        "inner": {"intermediate_size": 10**12},
    }
    for name, values in huge_values.items():
        shutil.copytree(tiny_folder, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config | values))
    code = """
from mezzo.cli import main
for folder in sys.argv[2:]:
    print(main(["eval", "--model", folder, "--task", "sst-2", "--data", sys.argv[1], "--threads", "1", "--device", "cpu"]))
"""
    done = run_with_memory_limit(code, tiny_data, *(str(tmp_path / name) for name in huge_values), megabytes=2500)
    assert done.stdout.split() == ["2"] * len(huge_values), done.stderr[-2000:]
    messages = done.stderr.splitlines()
    assert len(messages) == len(huge_values)
    assert all(message.startswith("mezzo: ") and "config.json" in message for message in messages)


def test_tensor_shapes_larger_than_the_file_are_refused(tiny_folder, tiny_data, expect_refusal, workspace):
    """In a model and in a snapshot: the header declares terabytes."""
    folder = workspace / "model"
    shutil.copytree(tiny_folder, folder)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = next(key for key in header if key != "__metadata__")
    header[name]["shape"] = [2**20, 2**20]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    expect_refusal(*eval_command(folder, tiny_data))
    snapshots = Snapshots(workspace / "snapshots")
    snapshots.folder.mkdir()
    snapshots.path(3).write_bytes(path.read_bytes())
    assert snapshots.load(3, []) is None
    snapshots.path(4).write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert snapshots.load(4, []) is None


@pytest.mark.parametrize(("key", "value"), [("samples", 10**9), ("rank", 10**9), ("prefix_tokens", 10**9)])
def test_journal_settings_that_would_exhaust_memory_are_refused(key, value, valid_run, expect_refusal, workspace):
    run = copy_run(valid_run, workspace)
    journal = read_json_lines(run / NAME)
    journal[0]["config"] |= {key: value} | ({"space": "prefix"} if key == "prefix_tokens" else {})
    write_journal(run / NAME, journal)
    expect_refusal("train", "--resume", str(run))
    if key == "rank":
        expect_refusal("verify", str(run))
    with pytest.raises(ConfigError):
        api.resolve({"samples": 10**9})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"pad_token_id": None}, "counts positions from its pad_token_id"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "is stored quantised"),
        ({"chunk_size_feed_forward": 7}, "itself fails on a few tokens"),
        ({"attn_implementation": "kernels-community/evil"}, "runs only with --remote-code"),
    ],
)
def test_unusable_model_config_is_refused_in_one_line(
    setting, message, tiny_folder, tiny_data, expect_refusal, workspace
):
    folder = workspace / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | setting))
    assert message in expect_refusal(*eval_command(folder, tiny_data))


def test_lone_surrogate_in_data_is_refused_before_training(tiny_folder, expect_refusal, workspace):
    data = workspace / "data.jsonl"
    data.write_text('{"text": "a fine film", "label": 1}\n{"text": "a \\ud800 film", "label": 0}\n')
    train = ["train", "--model", str(tiny_folder), "--task", "sst-2", "--train", str(data), "--out", "run"]
    assert "line 2: 'text' holds half a character" in expect_refusal(*train)
    assert "half a character" in expect_refusal(
        "predict", "--model", str(tiny_folder), "--task", "sst-2", "--data", str(data)
    )
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--model", "", "model is empty"), ("--train", "", "train is empty"), ("--encoding", "utf-8\0", "NUL")],
)
def test_empty_option_values_are_refused(option, value, message, expect_refusal):
    """An unset shell variable must not silently train something else."""
    assert message in expect_refusal("train", option, value)


# ---- half characters, which JSON can hold and no file can


@pytest.mark.parametrize("name", ["name", "template", "words", "labels", "columns", "label_aliases", "sample"])
def test_lone_surrogate_in_the_task_of_a_journal_is_refused(name, valid_run, expect_refusal, workspace):
    run = copy_run(valid_run, workspace)
    journal = read_json_lines(run / NAME)
    task = journal[0]["task"]
    values: dict[str, object] = {
        "name": "sst\ud800",
        "template": "{text} \ud800 [MASK].",
        "words": ["terrible", "\ud800"],
        "labels": ["negative", "\ud800"],
        "columns": ["\ud800"],
        "label_aliases": {"\ud800": "negative"},
        "sample": {"text": "\ud800"},
    }
    journal[0]["task"] = {**task, name: values[name]}
    write_journal(run / NAME, journal)
    for command in (["verify"], ["train", "--steps", "6", "--resume"], ["export", "adapter"], ["eval"]):
        words = ["export", str(run), "adapter"] if command[0] == "export" else [*command, str(run)]
        assert "half a character" in expect_refusal(*words)


@pytest.mark.parametrize("name", [name for name, kind in TYPES.items() if "str" in str(kind)])
def test_lone_surrogate_in_an_option_of_a_journal_never_crashes(name, valid_run, run_command, workspace):
    run = copy_run(valid_run, workspace)
    journal = read_json_lines(run / NAME)
    value = journal[0]["config"].get(name)
    journal[0]["config"][name] = ["\ud800=\ud800"] if isinstance(value, list) else "\ud800"
    write_journal(run / NAME, journal)
    (run / "config.json").unlink()
    for command in (["verify"], ["train", "--steps", "5", "--resume"]):
        code, stderr = run_command(*command, str(run))
        assert code in (0, 2), stderr


def test_checks_of_a_journal_do_not_depend_on_assertions(valid_run, workspace):
    run = copy_run(valid_run, workspace)
    journal = read_json_lines(run / NAME)
    number, step = next((number, line) for number, line in enumerate(journal, 1) if "terms" in line)
    step["terms"][0][1] = 0.1  # which no float32 is
    write_journal(run / NAME, journal)
    for flags in ([], ["-O"]):
        command = [sys.executable, *flags, "-m", "mezzo", "verify", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120))
        assert (done.returncode, f"line {number} is damaged" in done.stderr) == (2, True), done.stderr
