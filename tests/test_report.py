"""The report: its content against the run's own numbers, and its layout and behaviour in a real browser."""

from __future__ import annotations

import fcntl
import http.client
import json
import math
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mezzo
from mezzo.cli import main
from mezzo.drawing import Chart, Series, render_svg
from mezzo.drawing.svg import ticks
from mezzo.errors import RunFailed
from mezzo.journal.header import Header
from mezzo.journal.journal import Journal
from mezzo.reports import live, make_server, read_run, sampling
from mezzo.reports.charts import comparison_charts, run_charts
from mezzo.types import StepRecord, Update
from tests.hostile.files import read_json_lines, write_journal
from tests.processes import patience, reset_signals, wait_until

HOSTILE = "<script>window.hacked = 1</script>\"'><img src=x onerror='window.hacked = 1'>&<b>"
# What no policy of a page forbids: it leads the reader to another one.
HOSTILE_META = "\"'><meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'>&<b>"
WIDTHS = {"phone": 390, "desktop": 1280}


@pytest.fixture(scope="module")
def finished(tiny_folder, tiny_data, tmp_path_factory):
    """A finished run, never changed."""
    out = tmp_path_factory.mktemp("report") / "finished"
    common = ["--model", tiny_folder, "--task", "sst-2", "--train", tiny_data, "--dev", tiny_data, "--threads", "1"]
    code = main(["train", *common, "--steps", "60", "--eval-every", "10", "--lr", "1e-3", "--out", str(out)])
    assert code == 0
    return out


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it to modify."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


class Tags(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def metrics(run: Path, event: str) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["event"] == event]


# ---- content


def test_page_has_the_numbers_of_the_run(finished, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["report", str(finished), "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    page = out.read_text()
    text = " ".join(" ".join(Tags(page).text).split())
    (result,) = metrics(finished, "result")
    (zero_shot,) = metrics(finished, "zero-shot")
    low, high = result["interval"]
    for figure in (result["value"], zero_shot["value"], zero_shot["calibrated"]):
        assert f"{figure:.1%}" in text
    assert f"{100 * low:.1f}–{high:.1%}" in text
    assert printed["runs"][0]["verdict"] == result["verdict"].split(":")[0]
    assert f"{printed['runs'][0]['verdict']}{printed['runs'][0]['reason']}" in "".join(Tags(page).text)
    assert metrics(finished, "command")[0]["text"] in text
    assert f"{result['memory_mib']:,} MiB" in text
    wrong = [json.loads(line) for line in (finished / "mistakes.jsonl").read_text().splitlines()]
    assert len(wrong) == round((1 - result["accuracy"]) * result["n_test"])
    assert all(row["fields"]["text"] in text and row["right"] != row["given"] for row in wrong)
    assert [row["sure"] for row in wrong] == sorted((row["sure"] for row in wrong), reverse=True)
    assert sum(tag == "svg" for tag, _ in Tags(page).tags) == 7
    steps = [entry["loss"] for entry in metrics(finished, "step")]
    assert read_run(finished).losses == pytest.approx(steps)


def test_page_makes_no_requests_and_has_no_scripts(finished, tmp_path):
    found = Tags(mezzo.report(finished, out=tmp_path / "p.html").read_text())
    assert not [tag for tag, _ in found.tags if tag in ("script", "iframe", "object", "img")]
    links = [value for _, attrs in found.tags for name, value in attrs.items() if name in ("src", "href")]
    assert links == ["data:,"]


def test_figures_of_dev_are_not_said_to_be_of_test(finished, tmp_path):
    page = mezzo.report(finished, out=tmp_path / "p.html").read_text()
    assert "16 train, 16 dev examples" in page, "there is no test set"
    assert "zero-shot (dev)" in page and "dev, zero-shot" in page
    assert "(test)" not in page and "test, " not in page


def test_untrusted_run_cannot_inject_code_into_the_page(run, tmp_path):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "model": HOSTILE, HOSTILE: [HOSTILE]}))
    lines = [
        {"event": "warning", "step": HOSTILE, "text": HOSTILE, "kind": HOSTILE},
        {"event": "command", "text": HOSTILE},
        {"event": "start", "train": HOSTILE, "engine": HOSTILE, "parameters": HOSTILE},
        {"event": "result", "value": 1, "interval": [HOSTILE, 1e999], "digest": HOSTILE, "tested_on": HOSTILE},
        {"event": "step", "step": [], "seconds": HOSTILE},
        {"event": ["step"]},
    ]
    hostile = "".join(json.dumps(line) + "\n" for line in lines)
    path = run / "metrics.jsonl"
    path.write_text(hostile + path.read_text() + hostile + "torn {")
    wrong = [{"fields": {HOSTILE: HOSTILE}, "right": HOSTILE, "given": HOSTILE, "sure": HOSTILE}, {"fields": 3}, {}]
    (run / "mistakes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wrong))
    path = mezzo.report(run, plots=tmp_path / "plots")
    found = Tags(path.read_text())
    assert not [tag for tag, _ in found.tags if tag in ("script", "img")]
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on")]
    assert HOSTILE in "".join(found.text)
    for plot in (tmp_path / "plots").glob("*.svg"):
        ElementTree.parse(plot)


def test_evaluations_of_an_untrusted_journal_cannot_inject_code_into_the_page(run, tmp_path):
    """They come from the journal, whose checksums anybody can compute."""
    journal = read_json_lines(run / "journal.jsonl")
    for line in journal:
        if "event" in line:
            texts = {name: HOSTILE_META for name, value in line.items() if isinstance(value, str) and name != "event"}
            line |= {**texts, "metric": HOSTILE_META, "n": HOSTILE_META, HOSTILE_META: HOSTILE_META}
    assert sum("event" in line for line in journal) > 5
    write_journal(run / "journal.jsonl", journal)
    (other := tmp_path / "other").mkdir()
    shutil.copytree(run, other / "run")
    for runs in ([run], [run, other / "run"]):
        page = mezzo.report(*runs, out=tmp_path / "page.html", plots=tmp_path / "plots").read_text()
        tags = Tags(page).tags
        policies = [attrs["http-equiv"] for tag, attrs in tags if tag == "meta" and "http-equiv" in attrs]
        assert policies == ["Content-Security-Policy"]
        assert "http-equiv=refresh" not in page, "only known metrics are named"
    for plot in (tmp_path / "plots").glob("*.svg"):
        ElementTree.parse(plot)


def test_prefix_cache_is_reported_if_the_engine_counts_it(run, tmp_path):
    assert "prefix cache" not in mezzo.report(run, out=tmp_path / "without.html").read_text()
    counted = {"event": "engine", "step": 1, "cached_tokens": 1500, "computed_tokens": 500}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(counted) + "\n")
    assert "1,500 tokens of 2,000 (75%)" in mezzo.report(run, out=tmp_path / "with.html").read_text()


