"""Files made to harm: none runs code, none is written through, none takes more memory than its size allows."""

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
from mezzo.errors import ConfigError, DataError, JournalError
from mezzo.journal.compact import MAGIC, MAX_TERMS, export_compact
from mezzo.journal.journal import NAME, read
from mezzo.replay.snapshots import Snapshots
from mezzo.runs.folder import Folder
from mezzo.tasks import load_examples
from mezzo.tasks import readers as reading
from tests.hostile.conftest import copy_of, lines_of, signed
from tests.hostile.test_fuzz import evaluated, stored_header, with_header

ROOT = Path(__file__).parents[2]


BETWEEN_OUR_PROCESSES = (
    "engines/sglang/inprocess/channel.py",
    "engines/sglang/server/replica.py",
    "parallel/messages.py",
)


# ---- code


def test_no_pickle_and_no_evaluation_of_text_in_the_package():
    """A run's own processes are the exception: they pickle for each other, through socket pairs and private folders."""
    calls = re.compile(
        r"torch\.load\(|import pickle|(?<![.\w])(eval|exec)\(|os\.system|shell=True|yaml|marshal|__import__"
    )
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "src").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if calls.search(line) and str(path.relative_to(ROOT / "src" / "mezzo")) not in BETWEEN_OUR_PROCESSES
    ]
    assert not found


@pytest.fixture
def marked_model(tiny_folder, tmp_path):
    """A model whose own code would leave a mark."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    mark = tmp_path / "executed"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForMaskedLM": "evil.Evil"}
    config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    return folder, mark


def test_code_of_a_model_does_not_run_unless_asked(marked_model, tiny_data, refused):
    folder, mark = marked_model
    refused(*evaluated(folder, tiny_data))
    assert not mark.exists()


def test_code_of_a_model_does_not_run_because_a_journal_says_so(marked_model, sound_run, refused, place):
    folder, mark = marked_model
    run = copy_of(sound_run, place)
    journal = lines_of(run / NAME)
    journal[0]["config"] |= {"remote_code": True, "model": str(folder)}
    signed(run / NAME, journal)
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"remote_code": True}))
    for command in (
        ["verify"],
        ["export", "--out", str(place / "run" / "x"), "adapter"],
        ["train", "--resume"],
        ["eval"],
    ):
        refused(command[0], *command[1:2], str(run), *command[2:]) if command[0] == "train" else refused(
            command[0], str(run), *command[1:]
        )
    assert not mark.exists()


def test_a_function_that_a_journal_names_is_not_imported(sound_run, refused, place):
    (place / "here" / "evil.py").write_text(
        "open('executed', 'w')\ndef loss(scores, batch): return scores.sum((1, 2))\n"
    )
    run = copy_of(sound_run, place)
    journal = lines_of(run / NAME)
    journal[0]["config"]["objective"] = "evil:loss"
    signed(run / NAME, journal)
    assert "--objective evil:loss" in refused("train", "--resume", str(run), "--steps", "5")
    assert "resumed run keeps it" in refused("train", "--resume", str(run), "--objective", "accuracy")
    assert not (place / "here" / "executed").exists()
    assert api.finetune(resume=str(run), steps=5, objective="evil:loss").steps == 5  # asked for, by the one who runs it
    assert (place / "here" / "executed").exists()


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_configuration_runs_nobodys_code(marked_model, tiny_data, refused, place, suffix):
    (place / "here" / "evil.py").write_text(
        "open('executed', 'w')\ndef loss(scores, batch): return scores.sum((1, 2))\n"
    )
    folder, mark = marked_model
    file = place / f"stranger.{suffix}"
    for name, value, flag in (
        ("objective", "evil:loss", "--objective MODULE:FUNCTION"),
        ("remote_code", True, "--remote-code"),
        ("url", ["http://127.0.0.1:9\nmezzo: all is well"], "--url ADDRESS"),
        ("ray_address", "127.0.0.1:9", "--ray-address ADDRESS"),
    ):
        settings = {"model": str(folder), "train": tiny_data, "task": "sst-2", name: value}
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        file.write_text(json.dumps(settings) if suffix == "json" else "\n".join(lines))
        for more in ([], ["--print-config"]):
            assert f"{name} is not taken from a file" in (said := refused("train", "--config", str(file), *more))
            assert flag in said
    assert not mark.exists()
    assert not (place / "here" / "executed").exists()


def test_what_is_named_beside_a_configuration_is_taken(tiny_folder, tiny_data, place):
    (place / "here" / "named_beside.py").write_text("def loss(scores, batch): return scores.sum((1, 2))\n")
    (place / "c.toml").write_text('objective = "named_beside:loss"\nsteps = 2\nbatch_size = 2\n')
    where = {"task": "sst-2", "train": tiny_data, "config": place / "c.toml", "threads": 1, "device": "cpu"}
    for number, objective in enumerate(("named_beside:loss", "accuracy", lambda scores, batch: scores.sum((1, 2)))):
        assert api.finetune(tiny_folder, objective=objective, out=str(place / f"r{number}"), **where).steps == 2


@pytest.mark.parametrize("where", ["journal", "config.json"])
@pytest.mark.parametrize(("name", "more"), [("url", {"engine": "sglang"}), ("ray_address", {"workers": 1})])
def test_nobody_is_called_because_a_run_folder_says_so(name, more, where, sound_run, refused, place):
    """Prompts, weights and (through Ray) code would travel: the address is given again by the one who runs it."""
    run = copy_of(sound_run, place)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        port.listen()
        port.settimeout(0)
        address = f"127.0.0.1:{port.getsockname()[1]}\nmezzo: all is well"
        named = {name: [f"http://{address}"] if name == "url" else address}
        journal = lines_of(run / NAME)
        journal[0]["config"] |= more | (named if where == "journal" else {})
        signed(run / NAME, journal)
        settings = json.loads((run / "config.json").read_text())
        written = {key: value for key, value in settings.items() if key != name}
        (run / "config.json").write_text(json.dumps(written | more | (named if where == "config.json" else {})))
        said = refused("train", "--resume", str(run), "--steps", "6")
        assert f"--{name.replace('_', '-')} ADDRESS" in said
        assert api.verify(run).steps == 4
        if name == "url":
            with pytest.raises(ConfigError, match="needs SGLang, which is not installed"):  # in process, not at the URL
                api.evaluate(run, data=[{"text": "good", "label": "positive"}], engine="sglang")
        with pytest.raises(BlockingIOError):
            port.accept()


def test_a_pickle_is_not_opened(tiny_folder, tiny_data, refused, place):
    folder = place / "pickled"
    shutil.copytree(tiny_folder, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    said = refused(*evaluated(folder, tiny_data))
    assert "no weights as .safetensors" in said
    assert "pickle" in said
    assert not (place / "here" / "executed").exists()


# ---- writing elsewhere


@pytest.mark.parametrize("name", [NAME, "metrics.jsonl", "config.json", "snapshots"])
def test_a_run_is_not_written_through_links(name, sound_run, refused, place):
    run = copy_of(sound_run, place)
    outside = place / "outside"
    (run / name).rename(outside)
    (run / name).symlink_to(outside)
    size = outside.stat().st_size
    assert "is a symbolic link" in refused("train", "--resume", str(run), "--steps", "6")
    assert outside.stat().st_size == size
    empty = place / "empty"
    empty.mkdir()
    (empty / name).symlink_to(place / "new")
    with pytest.raises(JournalError, match="is a symbolic link"):
        Folder.create(str(empty), "x")
    assert not (place / "new").exists()


def test_exports_and_temporary_files_are_not_written_through_links(sound_run, answered, refused, place):
    run = copy_of(sound_run, place)
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (run / "model").symlink_to(elsewhere)
    (run / "adapter").symlink_to(elsewhere)
    (run / ".journal.mezzo.tmp").symlink_to(elsewhere / "x")
    (run / f".journal.mezzo.{os.getpid()}.tmp").symlink_to(elsewhere / "y")
    (run / "journal.mezzo").symlink_to(elsewhere / "z")
    for kind in ("model", "adapter"):
        assert "exists already" in refused("export", str(run), kind)
    assert answered("export", str(run), "journal")[0] == 0
    assert list(elsewhere.iterdir()) == []
    assert (run / "journal.mezzo").read_bytes().startswith(MAGIC)


def test_a_tasks_name_is_no_path(tiny_folder, tiny_data, place):
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
    assert (place / "here" / run.out / NAME).is_file()


# ---- memory


def limited(code: str, *arguments: str, megabytes: int = 900) -> subprocess.CompletedProcess[str]:
    """Run lines in a process that may use only so much more memory than it has after its imports."""
    head = f"""
