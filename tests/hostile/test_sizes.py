"""Files that claim, or are, more than a machine can take, or never end: one line within seconds, and within memory."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from mezzo import api
from mezzo.cli import main
from mezzo.errors import DataError, ModelError
from mezzo.evaluation import held_out
from mezzo.evaluation.held_out import held_out_batch
from mezzo.journal.compact import MAGIC, export_compact
from mezzo.journal.content import read
from mezzo.replay.snapshots import Snapshots
from mezzo.runs import folder as run_folder
from mezzo.runs.export import load_prefix
from mezzo.runs.folder import Folder
from mezzo.tasks import load_examples
from mezzo.types import TrainedTensor
from mezzo.untrusted import read_bytes, read_settings
from tests.conftest import make_roberta
from tests.hostile.files import copy_run, eval_command
from tests.hostile.test_untrusted_files import run_with_memory_limit


def write_sparse_tensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A valid safetensors file of zeros that takes no room on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)


# ---- settings


@pytest.mark.parametrize(
    "text",
    [".".join("a" * 20_000) + " = 1", "[" + ".".join("a" * 20_000) + "]", " . ".join(['"a"'] * 8_000) + " = 1"],
)
@pytest.mark.parametrize("command", [["train", "--config"], ["tasks", "show"]])
def test_long_dotted_keys_are_refused_within_memory(text, command, tmp_path):
    (tmp_path / "bomb.toml").write_text(text)
    code = "from mezzo.cli import main\nprint(main(sys.argv[1:]))"
    done = run_with_memory_limit(code, *command, str(tmp_path / "bomb.toml"), megabytes=150)
    assert done.stdout.split() == ["2"], done.stderr[-2000:]
    assert done.stderr.count("\n") == 1 and "dots" in done.stderr


@pytest.mark.parametrize(("dots", "gap"), [(15, " " * 30), (15, "\t " * 2000), (100_000, " "), (1000, " " * 200)])
def test_spaces_in_dotted_keys_take_no_time(dots, gap, tmp_path):
    """A pattern that can share out the spaces in many ways would not return."""
    (tmp_path / "c.toml").write_text("x" + ("." + gap) * dots + "= 1\n")
    with pytest.raises(ValueError, match="Invalid" if dots < 16 else "dots"):
        read_settings(tmp_path / "c.toml")


def test_dots_in_strings_and_comments_are_no_keys(tmp_path):
    dots = ".".join("a" * 100)
    path = tmp_path / "c.toml"
    path.write_text(f'template = "{dots}"\nlr = 1.5 # {dots}\nout = \'{dots}\'\ntask.text = """\n{dots} = "1\n"""\n')
    assert read_settings(path) == {"template": dots, "lr": 1.5, "out": dots, "task": {"text": f'{dots} = "1\n'}}


@pytest.mark.parametrize("suffix", ["toml", "json"])
@pytest.mark.parametrize("command", [["train", "--config"], ["tasks", "show"], ["train", "--task"]])
def test_pipe_and_huge_file_as_settings_are_refused(suffix, command, expect_refusal, workspace):
    pipe, huge = workspace / f"pipe.{suffix}", workspace / f"huge.{suffix}"
    os.mkfifo(pipe)
    assert "is not a file" in expect_refusal(*command, str(pipe))
    huge.touch()
    os.truncate(huge, 3 * 2**30)
    assert "more than" in expect_refusal(*command, str(huge))


def test_read_bytes_is_bounded(tmp_path):
    (tmp_path / "f").write_bytes(b"123")
    assert read_bytes(tmp_path / "f", 3) == b"123"
    with pytest.raises(ValueError, match="more than 2 bytes"):
        read_bytes(tmp_path / "f", 2)
    with pytest.raises(ValueError, match="is not a file"):
        read_bytes(Path("/dev/zero"), 2)


# ---- the run folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "mistakes.jsonl", "workers"])
def test_huge_files_of_a_run_folder_are_not_read(name, valid_run, workspace):
    run = copy_run(valid_run, workspace)
    (run / name).touch()
    os.truncate(run / name, 5 * 2**30)
    code = "from mezzo.cli import main\nprint(main(['report', sys.argv[1]]), main(['workers', sys.argv[1]]))"
    done = run_with_memory_limit(code, str(run), megabytes=400)
    assert done.stdout.split()[-2:] == ["2" if name.endswith(".jsonl") else "0", "2"], done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def test_lines_of_metrics_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "MAX_LINE", 100)
    long = {"event": "warning", "text": "x" * 200}
    (tmp_path / "metrics.jsonl").write_text(f'{json.dumps(long)}\n{{"event": "step"}}\n')
    assert list(Folder(tmp_path).metrics()) == [{"event": "step"}]


