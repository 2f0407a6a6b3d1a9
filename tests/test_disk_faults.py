"""Disks that fail and files that are lost or damaged: one line, a run that continues at the same weights, nothing left over."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mezzo import api
from mezzo.cli import main
from mezzo.errors import ConfigError, JournalError
from mezzo.journal import journal as journal_file
from mezzo.journal.atomic_files import write_atomically, write_folder_atomically
from mezzo.journal.content import NAME, read
from mezzo.journal.journal import NEW
from tests.disk_faults import (
    ERRORS,
    CommandTrials,
    Trials,
    begin_run,
    commands_on,
    finish_runs,
    short_run,
    start_again,
)
from tests.processes import patience


@pytest.fixture(scope="module")
def trials(tiny_folder: str, tiny_data: str, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(short_run(tiny_folder, tiny_data), tmp_path_factory.mktemp("faults"))


def test_kill_while_a_run_is_created_never_blocks_the_next_start(trials):
    """Creation is one rename. `python -m tests.disk_faults` kills the run at every call."""
    created = trials.calls.index("replace")
    for at in (created - 2, created, created + 1, len(trials.calls) // 2):
        assert not list(trials.run(at, None).problems(trials.digest)), trials.calls[at]


def test_every_kind_of_call_may_fail(trials):
    """A line, a run that can be resumed, and no leftovers. `python -m tests.disk_faults` tries every call and error."""
    for number, call in enumerate(sorted(set(trials.calls))):
        places = [at for at, name in enumerate(trials.calls) if name == call]
        trial = trials.run(places[-1 if call == "unlink" else len(places) // 2], (errno.EIO, errno.ENOSPC)[number % 2])
        assert not list(trial.problems(trials.digest)), str(trial)


def test_reading_and_closing_at_the_end_may_fail(trials):
    """After the last step there is a result to be made."""
    for call, error in (("stat", errno.EIO), ("close", errno.EIO), ("io.read", errno.EIO), ("io.close", errno.EACCES)):
        for at in [at for at, name in enumerate(trials.calls) if name == call][-2:]:
            trial = trials.run(at, error)
            assert not list(trial.problems(trials.digest)), str(trial)


def test_beginning_of_a_resume_may_fail(trials, tmp_path):
    resumes = Trials(trials.options, tmp_path / "resume", begin_run(trials.options, tmp_path / "begun"))
    for call in ("stat", "flock", "lseek", "pread", "fstat", "io.read", "io.close"):
        trial = resumes.run(resumes.calls.index(call), errno.EIO)
        assert not list(trial.problems(trials.digest)), str(trial)


def test_resume_may_be_killed_and_its_calls_may_fail(trials, tmp_path):
    resumes = Trials(trials.options, tmp_path / "resume", begin_run(trials.options, tmp_path / "begun"))
    assert resumes.digest == trials.digest
    cut, rewritten = resumes.calls.index("ftruncate"), resumes.calls.index("replace", resumes.calls.index("ftruncate"))
    for at, error in ((cut, None), (cut, errno.EIO), (rewritten, None), (rewritten, errno.EACCES)):
        trial = resumes.run(at, error)
        assert not list(trial.problems(trials.digest)), str(trial)


@pytest.fixture(scope="module")
def finished(trials: Trials, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish_runs(trials.options, tmp_path_factory.mktemp("finished") / "runs")


@pytest.mark.parametrize(
    "command", ["report", "report of two", "runs", "export adapter", "export model", "export journal"]
)
def test_commands_may_be_killed_and_their_calls_may_fail(command, trials, finished, tmp_path):
    """A line, a run that is as it was, output that is complete or absent, and no leftovers after the next call."""
    found = CommandTrials(commands_on(finished)[command], finished, tmp_path / "said")
    for number, call in enumerate(sorted(set(found.calls))):
        places = [at for at, name in enumerate(found.calls) if name == call]
        for at, error in ((places[0], ERRORS[number % 6]), (places[-1], ERRORS[-number % 6]), (places[-1], None)):
            trial = found.run(at, error)
            assert not list(trial.problems()), str(trial)
    shutil.copytree(finished / "run", tmp_path / "run")
    assert api.finetune(resume=tmp_path / "run").digest == trials.digest


def test_finished_run_is_not_called_running_where_the_disk_cannot_lock(finished, tmp_path):
    """Its report is the same."""
    found = CommandTrials(commands_on(finished)["report"], finished, tmp_path / "said")
    lock = found.calls.index("flock")
    for at, error in ((lock - 1, errno.EMFILE), (lock, errno.EIO), (lock + 1, errno.EIO)):
        trial = found.run(at, error)
        assert trial.code == 0 and not list(trial.problems()), str(trial)


def test_killed_writers_leave_nothing_half_written_and_nothing_for_long(finished, tmp_path):
    """Kills at every call between the first write and the last."""
    for command in ("report", "export adapter", "export journal"):
        found = CommandTrials(commands_on(finished)[command], finished, tmp_path / "said")
        last = len(found.calls) - found.calls[::-1].index("replace")
        for at in range(found.calls.index("write"), last + 1):
            trial = found.run(at, None)
            assert not list(trial.problems()), str(trial)


def test_files_of_living_writers_are_no_leftovers(tmp_path):
    """Two processes may write the same file, and one of them be the faster."""

    def slowly() -> Iterator[bytes]:
        yield b"first"
        code = "import sys; from pathlib import Path; from mezzo.journal.atomic_files import write_atomically\n"
        done = subprocess.run(
            [sys.executable, "-c", code + "write_atomically(Path(sys.argv[1]), b'second')", str(path)]
        )
        assert done.returncode == 0 and path.read_bytes() == b"second"
        yield b" and only"

    path = tmp_path / "file"
    write_atomically(path, slowly())
    assert path.read_bytes() == b"first and only"
    with write_folder_atomically(tmp_path / "folder") as slow:
        (slow / "a").write_bytes(b"1")
        with write_folder_atomically(tmp_path / "folder") as fast:
            (fast / "b").write_bytes(b"2")
        shutil.rmtree(tmp_path / "folder")
    assert os.listdir(tmp_path / "folder") == ["a"]
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_half_written_header_is_no_run(trials, tmp_path):
    """What a disk leaves that loses the end of a journal before it has its name."""
    options = {**trials.options, "out": str(tmp_path / "run")}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / NEW).write_bytes(b'{"format":2,"conf')
    (tmp_path / "run" / ".start.bin.7.tmp").touch()
    with pytest.raises(JournalError, match="started with --out"):
        api.finetune(resume=options["out"])
    assert start_again(options) == trials.digest
    assert not list((tmp_path / "run").glob(".*"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    with pytest.raises(ConfigError, match="not empty"):
        api.finetune(**{**options, "out": str(tmp_path / "mine")})


def test_run_that_could_not_be_read_again_does_not_begin(trials, tmp_path, monkeypatch):
    monkeypatch.setattr(journal_file, "MAX_LINE", 1000)
    with pytest.raises(JournalError, match="1,000 is the most"):
        api.finetune(**trials.options, out=str(tmp_path / "run"))
    assert not list((tmp_path / "run").iterdir())


def test_error_in_python_releases_the_run(trials, tmp_path):
    """The traceback, which a notebook keeps, refers to the session."""

    def fail(event: str, values: dict[str, Any]) -> None:
        if event == failing:
            raise ZeroDivisionError

    kept = []
    for failing in ("start", "evaluation", "result"):
        with pytest.raises(ZeroDivisionError) as caught:
            api.finetune(**trials.options, out=str(tmp_path / failing), observe=fail)
        kept.append(caught)
        assert api.finetune(resume=tmp_path / failing).digest == trials.digest
    with pytest.raises(ZeroDivisionError) as caught, api.open_session(**trials.options, out=str(tmp_path / "a")):
        raise ZeroDivisionError
    assert api.finetune(resume=tmp_path / "a").digest == trials.digest


def test_requeued_job_continues_its_run(trials, tmp_path, monkeypatch):
    options = {**trials.options, "out": str(tmp_path / "run")}
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert api.finetune(**{**options, "steps": 2}).steps == 2
    assert api.finetune(**options).digest == trials.digest
    with pytest.raises(JournalError, match="holds another run"):
        api.finetune(**{**options, "lr": 0.5})
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    with pytest.raises(JournalError, match="holds a run already"):
        api.finetune(**options)


# ---- metrics are derived


@pytest.fixture(scope="module")
def stopped(trials: Trials, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any]:
    """A run that early stopping ended."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    changes = {"steps": 60, "eval_every": 1, "patience": 3, "lr": 1e-5, "snapshot_minutes": 5}
    return {**trials.options, **changes}, api.finetune(**{**trials.options, **changes}, out=str(out))