import resource, sys
import numpy, json
import mezzo.api, mezzo.compact, mezzo.tasks
pages = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + {megabytes} * 2**20,) * 2)
"""
    return subprocess.run([sys.executable, "-c", head + code, *arguments], capture_output=True, text=True, timeout=120)


def test_a_compact_bomb_is_not_unpacked(sound_run, tmp_path):
    export_compact(read(sound_run), tmp_path / "sound.mezzo")
    header = stored_header(tmp_path / "sound.mezzo")
    bomb = zlib.compress(bytes(300 * 2**20), 9)
    cases = {
        "claims": with_header(tmp_path / "sound.mezzo", header | {"steps": 10**9}, bomb, bomb),
        "too many samples": with_header(tmp_path / "sound.mezzo", header | {"samples": MAX_TERMS}, bomb, bomb),
        "unpacks to more": with_header(tmp_path / "sound.mezzo", header, bomb, bomb),
        "long header": with_header(tmp_path / "sound.mezzo", header | {"x": " " * (80 * 2**20)}),
    }
    for number, data in enumerate(cases.values()):
        (tmp_path / f"{number}.mezzo").write_bytes(data)
    code = """
from pathlib import Path
for path in sys.argv[1:]:
    try:
        mezzo.journal.compact.import_compact(Path(path))
    except mezzo.journal.compact.JournalError as error:
        print("refused", error)