def test_report_shows_a_bounded_number_of_texts(valid_run, workspace):
    run = copy_run(valid_run, workspace)
    row = {"fields": {"text": "y" * 10_000}, "right": "a", "given": "b", "sure": 1.0}
    (run / "mistakes.jsonl").write_text(f"{json.dumps(row)}\n" * 300)
    with (run / "metrics.jsonl").open("a") as metrics:
        for number in range(2000):
            metrics.write(json.dumps({"event": "warning", "step": number, "text": f"{number} " + "z" * 10_000}) + "\n")
            metrics.write(json.dumps({"event": "command", "step": number, "text": f"{number} " + "z" * 10_000}) + "\n")
    api.report(run, out=run / "r.html")
    assert (run / "r.html").stat().st_size < 2**20


def test_sparse_snapshot_of_other_shapes_is_not_read(valid_run, workspace):
    run = copy_run(valid_run, workspace)
    for path in (run / "snapshots").iterdir():
        write_sparse_tensors(path, {"x": (3 * 2**28,)})
    code = "print(mezzo.api.finetune(resume=sys.argv[1], steps=5).steps)"
    done = run_with_memory_limit(code, str(run), megabytes=1500)
    assert done.stdout.split() == ["5"], done.stderr[-2000:]
    assert Snapshots(run / "snapshots").load(4, [TrainedTensor("x", (1,), "matrix")]) is None


def test_sparse_compact_journal_is_refused_within_memory(valid_run, tmp_path):
    """Its parts say how long they are, and a start of a prefix can be as long as its header says."""
    export_compact(read(valid_run), tmp_path / "valid.mezzo", start=b"0" * 100)
    sparse, claims, start = (tmp_path / f"{name}.mezzo" for name in ("sparse", "claims", "start"))
    sparse.write_bytes(MAGIC + bytes(4))
    claims.write_bytes(MAGIC + bytes(4) + (500 * 2**20).to_bytes(8, "little"))
    body = (tmp_path / "valid.mezzo").read_bytes()[len(MAGIC) + 4 :]
    body = body[: body.rindex(zlib.compress(b"0" * 100, 9)) - 8] + (400 * 2**20).to_bytes(8, "little")
    crc = zlib.crc32(body)
    for _ in range(400):
        crc = zlib.crc32(bytes(2**20), crc)
    start.write_bytes(MAGIC + crc.to_bytes(4, "little") + body)
    for path, size in ((sparse, 760 * 2**20), (claims, 600 * 2**20), (start, start.stat().st_size + 400 * 2**20)):
        os.truncate(path, size)
    code = "from mezzo.cli import main\nprint([main(['verify', path]) for path in sys.argv[1:]])"
    done = run_with_memory_limit(code, str(sparse), str(claims), str(start), megabytes=150)
    assert done.stdout.split("\n")[-2] == "[2, 2, 2]", done.stderr[-2000:]
    messages = ("more than 6", "claims 524,288,000 bytes", "longer than its header says")
    for line, message in zip(done.stderr.splitlines(), messages, strict=True):
        assert message in line


def append_entries(journal: Path, payload: bytes, lines: int) -> None:
    """Lines of one payload, which is no complete object, with valid checksums."""
    crc = read(journal.parent).crc
    with journal.open("ab") as file:
        for _ in range(lines):
            crc = zlib.crc32(payload + b"}", crc)
            file.write(b'%s,"crc":"%08x"}\n' % (payload, crc))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (b'{"event":"evaluation","step":4,"x":[%s1]' % (b"[]," * 5_000_000), "is damaged"),
        (b'{"event":"evaluation","step":4,"x":[%s1]' % (b"[1,2]," * 2_500_000), "is damaged"),
        (b'{"event":"evaluation","step":4,"x":{%s"a":1}' % (b'"a":{},' * 2_000_000), "is damaged"),
        (b'{"event":"evaluation","step":4,"x":[%s1]' % (b"1e9," * 3_500_000), "50,331,648 bytes"),
        (b'{"event":"zero-shot","step":4,"x":"%s"' % (b"x" * 15_000_000), "50,331,648 bytes"),
        (b'{"mark":4,"digest":"%s"' % (b"0" * 15_000_000), "50,331,648 bytes"),
    ],
    ids=["lists", "pairs", "objects", "numbers", "text", "marks"],
)
def test_huge_evaluations_of_a_journal_are_refused_within_memory(entry, message, valid_run, workspace):
    """Nested lists took 24 times their bytes, without limit."""
    run = copy_run(valid_run, workspace)
    append_entries(run / "journal.jsonl", entry, 6)
    code = "from mezzo.cli import main\nprint(main(['report', sys.argv[1]]))"
    done = run_with_memory_limit(code, str(run), megabytes=900)
    assert done.stdout.split() == ["2"], done.stderr[-2000:]
    assert done.stderr.count("\n") == 1 and message in done.stderr