def test_report_samples_long_runs(tmp_path, monkeypatch):
    """Its memory does not grow with the run; its counts are of all steps, and what it draws covers all of them."""
    header, update = Header(config={"method": "spsa", "steps": 5000}), Update(((7, 2.0**-12),))
    with Journal.create(tmp_path, header) as journal:
        for step in range(5000):
            journal.append(StepRecord(step, (1.0, 0.5), (float(step % 2),), update, 1e-3))
    lines = ({"event": "step", "step": step, "seconds": step / 10, "spent": 8 * step + 8} for step in range(5000))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sampling.Sample.__init__, "__defaults__", (100,))
    run = read_run(tmp_path)
    assert 100 <= len(run.records) <= 200 and 100 <= len(run.metrics.step_durations) <= 200
    assert run.records[-1].step > 4900 and run.records[0].step == 0
    assert (run.steps, run.moves, run.zero_slope_share, run.spent) == (5000, 5000, 0.5, 40_000)
    assert run.forwards.get(1234) == pytest.approx(8 * 1234)
    assert run_charts(run)


def test_unfinished_and_failed_runs_have_their_own_verdicts(run, tiny_folder, tiny_data, tmp_path):
    kept = [line for line in (run / "metrics.jsonl").read_text().splitlines(True) if '"result"' not in line]
    (run / "metrics.jsonl").write_text("".join(kept))
    with (run / "journal.jsonl").open() as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)  # as the process that trains it does
        assert (read_run(run).verdict.word, read_run(run).verdict.tone) == ("running", "active")
    assert read_run(run).verdict.word == "unfinished", "although its last line is new: its process is gone"
    assert f"mezzo train --resume {run}" in read_run(run).verdict.reason
    (run / "metrics.jsonl").unlink()
    assert len(run_charts(read_run(run))) == 5, (
        "the journal alone gives loss, dev, slopes, zero slopes and learning rate"
    )
    options = {"task": "sst-2", "train": tiny_data, "dev": tiny_data, "threads": 1, "space": "full", "batch_size": 8}
    with pytest.raises(RunFailed):
        mezzo.finetune(tiny_folder, **options, lr=1e10, steps=60, out=str(tmp_path / "nan"))
    failed = read_run(tmp_path / "nan")
    assert failed.verdict.word == "diverged"
    assert "smaller --lr" in failed.verdict.reason
    assert failed.skipped_steps >= 20
    assert mezzo.report(tmp_path / "nan", run, out=tmp_path / "both.html").is_file()


