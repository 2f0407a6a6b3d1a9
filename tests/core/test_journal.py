"""The journal on disk: torn tails are truncated, damage is refused, one writer at a time; the compact form."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.errors import JournalError
from mezzo.journal import content as content_module
from mezzo.journal.compact import export_compact, import_compact
from mezzo.journal.content import NAME, read
from mezzo.journal.header import Header
from mezzo.journal.journal import Journal
from mezzo.method import noise
from mezzo.types import StepRecord, Update

HEADER = Header(seed=4)


def make_record(step: int, rng: np.random.Generator, keep: float = 1.0) -> StepRecord:
    coef = float(np.float32(rng.normal() * 1e-4))
    update = Update(((noise.step_seed(4, step, 0), coef),), keep)
    return StepRecord(step, (rng.random(), rng.random()), (rng.normal(),), update, 1e-4)


def write_journal(folder, steps: int = 10, keep: float = 1.0) -> list[StepRecord]:
    rng = np.random.default_rng(0)
    records = [make_record(step, rng, keep) for step in range(steps)]
    with Journal.create(folder, HEADER) as journal:
        for item in records:
            journal.append(item)
        journal.mark(steps, "abc")
    return records


def test_written_records_and_marks_are_read_back(tmp_path):
    records = write_journal(tmp_path)
    content = read(tmp_path)
    assert content.records == records
    assert content.marks == {10: "abc"}
    assert content.torn == 0
    assert content.header.seed == 4


def test_skipped_steps_keep_nan_and_infinite_losses(tmp_path):
    skipped = StepRecord(0, (math.nan, math.inf), (math.nan,), Update(), 0.1, skipped="non-finite loss")
    with Journal.create(tmp_path, HEADER) as journal:
        journal.append(skipped)
    record = read(tmp_path).records[0]
    assert math.isnan(record.losses[0])
    assert record.losses[1] == math.inf
    assert record.skipped == "non-finite loss"


@settings(max_examples=60)
@given(cut=st.integers(1, 400))
def test_torn_tail_is_truncated_and_the_rest_kept(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("torn")
    records = write_journal(folder)
    path = folder / NAME
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    content = read(folder)
    assert content.records == records[: content.steps]
    assert content.size + content.torn == len(data) - cut
    with Journal.resume(folder) as journal:
        assert path.stat().st_size == len(data) - cut, "nothing is cut before there is something to write"
        journal.cut_tail()
        assert path.stat().st_size == content.size
        for item in records[content.steps :]:
            journal.append(item)
    continued = read(folder)
    assert continued.records == records
    assert continued.torn == 0


@settings(max_examples=60)
@given(index=st.integers(0, 10**6), value=st.integers(0, 255))
def test_changed_byte_never_changes_a_step(tmp_path_factory, index, value):
    folder = tmp_path_factory.mktemp("changed")
    records = write_journal(folder)
    path = folder / NAME
    data = bytearray(path.read_bytes())
    index %= len(data)
    if data[index] == value:
        return
    data[index] = value
    path.write_bytes(bytes(data))
    try:
        content = read(folder)
    except JournalError:
        return
    # Only damage to the last line, the mark, or to the checksum that it goes on from, may look like a torn tail.
    assert content.torn
    assert content.records == records[: content.steps]
    assert content.steps >= 9


def test_run_that_writes_while_it_is_read_is_not_damaged(tmp_path, monkeypatch):
    """The reader sees half a line; the rest of it, and the next, are there a moment later."""
    records = write_journal(tmp_path)
    path = tmp_path / NAME
    data = path.read_bytes()
    half = data.rindex(b'{"step":7') + 20
    path.write_bytes(data[:half])
    decode = content_module.decode_line

    def decode_and_write(line: bytes, crc: int) -> Any:
        if line == data[half - 20 : half]:
            path.write_bytes(data)
        return decode(line, crc)

    monkeypatch.setattr(content_module, "decode_line", decode_and_write)
    assert read(tmp_path).records == records[:7]


def test_damaged_or_missing_lines_in_the_middle_are_refused(tmp_path):
    write_journal(tmp_path)
    path = tmp_path / NAME
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b'"step":3', b'"step":8')
    path.write_bytes(b"".join(lines))
    with pytest.raises(JournalError, match=r"line 5 is damaged.* but more follows it than a crash leaves"):
        read(tmp_path)
    with pytest.raises(JournalError, match="damaged"):
        Journal.resume(tmp_path)
    path.write_bytes(b"".join(lines[:4] + lines[5:]))
    with pytest.raises(JournalError, match="lines before it are missing"):
        read(tmp_path)


def test_line_of_another_run_is_treated_as_a_torn_tail(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_journal(tmp_path / "a")
    with Journal.create(tmp_path / "b", Header(seed=5)):
        pass
    foreign_line = (tmp_path / "a" / NAME).read_bytes().splitlines(keepends=True)[1]
    with (tmp_path / "b" / NAME).open("ab") as file:
        file.write(foreign_line)
    assert read(tmp_path / "b").steps == 0
    assert read(tmp_path / "b").torn == len(foreign_line)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"{}\n", b"not json\n", b"\x00" * 100, b'{"format":1,"crc":"00000000"}\n']
)
def test_journal_without_a_valid_header_is_refused(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(JournalError, match="header"):
        read(tmp_path)


def test_long_journals_are_read_in_little_memory(tmp_path):
    """Replayed, too: the steps are never in memory together, and any of them is found without reading all before it."""
    records = write_journal(tmp_path, steps=12_345)
    tracemalloc.start()
    try:
        content = read(tmp_path)
        count = sum(1 for _ in content.records)
        tail = content.records[12_300:]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (count, content.steps, content.records[7]) == (12_345, 12_345, records[7])
    assert tail == records[12_300:]
    assert peak < 400_000


def test_second_writer_is_refused(tmp_path):
    with Journal.create(tmp_path, HEADER):
        with pytest.raises(JournalError, match="in use by another process"):
            Journal.resume(tmp_path)
        assert read(tmp_path).steps == 0  # reading is allowed
    with pytest.raises(JournalError, match="holds a run already"):
        Journal.create(tmp_path, HEADER)
    Journal.resume(tmp_path).close()


@pytest.mark.parametrize("keep", [1.0, float(np.float32(0.99999))])
def test_compact_journal_is_small_and_has_the_same_updates(tmp_path, keep):
    records = write_journal(tmp_path, steps=20_000, keep=keep)
    size = export_compact(read(tmp_path), tmp_path / "j.mezzo")
    assert size < 100_000
    content = import_compact(tmp_path / "j.mezzo")
    assert [r.update for r in content.records] == [r.update for r in records]
    assert content.marks == {20_000: "abc"}
    assert content.header.seed == 4


def test_compact_journal_keeps_directions_of_earlier_steps(tmp_path):
    """As the moves that `solve` takes up again have them."""
    seeds = [noise.step_seed(4, step, number) for step, number in ((0, 5), (0, 2), (1, 0), (2, 3))]
    updates = [Update(tuple((seed, 0.5) for seed in seeds[:count])) for count in (2, 3, 4)]
    updates += [Update(), Update(((seeds[1], 0.25),))]
    with Journal.create(tmp_path, HEADER) as journal:
        for step, update in enumerate(updates):
            journal.append(StepRecord(step, (1.0,), (), update, 0.0))
    export_compact(read(tmp_path), tmp_path / "j.mezzo")
    assert [record.update for record in import_compact(tmp_path / "j.mezzo").records] == updates


@settings(max_examples=40)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_damaged_compact_journals_are_refused_in_one_line(tmp_path_factory, junk, cut):
    folder = tmp_path_factory.mktemp("damaged")
    write_journal(folder)
    export_compact(read(folder), folder / "j.mezzo")
    data = (folder / "j.mezzo").read_bytes()
    start = min(cut, len(data) - 1)
    damaged = data[:start] + junk + data[start + len(junk) + 1 :]
    if damaged == data:
        return
    (folder / "j.mezzo").write_bytes(damaged)
    with pytest.raises(JournalError) as caught:
        import_compact(folder / "j.mezzo")
    assert "\n" not in str(caught.value)


def test_journal_lines_are_plain_json(tmp_path):
    write_journal(tmp_path, steps=2)
    lines = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert lines[1]["step"] == 0
    assert len(lines[1]["losses"]) == 2
    assert lines[-1] == {"mark": 2, "digest": "abc", "crc": lines[-1]["crc"]}
