"""Sweeps over seeds and options, the list of runs, and the page that compares them."""

from __future__ import annotations

import csv
import json
import re
import shutil
import statistics
from pathlib import Path

import pytest

import mezzo
from mezzo.cli import main
from mezzo.many_runs import open_sweep
from mezzo.reports.charts import comparison_charts
from mezzo.reports.comparison import Setting, compare
from tests.test_report import HOSTILE, WIDTHS, Tags, browser, open_page  # noqa: F401 - a fixture

GRID = ("--seeds", "13,21", "--sweep", "lr=1e-3,1e-1")
NAMES = ["lr=0.001,seed=13", "lr=0.001,seed=21", "lr=0.1,seed=13", "lr=0.1,seed=21"]
RUN_FILES = ("journal.jsonl", "metrics.jsonl", "config.json")


def command(tiny_run, out: Path, *more: str) -> list[str]:
    options = {name: value for name, value in tiny_run.items() if name != "lr"} | {"steps": 4, "eval_every": 2}
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["train", *flags, "--out", str(out), *more]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for name in RUN_FILES for path in folder.glob(f"*/{name}")}


@pytest.fixture(scope="module")
def swept(tiny_run, tmp_path_factory):
    """A finished sweep, never changed."""
    out = tmp_path_factory.mktemp("sweep") / "swept"
    assert main(command(tiny_run, out, *GRID)) == 0
    return out


def results(folder: Path) -> dict[str, dict]:
    lines = {path.parent.name: path.read_text().splitlines() for path in folder.glob("*/metrics.jsonl")}
    return {name: json.loads(each[-1]) for name, each in lines.items()}


def test_every_combination_is_a_run_and_the_table_has_mean_and_deviation(swept, capsys):
    found = results(swept)
    assert sorted(found) == NAMES
    assert main(["report", str(swept), "--json"]) == 0
    printed = capsys.readouterr().err
    figures = json.loads((swept / "report.json").read_text())
    for setting in figures["settings"]:
        lr = setting["options"]["lr"]
        values = [found[f"lr={lr},seed={seed}"]["value"] for seed in (13, 21)]
        assert setting["values"] == values
        assert setting["mean"] == pytest.approx(statistics.fmean(values))
        assert setting["deviation"] == pytest.approx(statistics.stdev(values))
        assert f"{100 * setting['mean']:.1f} ± {100 * setting['deviation']:.1f}%" in printed
    means = [setting["mean"] for setting in figures["settings"]]
    assert means == sorted(means, reverse=True)
    with (swept / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["lr"], row["seed"]) for row in rows] == [
        ("0.001", "13"),
        ("0.001", "21"),
        ("0.1", "13"),
        ("0.1", "21"),
    ]
    assert [float(row["value"]) for row in rows] == [found[name]["value"] for name in NAMES]
    assert list(compare([swept]).differing) == ["lr"], "only what differs has a column"
    mean, *_ = comparison_charts(compare([swept]).runs)
    assert mean.key == "compare-settings" and len(mean.series) == 2 and len(mean.series[0].low) == 3
    assert {series.name for series in mean.series} == {"lr=0.001", "lr=0.1"}
    assert Setting({"method": "adam", "budget": "", "lr": "0.1"}, ()).name == "adam, –, 0.1"


def test_runs_that_look_alike_are_told_apart(swept, tmp_path):
    """Folders of the same name, long options that differ in their middle, and the same run twice, which is no second seed."""
    for name in "abc":
        run = Path(shutil.copytree(swept / NAMES[0], tmp_path / name / "run"))
        config = json.loads((run / "config.json").read_text())
        config["task"] = json.dumps({"name": "mine", "template": "x" * 80 + ("y" if name == "c" else "x") + "x" * 80})
        config["method"] = "solve" if name == "c" else "spsa"
        (run / "config.json").write_text(json.dumps(config))
    found = compare([tmp_path])
    assert [run.name for run in found.runs] == ["a/run", "b/run", "c/run"]
    assert sorted((len(each.runs), each.deviation) for each in found.settings) == [(1, None), (2, None)]
    assert "±" not in str(found)
    assert found.differing["task"] == ["mine (1)", "mine (1)", "mine (2)"]
    page = mezzo.report(tmp_path, out=tmp_path / "page.html").read_text()
    assert len(re.findall("<th[^>]*>method<", page)) == 2, "once by setting, once by run"