def test_lost_metrics_change_neither_digest_nor_best_step(stopped, tmp_path):
    _, run = stopped
    assert run.stopped == "no improvement" and 0 < run.steps < 60
    lines = (Path(run.out) / "metrics.jsonl").read_text()
    (Path(run.out) / "metrics.jsonl").unlink()
    assert api.best_step(read(run.journal)) == run.best_step
    report = api.report(run.out, out=tmp_path / "r.html").read_text()
    assert f"step {run.best_step}" in report
    again = api.finetune(resume=run.out)
    assert (again.digest, again.best_step, again.stopped) == (run.digest, run.best_step, "no improvement")
    assert (again.curve, again.zero_shot, again.corrected) == (run.curve, run.zero_shot, run.corrected)
    rows = [json.loads(line) for line in (Path(run.out) / "metrics.jsonl").read_text().splitlines()]
    before = [json.loads(line) for line in lines.splitlines()]
    of = lambda rows: [(row["step"], row["value"]) for row in rows if row["event"] == "evaluation"]  # noqa: E731
    assert of(rows) == of(before)


def test_resume_keeps_the_rhythm_of_evaluations(trials, tmp_path):
    """They are due by example-forwards, and early stopping counts them."""
    options = {**trials.options, "method": "solve", "eval_every": None, "budget": "3000", "steps": None, "lr": None}
    options |= {"samples": 4, "snapshot_minutes": 5}
    whole = api.finetune(**options, out=str(tmp_path / "whole"))
    session = api.open_session(**options, out=str(tmp_path / "cut"))
    for record in session.records():
        if record.step == 2:
            break
    session.close()
    resumed = api.finetune(resume=tmp_path / "cut")
    assert len(whole.curve) > 2
    assert (resumed.curve, resumed.digest) == (whole.curve, whole.digest)