def test_plots_are_written_as_svg_and_png(finished, tmp_path, capsys):
    assert main(["report", str(finished), "--out", str(tmp_path / "r.html"), "--plots", str(tmp_path / "plots")]) == 0
    assert "wrote 14 plots" in capsys.readouterr().out
    for path in (tmp_path / "plots").glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
        picture = path.with_suffix(".png").read_bytes()
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(picture[16:20], "big") == 864


def test_report_errors_are_one_line(finished, tmp_path, capsys):
    other_server = make_server([finished])
    cases = {
        ("report", str(tmp_path / "none")): "is not a run folder: it has no journal.jsonl",
        (
            "report",
            str(finished),
            "--watch",
            "--port",
            str(other_server.server_port),
        ): "cannot be used: Address already in use",
        ("report", str(finished), "--out", str(finished)): "is a folder; name a file",
    }
    for arguments, message in cases.items():
        assert main(list(arguments)) == 2
        err = capsys.readouterr().err
        assert message in err
        assert len(err.strip().splitlines()) == 1
    other_server.server_close()


# ---- the method that solves


@pytest.fixture(scope="module")
def solved(tiny_folder, tiny_data, tmp_path_factory):
    """A finished run of solve, never changed."""
    out = tmp_path_factory.mktemp("report") / "solved"
    common = ["--model", tiny_folder, "--task", "sst-2", "--train", tiny_data, "--dev", tiny_data, "--threads", "1"]
    assert main(["train", *common, "--space", "head", "--budget", "9k", "--eval-every", "1", "--out", str(out)]) == 0
    return out


def test_charts_of_solve_are_over_example_forwards(solved):
    run = read_run(solved)
    charts = {chart.key: chart for chart in run_charts(run)}
    keys = ["loss", "metric", "judged-loss", "gain", "step-size", "eps", "speed", "memory"]
    assert list(charts) == keys
    assert [charts[key].x_label for key in keys[:6]] == ["example-forwards"] * 6
    spent = [entry["spent"] for entry in metrics(solved, "step")]
    notes = [record.notes for record in run.records]
    (gain,) = charts["gain"].series
    assert gain.x == spent
    assert gain.y == [each["gain"] for each in notes]
    widths = [high - low for low, high in zip(gain.low, gain.high, strict=True)]
    assert widths == pytest.approx([2 * each["gain_error"] for each in notes])
    before, after = charts["judged-loss"].series
    assert before.y == [each["before"] for each in notes]
    assert after.y == [
        each["before" if record.update.empty else "after"] for each, record in zip(notes, run.records, strict=True)
    ]
    assert any(low < high for low, high in zip(after.y, before.y, strict=True))
    fitted, dev = charts["loss"].series
    assert fitted.name == "fitted batch"
    assert fitted.x == [0, *spent[:-1]], "a batch is scored before its step"
    assert dev.x == [0, *spent]
    assert [line.name for line in charts["step-size"].series] == ["directions", "fitted examples", "judging examples"]


def test_page_of_solve_has_budget_labels_and_examples(solved, tmp_path):
    run = read_run(solved)
    assert run.planned_steps is None
    page = mezzo.report(solved, out=tmp_path / "page.html").read_text()
    text = " ".join(" ".join(Tags(page).text).split())
    (result,) = metrics(solved, "result")
    assert "example-forwards of 9,000" in text
    assert "slope zero" not in text and "learning rate" not in text
    assert "majority class" in text and "test, final, calibrated" not in text
    assert "dev, final, calibrated" in text
    assert "right label negative positive recall n" in text
    assert f"Training corrected {result['corrected']} answers and broke {result['broken']}, of 16." in text
    assert all(row["fields"]["text"] in text for row in result["examples"])
    assert page.count('class="card change"') == 5