def test_journal_that_is_a_pipe_is_refused(expect_refusal, workspace):
    os.mkfifo(workspace / "pipe")
    for command in (["verify"], ["eval"], ["train", "--resume"]):
        assert "pipe" in expect_refusal(*command, str(workspace / "pipe"))


# ---- models and adapters


def test_sparse_prefix_of_other_shapes_is_not_read(tmp_path):
    (tmp_path / "prefix_config.json").write_text(json.dumps({"format": "mezzo-prefix-1"}))
    write_sparse_tensors(tmp_path / "prefix.safetensors", {"x": (3 * 2**28, 1, 1)})
    with pytest.raises(ModelError, match="belongs to another model"):
        load_prefix(make_roberta(), tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "mezzo.json", "merges.txt"])
def test_pipes_and_huge_files_in_a_model_folder_are_refused(name, tiny_folder, tiny_data, expect_refusal, workspace):
    folder = workspace / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    expect_refusal(*eval_command(folder, tiny_data))
    if name.endswith(".json"):
        (folder / name).unlink()
        (folder / name).touch()
        os.truncate(folder / name, 3 * 2**30)
        assert "more than" in expect_refusal(*eval_command(folder, tiny_data))


# ---- data


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json"])
def test_many_columns_are_refused(suffix, tmp_path):
    names = [f"c{number}" for number in range(500_000)]
    path = tmp_path / f"wide.{suffix}"
    if suffix.startswith("json"):
        row = json.dumps(dict.fromkeys(names, "x"))
        path.write_text(f"[{row}]" if suffix == "json" else row)
    else:
        sign = "\t" if suffix == "tsv" else ";"
        path.write_text(f"{sign.join(names)}\n{sign.join('x' * len(names))}\n")
    with pytest.raises(DataError, match="1: 500,000 columns, and 10,000 is the most"):
        load_examples(str(path), "sst-2")


def test_wide_data_is_refused_where_its_task_is_guessed(expect_refusal, workspace):
    names = [f"c{number}" for number in range(100_000)]
    (workspace / "wide.csv").write_text(f"{','.join(names)}\n{','.join('x' * len(names))}\n")
    for command in (["train", "--train"], ["tasks", "suggest"]):
        assert "100,000 columns" in expect_refusal(*command, str(workspace / "wide.csv"))


def test_held_out_text_is_a_file_of_which_the_beginning_is_read(tmp_path):
    words = Words()
    (tmp_path / "long.txt").write_text("ä" * 2 * held_out.MAX_BYTES)
    assert len(held_out_batch(words, str(tmp_path / "long.txt"), 64).prompts) == held_out.MAX_PIECES
    assert max(words.lengths) <= held_out.MAX_BYTES
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe cannot be read as UTF-8 text: it is not a file"):
        held_out_batch(words, str(tmp_path / "pipe"), 64)
    (tmp_path / "latin.txt").write_bytes("Käse".encode("latin-1") * 9)
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        held_out_batch(words, str(tmp_path / "latin.txt"), 64)


class Words:
    """A tokenizer with a token for each character; remembers how long texts were."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        self.lengths.append(len(text))
        return {"input_ids": [ord(sign) for sign in text]}


def test_text_too_long_to_tokenize_is_refused(tiny_folder, expect_refusal, workspace):
    path = workspace / "data.jsonl"
    path.write_text(json.dumps({"text": "a" * 9_800_000, "label": "positive"}) + "\n")
    assert "line 1: 'text' has 9,800,000 characters" in expect_refusal(*eval_command(Path(tiny_folder), str(path)))
    predict = ["predict", "--model", tiny_folder, "--task", "sst-2", "--data"]
    assert "9,800,000 characters" in expect_refusal(*predict, str(path))
    (workspace / "lines.txt").write_text("a" * 9_800_000)
    assert "9,800,000 characters" in expect_refusal(*predict, str(workspace / "lines.txt"))
    (workspace / "line.txt").touch()
    os.truncate(workspace / "line.txt", 3 * 2**30)
    assert "is a binary file" in expect_refusal(*predict, str(workspace / "line.txt"))


def test_deeply_nested_journal_is_refused(valid_run, workspace, capsys):
    from mezzo.journal.content import NAME
    from tests.hostile.files import read_json_lines, write_journal

    for depth in (300, 500, 700):
        run = copy_run(valid_run, workspace)
        journal = read_json_lines(run / NAME)
        deep: list[object] = []
        for _ in range(depth):
            deep = [deep]
        for part in ("config", "task", "engine", "start"):
            journal[0][part] = {**journal[0].get(part, {}), "x": deep}
        write_journal(run / NAME, journal)
        for command in (["verify"], ["export"], ["report"], ["train", "--resume"]):
            more = ["journal", "--out", str(run / "j.mezzo")] if command == ["export"] else []
            assert main([*command, str(run), *more]) in (0, 2)
            assert "Traceback" not in capsys.readouterr().err