# ---- damage and repair


def damage(run: Path, line: int) -> bytes:
    """Zero a line, as a lost sector does; the sound journal."""
    data = (run / NAME).read_bytes()
    lines = data.splitlines(keepends=True)
    lines[line] = b"\0" * len(lines[line])
    (run / NAME).write_bytes(b"".join(lines))
    return data


def test_repair_cuts_before_the_damage_and_keeps_a_copy(trials, tmp_path, capsys):
    run = tmp_path / "run"
    assert api.finetune(**trials.options, out=str(run)).digest == trials.digest
    lines = damage(run, 6).splitlines(keepends=True)
    damaged = (run / NAME).read_bytes()
    for command in (["train", "--resume"], ["verify"], ["report"]):
        assert main([*command, str(run)]) == 2
        assert f"mezzo verify {run} --repair" in capsys.readouterr().err
    assert (run / NAME).read_bytes() == damaged, "nothing is cut unasked"
    assert main(["verify", str(run), "--repair", "--json"]) == 0
    shown = capsys.readouterr()
    cut = sum(map(len, lines[:6]))
    assert json.loads(shown.out)["copy"] == str(run / f"journal.cut-at-{cut}")
    assert (run / NAME).read_bytes() + (run / f"journal.cut-at-{cut}").read_bytes() == damaged
    assert api.finetune(resume=run).digest == trials.digest
    assert api.verify(run, repair=True).copy is None