def test_unfinished_run_of_solve_says_how_much_of_its_budget_is_spent(solved, tmp_path):
    run = Path(shutil.copytree(solved, tmp_path / "a run"))
    kept = [line for line in (run / "metrics.jsonl").read_text().splitlines(True) if '"result"' not in line]
    (run / "metrics.jsonl").write_text("".join(kept))
    spent = metrics(run, "step")[-1]["spent"]
    reason = read_run(run).verdict.reason
    place = f"step {read_run(run).steps}, {spent:,} of 9,000 example-forwards"
    assert reason == f"{place}; continue with: mezzo train --resume '{run}'"
    (run / "metrics.jsonl").unlink()
    assert read_run(run).spent == spent, "the journal knows it too"
    charts = ["loss", "metric", "judged-loss", "gain", "step-size", "eps"]
    assert [chart.key for chart in run_charts(read_run(run))] == charts


def test_runs_of_both_methods_are_compared_over_example_forwards(solved, finished, tmp_path):
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "journal.jsonl").write_bytes((finished / "journal.jsonl").read_bytes().split(b"\n")[0] + b"\n")
    charts = comparison_charts([read_run(solved), read_run(finished), read_run(begun)])
    assert [chart.x_label for chart in charts if chart.key != "compare-settings"] == ["example-forwards"] * 2
    (loss,) = (chart for chart in charts if chart.key == "compare-loss")
    assert max(loss.series[1].x) <= metrics(finished, "step")[-1]["spent"]
    text = " ".join(Tags(mezzo.report(solved, finished, out=tmp_path / "both.html").read_text()).text)
    assert "solve" in text and "spsa" in text


def test_strange_labels_and_examples_are_left_out(solved, tmp_path):
    for number, (name, value) in enumerate(
        [
            ("classes", {"labels": 3, "n": 4, "recall": HOSTILE}),
            ("classes", {"labels": ["a", HOSTILE], "n": [1, 2], "recall": [None, HOSTILE], "confusion": [[1, 2]]}),
            ("classes", {"labels": ["a"], "n": [1], "recall": [1], "confusion": [[-1e308]]}),
            ("examples", [3, {}, {"fields": HOSTILE, "before": HOSTILE, "after": [HOSTILE], "right": HOSTILE}]),
            ("verdict", [HOSTILE]),
            ("verdict", HOSTILE),
            ("verdict", ""),
            ("majority", HOSTILE),
        ]
    ):
        run = Path(shutil.copytree(solved, tmp_path / str(number)))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**metrics(run, "result")[0], name: value}) + "\n")
        found = Tags(mezzo.report(run).read_text())
        assert not [tag for tag, _ in found.tags if tag in ("script", "img")]


# ---- charts


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_ticks_are_few_and_cover_the_range(low, span):
    high = low + span
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    slack = 1e-6 * (found[1] - found[0]) + 4 * math.ulp(high)  # a tick is rounded like any number
    assert found[0] <= low + slack
    assert found[-1] >= high - slack


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300))
def test_any_finite_numbers_can_be_drawn(values):
    picture = render_svg(
        Chart("x", HOSTILE, (Series(HOSTILE, list(range(len(values))), values), Series("b", [0.0], [0.0])))
    )
    points = [line.get("points") for line in ElementTree.fromstring(picture).iter() if line.tag.endswith("polyline")]
    assert all(math.isfinite(float(number)) for pair in points for point in pair.split() for number in point.split(","))


