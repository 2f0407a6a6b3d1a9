"""Fuzzing: whatever a file contains, a command works or prints one error line; no traceback, no files written elsewhere."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.api import best_step, finetune, open_run
from mezzo.cli import main
from mezzo.errors import JournalError, MezzoError
from mezzo.journal.compact import export_compact, import_compact
from mezzo.journal.content import read
from mezzo.runs.recorded_evaluations import read_evaluations
from mezzo.tasks import load_examples
from mezzo.types import Example
from tests.hostile.files import (
    copy_run,
    eval_command,
    read_compact_header,
    read_json_lines,
    replace_compact_header,
    write_journal,
)

QUICK = settings(max_examples=40)
SLOWER = settings(QUICK, max_examples=25)

HUGE = [2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, 1e308, float("inf"), float("nan")]
NUMBERS = st.one_of(st.integers(-3, 3), st.sampled_from(HUGE))
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=8), st.sampled_from(["../../x", "/", ""])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


def result_or_message(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the message of the error it raises."""
    try:
        return call()
    except MezzoError as error:
        message = str(error)
    assert len(message) < 2000
    return message


def loads_or_explains(call: Callable[[], Any]) -> bool:
    """Whether a call returns examples or raises an error with a message."""
    result = result_or_message(call)
    return bool(result) if isinstance(result, str) else all(isinstance(example, Example) for example in result)


def json_paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths (keys and indices) of all values in a JSON value, itself first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix, *[path for key, item in inner for path in json_paths(item, (*prefix, key))]]


