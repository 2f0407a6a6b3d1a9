"""Whatever is in a file: an error line, never a traceback, never a write elsewhere."""

from __future__ import annotations

import copy
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mezzo.cli import main
from mezzo.errors import MezzoError
from mezzo.journal.compact import MAGIC, export_compact, import_compact
from mezzo.journal.journal import read
from mezzo.tasks import load_examples
from mezzo.types import Example
from tests.hostile.conftest import copy_of, lines_of, signed

QUICK = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SLOWER = settings(QUICK, max_examples=25)

NUMBERS = st.one_of(
    st.integers(-3, 3), st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30, 1e308, float("inf"), float("nan")])
)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=8), st.sampled_from(["../../x", "/", ""])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


def explained(call: Callable[[], Any]) -> Any:
    """What it gives, or the line that says why not."""
    try:
        return call()
    except MezzoError as error:
        line = str(error)
    assert len(line) < 2000
    return line


def is_told(call: Callable[[], Any]) -> bool:
    """Whether it gives examples, or a line that says why not."""
    found = explained(call)
    return bool(found) if isinstance(found, str) else all(isinstance(example, Example) for example in found)


def paths_of(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *[path for key, item in inner for path in paths_of(item, (*here, key))]]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy in which the value at a path is another one; DROP removes it."""
    out = copy.deepcopy(value)
    place = out
    for key in path[:-1]:
        place = place[key]
    if new is DROP:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    return out


DROP = object()
SWAPS = st.one_of(VALUES, st.just(DROP))


@SLOWER
@given(pick=st.integers(0, 10**6), new=SWAPS, verb=st.sampled_from(["verify", "resume"]))
def test_headers_of_strangers(sound_run, answered, place, pick, new, verb):
    run = copy_of(sound_run, place)
    journal = lines_of(run / "journal.jsonl")
    paths = paths_of(journal[0])[1:]
    journal[0] = changed(journal[0], paths[pick % len(paths)], new)
    signed(run / "journal.jsonl", journal)
    limits = ["--steps", "5", "--time-limit", "0.05", "--eval-limit", "4", "--threads", "1", "--device", "cpu"]
    command = ["verify", str(run)] if verb == "verify" else ["train", "--resume", str(run), *limits]
    code, said = answered(*command)
    assert code in (0, 1, 2), said


@QUICK
@given(number=st.integers(1, 5), pick=st.integers(0, 100), new=SWAPS)
def test_records_of_strangers(sound_run, answered, place, number, pick, new):
    run = copy_of(sound_run, place)
    journal = lines_of(run / "journal.jsonl")
    number = min(number, len(journal) - 1)
    paths = paths_of(journal[number])[1:]
    journal[number] = changed(journal[number], paths[pick % len(paths)], new)
    signed(run / "journal.jsonl", journal)
    code, said = answered("verify", str(run))
    assert code in (0, 1, 2), said


@QUICK
@given(junk=st.binary(max_size=400), where=st.integers(0, 5000))
def test_journals_of_bytes(sound_run, answered, place, junk, where):
    run = copy_of(sound_run, place)
    data = (run / "journal.jsonl").read_bytes()
    (run / "journal.jsonl").write_bytes(data[:where] + junk + data[where + len(junk) :])
    code, said = answered("export", str(run), "journal", "--out", str(run / "j.mezzo"))
    assert code in (0, 2), said


@QUICK
@given(pick=st.integers(0, 10**6), new=SWAPS)
def test_compact_journals_with_sound_checksums(sound_run, tmp_path, pick, new):
    content = read(sound_run)
    export_compact(content, tmp_path / "sound.mezzo")
    sound = stored_header(tmp_path / "sound.mezzo")
    paths = [path for path in paths_of(sound)[1:] if path[0] in ("steps", "samples", "seed", "marks")]
    header = changed(sound, paths[pick % len(paths)], new)
    (tmp_path / "odd.mezzo").write_bytes(with_header(tmp_path / "sound.mezzo", header))
    found = explained(lambda: import_compact(tmp_path / "odd.mezzo"))
    assert isinstance(found, str) or len(found.records) <= 4


def stored_header(path: Path) -> dict[str, Any]:
    """The header of a compact journal as it is stored."""
    body = path.read_bytes()[len(MAGIC) + 4 :]
    return json.loads(zlib.decompress(body[8 : 8 + int.from_bytes(body[:8], "little")]))


def with_header(path: Path, header: Any, coefs: bytes | None = None, keeps: bytes | None = None) -> bytes:
    """A compact journal with another header (and other parts), its checksum put right."""
    data = path.read_bytes()[len(MAGIC) + 4 :]
    parts = []
    while data:
        length = int.from_bytes(data[:8], "little")
        parts.append(data[8 : 8 + length])
        data = data[8 + length :]
    parts[0] = zlib.compress(json.dumps(header).encode())
    parts[1:] = [coefs or parts[1], keeps or parts[2]]
    body = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


@QUICK
@given(line=st.integers(0, 20), pick=st.integers(0, 100), new=SWAPS)
def test_metrics_and_settings_of_strangers(sound_run, refused, place, line, pick, new):
    run = copy_of(sound_run, place)
    rows = lines_of(run / "metrics.jsonl")
    rows[line % len(rows)] = changed(rows[line % len(rows)], paths_of(rows[line % len(rows)])[1:][0], new)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(changed(found, (list(found)[pick % len(found)],), new)))
    assert refused("eval", str(run), "--data", str(run / "none.jsonl"))


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
def test_configurations(answered, place, junk, where):
    path = place / "c.toml"
    path.write_text(TOML[:where] + junk + TOML[where + len(junk) :], encoding="utf-8", errors="replace")
    code, said = answered("train", "--config", str(path), "--print-config")
    assert code in (0, 2), said
    code, said = answered("tasks", "show", str(path))
    assert code in (0, 2), said


@pytest.mark.parametrize(
    "content",
    ["a = " + "[" * 5000, 'lr = "' + "9" * 5000 + '"', "steps = " + "9" * 5000, "seed = 1e400", "x.y.z = 1", "\x00"],
)
def test_configurations_that_are_too_much(content, refused, place):
    (place / "c.toml").write_text(content)
    assert refused("train", "--config", str(place / "c.toml"))


KINDS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")
ROWS = [{"text": "a dull film", "label": "negative"}, {"text": 'a "warm", film', "label": "positive"}]


def sound_bytes(kind: str, folder: Path) -> bytes:
    if kind == ".parquet":
        import pyarrow as arrow
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(ROWS * 10), folder / "sound.parquet")
        return (folder / "sound.parquet").read_bytes()
    if kind == ".json":
        return json.dumps(ROWS).encode()
    if kind == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    sign = "\t" if kind == ".tsv" else ","
    return f"text{sign}label\na dull film{sign}negative\na warm film{sign}positive\n".encode()


@settings(QUICK, max_examples=150)
@given(kind=st.sampled_from(KINDS), junk=st.binary(max_size=60), where=st.integers(0, 900), whole=st.booleans())
def test_data_files(tmp_path, kind, junk, where, whole):
    sound = b"" if whole else sound_bytes(kind, tmp_path)
    where = where % (len(sound) + 1)
    path = tmp_path / f"data{kind}"
    path.write_bytes(sound[:where] + junk + sound[where + len(junk) :])
    for labelled in (True, "ignore"):
        assert is_told(lambda labelled=labelled: load_examples(str(path), "sst-2", labelled=labelled))


@settings(QUICK, max_examples=60)
@given(
    rows=st.lists(VALUES, max_size=4), encoding=st.sampled_from(["utf-8", "latin-1", "utf-16", "idna", "hex", "nope"])
)
def test_data_of_any_shape(tmp_path, rows, encoding):
    for name, text in (
        ("data.jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
        ("data.json", json.dumps(rows)),
        ("data.json", json.dumps({"data": rows})),
    ):
        (tmp_path / name).write_text(text)
        for task in ("sst-2", "copa", "squad", "record"):
            assert is_told(lambda name=name, task=task: load_examples(str(tmp_path / name), task, encoding=encoding))


MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


@SLOWER
@given(name=st.sampled_from(MODEL_FILES), pick=st.integers(0, 10**6), new=SWAPS)
def test_model_folders_of_strangers(tiny_folder, tiny_data, answered, place, name, pick, new):
    folder = place / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tiny_folder, folder)
    content = json.loads((folder / name).read_text())
    paths = [path for path in paths_of(content)[1:] if len(path) < 4]
    (folder / name).write_text(json.dumps(changed(content, paths[pick % len(paths)], new)))
    code, said = answered(*evaluated(folder, tiny_data))
    assert code in (0, 2), said


@QUICK
@given(
    name=st.sampled_from([*MODEL_FILES, "model.safetensors"]), junk=st.binary(max_size=50), where=st.integers(0, 3000)
)
def test_model_folders_of_bytes(tiny_folder, tiny_data, answered, place, name, junk, where):
    folder = place / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tiny_folder, folder)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:where] + junk + data[where + len(junk) :])
    code, said = answered(*evaluated(folder, tiny_data))
    assert code in (0, 2), said


def evaluated(folder: Path, data: str) -> list[str]:
    return ["eval", "--model", str(folder), "--task", "sst-2", "--data", data, "--threads", "1", "--device", "cpu"]


def test_the_sound_files_are_accepted(sound_run, tiny_folder, tiny_data, refused, place):
    """Without this, refusing everything would pass."""
    run = copy_of(sound_run, place)
    signed(run / "journal.jsonl", lines_of(run / "journal.jsonl"))
    assert main(["verify", str(run)]) == 0
    assert main(evaluated(Path(tiny_folder), tiny_data)) == 0
    for kind in KINDS:
        if kind != ".txt":
            (place / f"data{kind}").write_bytes(sound_bytes(kind, place))
            assert len(load_examples(str(place / f"data{kind}"), "sst-2")) >= 2