# ---- in a browser


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium: the machine's own, else playwright's."""
    api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with api.sync_playwright() as play:
        if found is None and not Path(play.chromium.executable_path).exists():
            pytest.skip("no Chromium on this machine")
        chromium = play.chromium.launch(executable_path=found, args=[*quiet, "--disable-sync", "--no-first-run"])
        yield chromium
        chromium.close()


def open_page(browser, url: str, width: int, scheme: str = "light"):
    """The page, and a list of its errors, console messages and requests for anything but itself."""
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else problems.append(request.url))
    page.goto(url)
    return page, problems


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_layout_fits_phone_and_desktop(finished, solved, run, browser, width, scheme, tmp_path):
    for number, runs in enumerate(([finished], [solved], [finished, run, solved])):
        path = mezzo.report(*runs, out=tmp_path / f"{number}.html")
        page, problems = open_page(browser, path.as_uri(), width, scheme)
        assert problems == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing overflows to the side"
        word = page.locator(".verdict strong, td.word").first
        box = word.bounding_box()
        assert box is not None and box["y"] + box["height"] < 400, "the verdict is visible without scrolling"
        sizes = "[...document.querySelectorAll('svg')].map(s => 13 * s.getBoundingClientRect().width / s.viewBox.baseVal.width)"
        assert min(page.evaluate(sizes)) >= 9.5, "chart labels are large enough to read"
        covered = """[...document.querySelectorAll('svg text')].filter(text => {
            const box = text.getBoundingClientRect(), frame = text.closest('svg').getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > frame.right + 1; }).map(text => text.textContent)"""
        assert page.evaluate(covered) == [], "no label is cut off"
        wide = "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth).length"
        assert page.evaluate(wide) == 0 or len(runs) > 1, "a run's own tables fit without scrolling sideways"
        assert page.locator(".mistake").count() == sum(len(read_run(r).mistakes) for r in runs)
        page.close()


def test_browser_runs_no_code_of_an_untrusted_run(run, browser):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "warning", "step": 1, "text": HOSTILE}) + "\n")
    page, problems = open_page(browser, mezzo.report(run).as_uri(), 1280)
    assert page.evaluate("window.hacked") is None
    assert problems == []
    page.evaluate("document.querySelector('main').innerHTML = '<img src=x onerror=\"window.hacked = 1\">'")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None, "the content security policy blocks injected code"
    page.close()


def test_live_page_follows_a_training_run(tiny_folder, tiny_data, browser, tmp_path):
    out = tmp_path / "live"
    options = {"task": "sst-2", "train": tiny_data, "dev": tiny_data, "threads": 1, "batch_size": 4, "eval_every": 10}
    session = mezzo.open_session(tiny_folder, **options, method="spsa", steps=30, out=str(out))
    records = session.records()
    for _ in range(11):
        next(records)
    with make_server([out]) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        page, problems = open_page(browser, server.url, 1280)
        assert page.locator(".verdict strong").inner_text() == "running"
        assert re.search(r"step 11 of 30, \d+ s left", page.locator(".verdict").inner_text())
        figures = page.locator(".figures").inner_text()
        assert re.search(r"\d s\s+time left", figures)
        assert re.search(r"\d\s+(steps per second|seconds per step)", figures)
        assert re.search(r"\d\.\d{4}\s+loss", figures)
        assert page.evaluate("getComputedStyle(document.querySelector('.verdict strong')).color") == "rgb(29, 78, 216)"
        for _ in records:
            pass
        result = session.result()
        page.locator(".verdict strong", has_text=result.verdict.split(":")[0]).wait_for(timeout=1000 * patience(15))
        assert f"{result.steps} (finished)" in str(result)
        assert problems == []
        page.close()
        server.shutdown()
        thread.join()


@pytest.fixture
def server(finished):
    """The live page of a run that has finished."""
    with make_server([finished]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path: str, host: str = "localhost") -> int:
    """The status of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", path, headers={"Host": f"{host}:{server.server_port}"})
    status = connection.getresponse().status
    connection.close()
    return status


def test_live_page_is_shown_to_those_who_have_its_address(server):
    query = server.url.partition("?")[2]
    assert ask(server, f"/?{query}") == 200
    assert ask(server, f"/etc/passwd?{query}") == 404
    assert ask(server, f"/?{query}", host="elsewhere.example") == 403
    for path in ("/", "/?token=", f"/?{query}x", "/?token=%ff%ff", "/?token=é"):
        assert ask(server, quote(path, safe="/?=%&")) == 403


def test_idle_clients_of_the_live_page_are_few_and_dropped(server, monkeypatch):
    monkeypatch.setattr(live, "MAX_SECONDS", 0.5)
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(300)]
    wait_until(lambda: all(hung_up(client) for client in idle[live.MAX_CLIENTS :]))
    assert threading.active_count() <= before + live.MAX_CLIENTS
    wait_until(lambda: all(hung_up(client) for client in idle))
    wait_until(lambda: threading.active_count() <= before)
    for client in idle:
        client.close()
    assert ask(server, "/?" + server.url.partition("?")[2]) == 200


def hung_up(client: socket.socket) -> bool:
    client.settimeout(0.01)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_client_that_hangs_up_causes_no_output(server, capfd):
    query = server.url.partition("?")[2]
    for _ in range(20):
        client = socket.create_connection(("127.0.0.1", server.server_port))
        client.sendall(f"GET /?{query} HTTP/1.0\r\nHost: localhost:1\r\n\r\n".encode())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        client.close()
    assert ask(server, f"/?{query}") == 200
    assert capfd.readouterr() == ("", "")


def test_watch_stops_on_ctrl_c(finished):
    command = [sys.executable, "-m", "mezzo", "report", str(finished), "--watch"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=reset_signals)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert re.match(r"the report is at http://127\.0\.0\.1:\d+/\?token=\S{20}", line)
    process.send_signal(signal.SIGINT)
    assert process.wait(patience(30)) == 0
