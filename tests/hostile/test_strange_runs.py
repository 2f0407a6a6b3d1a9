"""Runs whose files are no runs' files: pipes, holes, counts that no step has, more marks than are read again."""

from __future__ import annotations

import os

import pytest

import mezzo
from mezzo.errors import RunFailed
from mezzo.journal import content, journal
from mezzo.journal.content import read
from mezzo.replay.snapshots import NAME as SNAPSHOT
from mezzo.runs import build
from mezzo.runs.export import _explain_safetensors
from tests.hostile.files import copy_run, read_json_lines, write_journal
from tests.hostile.test_fuzz import RESUMED, solved_run  # noqa: F401


def test_snapshot_that_is_a_pipe_is_not_waited_for(valid_run, run_command, workspace):
    run = copy_run(valid_run, workspace)
    for path in (run / "snapshots").iterdir():
        if SNAPSHOT.match(path.name):
            path.unlink()
            os.mkfifo(path)
    for command in (["verify", str(run)], ["export", str(run), "adapter", "--at", "4", "--out", str(run / "adapter")]):
        assert run_command(*command)[0] == 0


@pytest.mark.parametrize(
    ("name", "value"), [("directions", 1e12), ("fitted", 1e30), ("forwards", -5), ("judged", "nan"), ("losses", [])]
)
def test_counts_that_no_step_has_are_refused(solved_run, expect_refusal, workspace, name, value):  # noqa: F811
    run = copy_run(solved_run, workspace)
    lines = read_json_lines(run / "journal.jsonl")
    step = next(line for line in lines if "notes" in line)
    (step if name == "losses" else step["notes"])[name] = value
    write_journal(run / "journal.jsonl", lines)
    assert "step 0 of the journal lacks what its method has to remember" in expect_refusal(
        "train", "--resume", str(run), *RESUMED
    )


@pytest.mark.parametrize("rate", [None, "auto"])
def test_run_whose_learning_rate_is_unknown_is_not_continued(valid_run, expect_refusal, workspace, rate):
    """A run finds it before it begins, and records what it has found."""
    run = copy_run(valid_run, workspace)
    lines = read_json_lines(run / "journal.jsonl")
    lines[0]["config"]["lr"] = rate
    write_journal(run / "journal.jsonl", lines)
    assert "does not say the learning rate" in expect_refusal("train", "--resume", str(run), "--steps", "5")


def test_failures_that_are_no_number_do_not_end_a_resumed_run(valid_run, run_command, workspace):
    run = copy_run(valid_run, workspace)
    lines = read_json_lines(run / "journal.jsonl")
    next(line for line in lines if "losses" in line)["notes"] = {"failed": "nan"}
    write_journal(run / "journal.jsonl", lines)
    code, stderr = run_command("train", "--resume", str(run), "--steps", "5", "--threads", "1", "--device", "cpu")
    assert code == 0, stderr


def test_a_run_leaves_room_for_the_marks_of_its_evaluations(tiny_run, tmp_path, monkeypatch):
    """With a snapshot after every step, a long run used to write more marks than a journal may have."""
    for module in (content, journal):
        monkeypatch.setattr(module, "MAX_NOTES", 16)
    monkeypatch.setattr(build, "MAX_EVALUATIONS", 4)
    run = mezzo.finetune(**tiny_run, steps=24, eval_every=12, snapshot_minutes=0, out=str(tmp_path / "run"))
    found = read(tmp_path / "run")
    assert len(found.marks) + len(found.events) <= 16 and found.marks[24] == run.digest
    assert mezzo.verify(run.out).ok


def test_evaluations_are_written_only_as_far_as_they_are_read(tiny_run, tmp_path, monkeypatch):
    """Another one would make the journal one that nobody reads."""
    for module in (content, journal):
        monkeypatch.setattr(module, "MAX_NOTE_BYTES", 2000)
    with pytest.raises(RunFailed, match="no room for another evaluation"):
        mezzo.finetune(**tiny_run, steps=24, eval_every=1, out=str(tmp_path / "run"))
    found = read(tmp_path / "run")
    assert 0 < found.steps < 24 and 1000 < found.note_bytes <= 2000
    assert mezzo.export(tmp_path / "run", "journal").exists()


def test_very_long_tail_is_refused_and_not_searched(valid_run, expect_refusal, workspace, monkeypatch):
    monkeypatch.setattr(content, "MAX_TAIL", 1000)
    run = copy_run(valid_run, workspace)
    with (run / "journal.jsonl").open("ab") as file:
        file.write(b"torn\n" + b"\0" * 600 + b"\n" + b"\0" * 600 + b"\n")
    assert "more follows it than a crash leaves" in expect_refusal("verify", str(run))
    assert not list(run.glob("journal.cut-at-*"))


def test_full_disk_during_an_export_is_one_line(tmp_path):
    from safetensors import SafetensorError

    from mezzo.errors import ConfigError

    with pytest.raises(ConfigError, match=r"cannot be written: .*No space left"), _explain_safetensors(tmp_path / "m"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