"""
    done = limited(code, *(str(tmp_path / f"{number}.mezzo") for number in range(4)), megabytes=250)
    assert done.stdout.count("refused") == 4, done.stderr
    assert "claims 1000000000 steps" in done.stdout


def test_a_parquet_bomb_is_not_unpacked(tmp_path, monkeypatch):
    import pyarrow as arrow
    from pyarrow import parquet

    monkeypatch.setattr(reading, "MAX_TABLE", 50 * 2**20)
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
def test_compressed_files_are_not_opened(suffix, tmp_path):
    (tmp_path / f"data.jsonl{suffix}").write_bytes(b"\x1f\x8b" + bytes(100))
    with pytest.raises(DataError, match="unknown file type"):
        load_examples(str(tmp_path / f"data.jsonl{suffix}"), "sst-2")


def test_pipes_and_endless_files_are_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="is not a file"):
        load_examples(str(tmp_path / "pipe.jsonl"), "sst-2")
    for name in ("zero.jsonl", "zero.json", "zero.csv"):
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(DataError, match="is not a file"):
            load_examples(str(tmp_path / name), "sst-2")
    monkeypatch.setattr(reading, "MAX_TABLE", 10)
    (tmp_path / "big.json").write_text(json.dumps([{"text": "a", "label": "positive"}]))
    with pytest.raises(DataError, match="too many to read at once"):
        load_examples(str(tmp_path / "big.json"), "sst-2")


def test_a_model_that_claims_to_be_huge_is_refused_before_it_is_made(tiny_folder, tiny_data, tmp_path):
    config = json.loads((Path(tiny_folder) / "config.json").read_text())
    claims = {
        "layers": {"num_hidden_layers": 10**6},
        "words": {"vocab_size": 10**9},
        "positions": {"max_position_embeddings": 10**10},
        "width": {"hidden_size": 2**20, "intermediate_size": 2**22},
        "inner": {"intermediate_size": 10**12},
    }
    for name, values in claims.items():
        shutil.copytree(tiny_folder, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config | values))
    code = """
from mezzo.cli import main
for folder in sys.argv[2:]:
    print(main(["eval", "--model", folder, "--task", "sst-2", "--data", sys.argv[1], "--threads", "1", "--device", "cpu"]))
"""
    done = limited(code, tiny_data, *(str(tmp_path / name) for name in claims), megabytes=2500)
    assert done.stdout.split() == ["2"] * len(claims), done.stderr[-2000:]
    said = done.stderr.splitlines()
    assert len(said) == len(claims)
    assert all(line.startswith("mezzo: ") and "config.json" in line for line in said)


def test_shapes_that_a_file_cannot_hold_are_refused(tiny_folder, tiny_data, refused, place):
    """In a model and in a snapshot: the header claims terabytes."""
    folder = place / "model"
    shutil.copytree(tiny_folder, folder)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = next(key for key in header if key != "__metadata__")
    header[name]["shape"] = [2**20, 2**20]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    refused(*evaluated(folder, tiny_data))
    snapshots = Snapshots(place / "snapshots")
    snapshots.folder.mkdir()
    snapshots.path(3).write_bytes(path.read_bytes())
    assert snapshots.load(3) is None
    snapshots.path(4).write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert snapshots.load(4) is None


@pytest.mark.parametrize(("key", "value"), [("samples", 10**9), ("rank", 10**9), ("prefix_tokens", 10**9)])
def test_settings_that_would_exhaust_the_machine_are_refused(key, value, sound_run, refused, place):
    run = copy_of(sound_run, place)
    journal = lines_of(run / NAME)
    journal[0]["config"] |= {key: value} | ({"space": "prefix"} if key == "prefix_tokens" else {})
    signed(run / NAME, journal)
    refused("train", "--resume", str(run))
    if key == "rank":
        refused("verify", str(run))
    with pytest.raises(ConfigError):
        api.resolve({"samples": 10**9})


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({"pad_token_id": None}, "counts positions from its pad_token_id"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "is stored quantised"),
        ({"chunk_size_feed_forward": 7}, "itself fails on a few tokens"),
        ({"attn_implementation": "kernels-community/evil"}, "runs only with --remote-code"),
    ],
)
def test_claims_of_a_models_settings_are_answered_in_a_line(claim, message, tiny_folder, tiny_data, refused, place):
    folder = place / "model"
    shutil.copytree(tiny_folder, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | claim))
    assert message in refused(*evaluated(folder, tiny_data))


def test_half_a_character_in_data_is_found_before_anything_is_trained(tiny_folder, refused, place):
    data = place / "data.jsonl"
    data.write_text('{"text": "a fine film", "label": 1}\n{"text": "a \\ud800 film", "label": 0}\n')
    train = ["train", "--model", str(tiny_folder), "--task", "sst-2", "--train", str(data), "--out", "run"]
    assert "line 2: 'text' holds half a character" in refused(*train)
    assert "half a character" in refused("predict", "--model", str(tiny_folder), "--task", "sst-2", "--data", str(data))
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--model", "", "model is empty"), ("--train", "", "train is empty"), ("--encoding", "utf-8\0", "NUL")],
)
def test_options_without_a_value(option, value, message, refused):
    """What an unset variable of a shell leaves must not train something else."""
    assert message in refused("train", option, value)