def replace_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a path; DELETED removes the key or item."""
    result = copy.deepcopy(value)
    parent = result
    for key in path[:-1]:
        parent = parent[key]
    if new is DELETED:
        del parent[path[-1]]
    else:
        parent[path[-1]] = new
    return result


@pytest.fixture(scope="module")
def prefix_run(tiny_folder: str, tiny_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prefix") / "run"
    options = {
        "space": "prefix",
        "steps": 2,
        "batch_size": 4,
        "eval_limit": 4,
        "threads": 1,
        "device": "cpu",
        "lr": 1e-2,
    }
    finetune(tiny_folder, task="sst-2", train=tiny_data, dev=tiny_data, **options, out=str(out))
    return out


DELETED = object()
REPLACEMENTS = st.one_of(VALUES, st.just(DELETED))


@SLOWER
@given(pick=st.integers(0, 10**6), new=REPLACEMENTS, action=st.sampled_from(["verify", "resume"]))
def test_journal_headers_with_a_changed_value_never_crash(valid_run, run_command, workspace, pick, new, action):
    run = copy_run(valid_run, workspace)
    journal = read_json_lines(run / "journal.jsonl")
    paths = json_paths(journal[0])[1:]
    journal[0] = replace_at(journal[0], paths[pick % len(paths)], new)
    write_journal(run / "journal.jsonl", journal)
    limits = ["--steps", "5", "--time-limit", "0.05", "--eval-limit", "4", "--threads", "1", "--device", "cpu"]
    command = ["verify", str(run)] if action == "verify" else ["train", "--resume", str(run), *limits]
    code, stderr = run_command(*command)
    assert code in (0, 1, 2), stderr


@QUICK
@given(number=st.integers(1, 5), pick=st.integers(0, 100), new=REPLACEMENTS)
def test_journal_records_with_a_changed_value_never_crash(valid_run, run_command, workspace, number, pick, new):
    run = copy_run(valid_run, workspace)
    journal = read_json_lines(run / "journal.jsonl")
    number = min(number, len(journal) - 1)
    paths = json_paths(journal[number])[1:]
    journal[number] = replace_at(journal[number], paths[pick % len(paths)], new)
    write_journal(run / "journal.jsonl", journal)
    code, stderr = run_command("verify", str(run))
    assert code in (0, 1, 2), stderr


@pytest.fixture(scope="module")
def solved_run(tiny_folder: str, tiny_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("solved") / "run"
    sizes = {"steps": 2, "samples": 3, "batch_size": 4, "eval_limit": 4, "threads": 1, "device": "cpu"}
    finetune(
        tiny_folder, task="sst-2", train=tiny_data, dev=tiny_data, space="lora", method="solve", **sizes, out=str(out)
    )
    return out


RESUMED = ["--steps", "3", "--eval-limit", "4", "--time-limit", "0.05", "--threads", "1", "--device", "cpu"]


@SLOWER
@given(pick=st.integers(0, 100), new=REPLACEMENTS)
def test_what_a_method_remembers_never_crashes_a_resume(solved_run, run_command, workspace, pick, new):
    run = copy_run(solved_run, workspace)
    journal = read_json_lines(run / "journal.jsonl")
    (number, *_) = (at for at, line in enumerate(journal) if "notes" in line)
    paths = json_paths(journal[number]["notes"])
    journal[number] = replace_at(journal[number], ("notes", *paths[pick % len(paths)]), new)
    write_journal(run / "journal.jsonl", journal)
    code, stderr = run_command("train", "--resume", str(run), *RESUMED)
    assert code in (0, 2), stderr


def test_step_without_what_its_method_remembers_is_named(solved_run, expect_refusal, workspace):
    run = copy_run(solved_run, workspace)
    journal = read_json_lines(run / "journal.jsonl")
    for line in journal:
        line.get("notes", {}).pop("prior", None)
    write_journal(run / "journal.jsonl", journal)
    assert "step 0 of the journal lacks what its method has to remember ('prior')" in expect_refusal(
        "train", "--resume", str(run), *RESUMED
    )


@QUICK
@given(junk=st.binary(max_size=400), where=st.integers(0, 5000))
def test_journals_with_random_bytes_never_crash(valid_run, run_command, workspace, junk, where):
    run = copy_run(valid_run, workspace)
    data = (run / "journal.jsonl").read_bytes()
    (run / "journal.jsonl").write_bytes(data[:where] + junk + data[where + len(junk) :])
    code, stderr = run_command("export", str(run), "journal", "--out", str(run / "j.mezzo"))
    assert code in (0, 2), stderr


@QUICK
@given(pick=st.integers(0, 10**6), new=REPLACEMENTS)
def test_compact_journals_with_a_changed_value_and_a_valid_checksum_never_crash(valid_run, tmp_path, pick, new):
    content = read(valid_run)
    export_compact(content, tmp_path / "valid.mezzo")
    valid_header = read_compact_header(tmp_path / "valid.mezzo")
    paths = [path for path in json_paths(valid_header)[1:] if path[0] in ("steps", "samples", "seed", "marks")]
    header = replace_at(valid_header, paths[pick % len(paths)], new)
    (tmp_path / "changed.mezzo").write_bytes(replace_compact_header(tmp_path / "valid.mezzo", header))
    result = result_or_message(lambda: import_compact(tmp_path / "changed.mezzo"))
    assert isinstance(result, str) or len(result.records) <= 4


@QUICK
@given(line=st.integers(0, 20), pick=st.integers(0, 100), new=REPLACEMENTS)
def test_eval_of_a_run_with_changed_metrics_and_config_is_refused_in_one_line(
    valid_run, expect_refusal, workspace, line, pick, new
):
    run = copy_run(valid_run, workspace)
    rows = read_json_lines(run / "metrics.jsonl")
    index = line % len(rows)
    rows[index] = replace_at(rows[index], json_paths(rows[index])[1:][0], new)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(replace_at(config, (list(config)[pick % len(config)],), new)))
    assert expect_refusal("eval", str(run), "--data", str(run / "none.jsonl"))


RUN_FILES = ("journal.jsonl", "metrics.jsonl", "mistakes.jsonl", "config.json")


@settings(QUICK, max_examples=60)
@given(
    name=st.sampled_from(RUN_FILES),
    line=st.integers(0, 40),
    pick=st.integers(0, 400),
    new=REPLACEMENTS,
    raw=st.booleans(),
)
def test_report_of_a_run_with_a_changed_file_never_crashes(
    valid_run, run_command, workspace, name, line, pick, new, raw
):
    """Any value of any line, evaluations of the journal included, or bytes in its place."""
    run = copy_run(valid_run, workspace)
    path = run / name
    rows = [json.loads(path.read_text())] if name == "config.json" else read_json_lines(path)
    index = line % len(rows)
    paths = json_paths(rows[index])[1:]
    rows[index] = replace_at(rows[index], paths[pick % len(paths)], new)
    if name == "journal.jsonl":
        write_journal(path, rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if raw:
        data = path.read_bytes()
        path.write_bytes(data[: pick * 7] + repr(new).encode() + data[pick * 9 :])
    code, stderr = run_command("report", str(run))
    assert code in (0, 2), stderr
    code, stderr = run_command("runs", str(run))
    assert code in (0, 2), stderr
    result_or_message(lambda: best_step(read(run)))


@pytest.mark.parametrize("name", RUN_FILES)
def test_integers_that_no_float_holds_never_crash(valid_run, run_command, workspace, name):
    """In the place of every number of every kind of line."""
    run = copy_run(valid_run, workspace)
    path = run / name
    rows = [json.loads(path.read_text())] if name == "config.json" else read_json_lines(path)
    kinds = {(row.get("event"), *list(row)[:1]): index for index, row in enumerate(rows) if index}
    for index in sorted({0, *kinds.values()}):
        numbers = [each for each in json_paths(rows[index])[1:] if each[-1] != "crc" and is_number(rows[index], each)]
        for place in numbers:
            changed = [*rows[:index], replace_at(rows[index], place, 10**400), *rows[index + 1 :]]
            if name == "journal.jsonl":
                write_journal(path, changed)
            else:
                path.write_text("".join(json.dumps(row) + "\n" for row in changed))
            code, stderr = run_command("report", str(run))
            assert code in (0, 2), (place, stderr)
            code, stderr = run_command("runs", str(run))
            assert code in (0, 2), (place, stderr)
            result_or_message(lambda: read_evaluations(read(run)))
    limits = ["--steps", "5", "--time-limit", "0.05", "--eval-limit", "4", "--threads", "1", "--device", "cpu"]
    code, stderr = run_command("train", "--resume", str(run), *limits)
    assert code in (0, 2), stderr


def is_number(value: Any, path: tuple[Any, ...]) -> bool:
    for key in path:
        value = value[key]
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def test_evaluations_after_more_forwards_than_possible_are_refused(valid_run, workspace):
    run = copy_run(valid_run, workspace)
    journal = read_json_lines(run / "journal.jsonl")
    next(line for line in journal if line.get("event") == "evaluation")["spent"] = 10**90
    write_journal(run / "journal.jsonl", journal)
    with pytest.raises(JournalError, match="evaluation without 'spent'"):
        read_evaluations(read(run))


@settings(QUICK, max_examples=12)
@given(junk=st.binary(max_size=60), where=st.integers(0, 4000), name=st.sampled_from(["start.bin", "snapshot"]))
def test_start_and_snapshots_with_random_bytes_change_no_weights(prefix_run, run_command, workspace, junk, where, name):
    """They are used as they were written, or not at all."""
    run = copy_run(prefix_run, workspace)
    path = run / "start.bin" if name == "start.bin" else next((run / "snapshots").iterdir())
    data = path.read_bytes()
    where %= len(data)
    changed = data[:where] + junk + data[where + len(junk) :]
    path.write_bytes(changed)
    found = result_or_message(lambda: open_run(run, at=2)[0].digest())
    assert found == read(prefix_run).marks[2] or (name == "start.bin" and changed != data and str(path) in found)


TOML = """[model]
model = "mezzo/roberta-mini"
[method]
lr = 1e-3
steps = 4
[task]
words = ["negative=bad", "positive=good"]
"""


@QUICK
@given(junk=st.text(max_size=40), where=st.integers(0, len(TOML)))
def test_config_files_with_random_text_never_crash(run_command, workspace, junk, where):
    path = workspace / "c.toml"
    path.write_text(TOML[:where] + junk + TOML[where + len(junk) :], encoding="utf-8", errors="replace")
    code, stderr = run_command("train", "--config", str(path), "--print-config")
    assert code in (0, 2), stderr
    code, stderr = run_command("tasks", "show", str(path))
    assert code in (0, 2), stderr


@pytest.mark.parametrize(
    "content",
    [
        "a = " + "[" * 5000,
        'lr = "' + "9" * 5000 + '"',
        "steps = " + "9" * 5000,
        "seed = 1e400",
        "steps = 1" + "0" * 400,
        "x.y.z = 1",
        "\x00",
    ],
)
def test_config_files_with_extreme_values_are_refused(content, expect_refusal, workspace):
    (workspace / "c.toml").write_text(content)
    assert expect_refusal("train", "--config", str(workspace / "c.toml"))


FILE_TYPES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")
ROWS = [{"text": "a dull film", "label": "negative"}, {"text": 'a "warm", film', "label": "positive"}]


def valid_bytes(suffix: str, folder: Path) -> bytes:
    if suffix == ".parquet":
        import pyarrow as arrow
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(ROWS * 10), folder / "valid.parquet")
        return (folder / "valid.parquet").read_bytes()
    if suffix == ".json":
        return json.dumps(ROWS).encode()
    if suffix == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    separator = "\t" if suffix == ".tsv" else ","
    return f"text{separator}label\na dull film{separator}negative\na warm film{separator}positive\n".encode()


@pytest.mark.filterwarnings("ignore::mezzo.errors.MezzoWarning")
@settings(QUICK, max_examples=150)
@given(
    suffix=st.sampled_from(FILE_TYPES), junk=st.binary(max_size=60), where=st.integers(0, 900), only_junk=st.booleans()
)
def test_data_files_with_random_bytes_never_crash(tmp_path, suffix, junk, where, only_junk):
    valid = b"" if only_junk else valid_bytes(suffix, tmp_path)
    where = where % (len(valid) + 1)
    path = tmp_path / f"data{suffix}"
    path.write_bytes(valid[:where] + junk + valid[where + len(junk) :])
    for labelled in (True, "ignore"):
        assert loads_or_explains(lambda labelled=labelled: load_examples(str(path), "sst-2", labelled=labelled))


@settings(QUICK, max_examples=60)
@given(
    rows=st.lists(VALUES, max_size=4), encoding=st.sampled_from(["utf-8", "latin-1", "utf-16", "idna", "hex", "nope"])
)
def test_data_rows_of_any_shape_never_crash(tmp_path, rows, encoding):
    for name, text in (
        ("data.jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
        ("data.json", json.dumps(rows)),
        ("data.json", json.dumps({"data": rows})),
    ):
        (tmp_path / name).write_text(text)
        for task in ("sst-2", "copa", "squad", "record"):
            assert loads_or_explains(
                lambda name=name, task=task: load_examples(str(tmp_path / name), task, encoding=encoding)
            )


MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


@SLOWER
@given(name=st.sampled_from(MODEL_FILES), pick=st.integers(0, 10**6), new=REPLACEMENTS)
def test_model_folders_with_a_changed_value_never_crash(
    tiny_folder, tiny_data, run_command, workspace, name, pick, new
):
    folder = workspace / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tiny_folder, folder)
    content = json.loads((folder / name).read_text())
    paths = [path for path in json_paths(content)[1:] if len(path) < 4]
    (folder / name).write_text(json.dumps(replace_at(content, paths[pick % len(paths)], new)))
    code, stderr = run_command(*eval_command(folder, tiny_data))
    assert code in (0, 2), stderr


@QUICK
@given(
    name=st.sampled_from([*MODEL_FILES, "model.safetensors"]), junk=st.binary(max_size=50), where=st.integers(0, 3000)
)
def test_model_folders_with_random_bytes_never_crash(tiny_folder, tiny_data, run_command, workspace, name, junk, where):
    folder = workspace / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tiny_folder, folder)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:where] + junk + data[where + len(junk) :])
    code, stderr = run_command(*eval_command(folder, tiny_data))
    assert code in (0, 2), stderr


def test_valid_files_are_accepted(valid_run, tiny_folder, tiny_data, workspace):
    """The other tests would pass if every file were refused."""
    run = copy_run(valid_run, workspace)
    write_journal(run / "journal.jsonl", read_json_lines(run / "journal.jsonl"))
    assert main(["verify", str(run)]) == 0
    assert main(eval_command(Path(tiny_folder), tiny_data)) == 0
    for suffix in FILE_TYPES:
        if suffix != ".txt":
            (workspace / f"data{suffix}").write_bytes(valid_bytes(suffix, workspace))
            assert len(load_examples(str(workspace / f"data{suffix}"), "sst-2")) >= 2