def test_sweep_that_was_killed_goes_on_and_repeats_nothing(swept, tiny_run, tmp_path, capsys):
    """Killed in the second run: the first stays as it is, the second ends with the weights of an uninterrupted one."""

    class Killed(BaseException):
        pass

    def kill(event: str, values: dict) -> None:
        if event == "step" and values["step"] == 2:
            raise Killed

    out = tmp_path / "again"
    options = {**tiny_run, "steps": 4, "eval_every": 2, "out": str(out)}
    del options["lr"]
    sweep = open_sweep(seeds="13,21", grid=["lr=1e-3,1e-1"], **options)
    first, second = sweep.points[:2]
    assert sweep.train(first, lambda event, values: None) == "finished"
    with pytest.raises(Killed):
        sweep.train(second, kill)
    before = contents(out)
    assert [number for number, _ in sweep.unfinished()] == [2, 3, 4]
    assert main(["train", "--resume", str(out)]) == 0
    assert "run 2 of 4: lr=0.001, seed=21" in capsys.readouterr().err
    after = contents(out)
    assert all(after[path] == data for path, data in before.items() if path.parent.name == NAMES[0])
    digests = {name: result["digest"] for name, result in results(out).items()}
    assert digests == {name: result["digest"] for name, result in results(swept).items()}
    assert main(command(tiny_run, out, *GRID)) == 0, "nothing is left to do"
    assert contents(out) == after
    assert "run 1 of" not in capsys.readouterr().err
    assert main(command(tiny_run, out, "--seeds", "13,21,42", "--sweep", "lr=1e-3", "--steps", "5")) == 2
    assert "holds a sweep with other options" in capsys.readouterr().err
    more = mezzo.sweep(seeds=[42], grid={"lr": [1e-3]}, **options)
    assert [len(setting.runs) for setting in more.settings] == [3, 3], "a sweep can be given more values"


def test_gradient_run_that_was_cut_short_starts_again_beside_what_it_had_done(tiny_run, tmp_path):
    def stop(event: str, values: dict) -> None:
        if event == "step":
            raise KeyboardInterrupt

    options = {**tiny_run, "method": "adam", "steps": 2, "out": str(tmp_path / "s")}
    sweep = open_sweep(seeds="1", **options)
    with pytest.raises(KeyboardInterrupt):
        sweep.train(sweep.points[0], stop)
    found = mezzo.sweep(resume=tmp_path / "s")
    assert [run.steps for run in found.runs] == [2] and found.runs[0].metrics.final
    assert len(list((tmp_path / "s" / ".unfinished").glob("*/journal.jsonl"))) == 1


def test_sweep_of_a_stranger_does_not_decide_what_runs_or_is_contacted(swept, tmp_path, capsys):
    stored = json.loads((swept / "sweep.json").read_text())
    (tmp_path / "s").mkdir()
    for part, value in (("options", "os:system"), ("grid", ["os:system"])):
        changed = {**stored, part: {**stored[part], "objective": value}}
        (tmp_path / "s" / "sweep.json").write_text(json.dumps(changed))
        assert main(["train", "--resume", str(tmp_path / "s")]) == 2
        assert "objective is not taken from a file, which may come from a stranger" in capsys.readouterr().err
    (tmp_path / "s" / "sweep.json").write_text("[1]")
    assert main(["train", "--resume", str(tmp_path / "s")]) == 2
    assert "sweep.json is damaged" in capsys.readouterr().err