@pytest.mark.parametrize("ends_in_a_hole", [True, False])
def test_repair_of_a_sparse_journal_takes_little_time_and_room(trials, tmp_path, ends_in_a_hole):
    """It may be anybody's, and of any size without having been one to send."""
    run = tmp_path / "run"
    api.finetune(**trials.options, out=str(run))
    end, far = (run / NAME).stat().st_size, 12 * 2**30
    with (run / NAME).open("r+b") as file:
        for place in (end + 5 * 2**20, end + far - 3):
            file.seek(place)
            file.write(b"abc")
        file.truncate(end + far + 7 * 2**30 * ends_in_a_hole)
    size, started = (run / NAME).stat().st_size, time.monotonic()
    verified = api.verify(run, repair=True)
    assert verified.ok and time.monotonic() - started < patience(20)
    assert (run / NAME).stat().st_size == end
    assert verified.copy.stat().st_size == size - end
    assert 512 * verified.copy.stat().st_blocks < 2**20
    with verified.copy.open("rb") as copy:
        assert copy.read(6 * 2**20) == b"\0" * (5 * 2**20) + b"abc" + b"\0" * (2**20 - 3)
        copy.seek(far - 5)
        assert copy.read(9).rstrip(b"\0") == b"\0\0abc"
    assert api.finetune(resume=run).digest == trials.digest


def test_repair_copies_all_where_the_disk_does_not_tell_holes(trials, tmp_path, monkeypatch):
    monkeypatch.setattr(journal_file, "SEEK_DATA", None)
    monkeypatch.setattr(journal_file, "SEEK_HOLE", 99)
    run = tmp_path / "run"
    api.finetune(**trials.options, out=str(run))
    end = (run / NAME).stat().st_size
    with (run / NAME).open("ab") as file:
        file.write(b"torn" + b"\0" * 3_000_000 + b"end")
    verified = api.verify(run, repair=True)
    assert verified.ok and (run / NAME).stat().st_size == end
    assert verified.copy.read_bytes() == b"torn" + b"\0" * 3_000_000 + b"end"


def test_verify_names_the_steps_it_did_not_check(trials, tmp_path):
    run = tmp_path / "run"
    api.finetune(**trials.options, out=str(run))
    lines = (run / NAME).read_bytes().splitlines(keepends=True)
    (last,) = (number for number, line in enumerate(lines) if line.startswith(b'{"step":3'))
    (run / NAME).write_bytes(b"".join(lines[: last + 1]))
    verified = api.verify(run)
    assert verified.ok and (verified.steps, verified.unchecked) == (3, 1)
    assert "step 4 comes after the last recorded digest and could not be checked" in str(verified)
    damage(run, 2)
    with pytest.raises(JournalError, match=r"records no digest yet.* is now in .*journal.cut-at-"):
        api.verify(run, repair=True)


def test_refused_resume_cuts_nothing(trials, tmp_path):
    """With the header of another run no line fits; what cannot be continued is left as it is."""
    for name, seed in (("run", 0), ("other", 1)):
        api.finetune(**trials.options, seed=seed, out=str(tmp_path / name))
    journal, other = (tmp_path / name / NAME for name in ("run", "other"))
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(other.read_bytes().splitlines(keepends=True)[0] + b"".join(lines[1:]))
    before = journal.read_bytes()
    with pytest.raises(JournalError, match="line 2 is damaged"):
        api.finetune(resume=tmp_path / "run")
    journal.write_bytes(b"".join(lines[:4])[:-9])
    torn = journal.read_bytes()
    with pytest.raises(ConfigError, match="cannot change"):
        api.finetune(resume=tmp_path / "run", lr=0.5)
    assert journal.read_bytes() == torn and len(before) > len(torn)
    assert api.finetune(resume=tmp_path / "run").digest == trials.digest
    (copy,) = (tmp_path / "run").glob("journal.cut-at-*")
    assert torn.endswith(copy.read_bytes()) and copy.stat().st_size


def test_second_creator_is_refused(tmp_path):
    from mezzo.journal.header import Header
    from mezzo.journal.journal import Journal

    with Journal.create(tmp_path, Header()), pytest.raises(JournalError, match="holds a run already"):
        Journal.create(tmp_path, Header())
    assert os.listdir(tmp_path) == [NAME]