MISTAKES = {
    ("--seeds", "1,1"): "--seed has the value 1 twice in the sweep",
    ("--seeds", "1,x"): "seed must be a whole number, not 'x'",
    ("--sweep", "lr"): "--sweep is an option with its values, such as lr=1e-6,1e-5, not 'lr'",
    ("--sweep", "lrr=1,2"): "unknown option 'lrr'; did you mean 'lr'?",
    ("--sweep", "lr=1e-3,-1"): "lr must be at least 0, not -1.0",
    ("--sweep", "steps=1,2"): "steps is given twice: once for all runs, and once in the sweep",
    ("--sweep", "out=a,b"): "every run of a sweep has a folder of its own",
    ("--sweep", "lr=1,2", "--sweep", "lr=3"): "--sweep names lr twice",
    ("--sweep", "words=negative=bad,positive=good;negative=dull"): "positive",
    ("--sweep", "tp=1,2"): "--tp belongs to the sglang engine",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_in_a_sweep_is_one_line_and_leaves_nothing(flags, tiny_run, tmp_path, capsys):
    assert main(command(tiny_run, tmp_path / "out", *flags)) == 2
    err = capsys.readouterr().err
    assert MISTAKES[flags] in err.splitlines()[-1], err
    assert not (tmp_path / "out").exists()


def test_untrusted_runs_cannot_inject_code_into_the_comparison(swept, tmp_path):
    folder = Path(shutil.copytree(swept, tmp_path / HOSTILE.replace("/", "")))
    file = folder / NAMES[0] / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model": HOSTILE, "seed": HOSTILE, HOSTILE: [HOSTILE]}))
    page = mezzo.report(folder, out=tmp_path / "page.html").read_text()
    found = [tag for tag, _ in Tags(page).tags]
    assert found.count("script") == 1 and "img" not in found
    assert HOSTILE[:40] in "".join(Tags(page).text), "it is shown as text"


def test_runs_are_listed_with_what_became_of_them(swept, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "there is no folder runs here" in capsys.readouterr().out
    damaged = Path(shutil.copytree(swept, tmp_path / "runs" / "mine")) / NAMES[0] / "journal.jsonl"
    damaged.write_text("not a journal\n")
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["run", "task", "space"] and len(lines) == 5
    assert "unreadable" in lines[1] and f"runs/mine/{NAMES[1]}  sst-2  lora" in lines[2]
    assert main(["report", "runs", "--out", "page.html"]) == 0
    out, err = capsys.readouterr()
    assert (
        f"{NAMES[1]}: " in out and f"warning: left out: {damaged.relative_to(tmp_path)}: the header is missing" in err
    )
    assert main(["report", str(damaged.parent)]) == 2, "nor is it left out where it is what is asked for"
    assert main(["runs", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_page_of_several_runs_sorts_filters_and_shows_figures(swept, browser, width, tmp_path):  # noqa: F811
    url = mezzo.report(swept, out=tmp_path / "page.html").as_uri()
    page, problems = open_page(browser, url, width, "dark")
    rows = "table.sortable >> nth=1 >> tr[data-series]:visible >> td:first-child"
    shown = lambda: page.locator(rows).all_text_contents()  # noqa: E731
    assert shown() == NAMES
    column = page.locator("table.sortable >> nth=1 >> th", has_text="seed")
    column.click()
    assert shown()[:2] == [NAMES[1], NAMES[3]]
    column.click()
    assert shown()[:2] == [NAMES[0], NAMES[2]]
    page.locator("input.filter").fill("LR=0.1 13")
    assert shown() == [NAMES[2]]
    visible = "g.series:visible"
    assert set(page.locator(visible).evaluate_all("all => all.map(g => g.dataset.series)")) >= {NAMES[2]}
    assert NAMES[0] not in page.locator(visible).evaluate_all("all => all.map(g => g.dataset.series)")
    page.locator("input.filter").fill("")
    for chart in page.locator("main > .charts .chart").all():
        point = chart.locator("circle").first
        point.scroll_into_view_if_needed()
        point.hover(force=True)
        assert point.locator("title").text_content() in page.locator(".tip").text_content()
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing is cut off at the side"
    assert problems == []
    page.close()
