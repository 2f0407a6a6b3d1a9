"""A run in a notebook: what IPython is given to display while it trains. Skipped where IPython is not installed."""

from __future__ import annotations

import re

import pytest

import mezzo
from mezzo.reports import notebook_observer
from mezzo.reports.notebook import LiveTable

pytest.importorskip("IPython")


@pytest.fixture
def shell():
    """A real shell of IPython in this process, which collects what is displayed."""
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.display_pub = CapturingDisplayPublisher()
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture
def options(tiny_folder, tiny_data, tmp_path):
    data = {"model": tiny_folder, "task": "sst-2", "train": tiny_data, "dev": tiny_data, "space": "head"}
    return {**data, "budget": "6k", "eval_every": 1, "threads": 1, "device": "cpu", "out": str(tmp_path / "run")}


def test_only_the_kernel_of_a_notebook_shows_a_run(shell, monkeypatch):
    assert notebook_observer() is None, "a shell in a terminal cannot show HTML"
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    assert isinstance(notebook_observer(), LiveTable)
    type(shell).clear_instance()
    assert notebook_observer() is None


def test_finetune_updates_one_table_and_curve(shell, options, monkeypatch):
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    monkeypatch.setattr("mezzo.reports.notebook.INTERVAL", 0.0)
    run = mezzo.finetune(**options)
    shown = shell.display_pub.outputs
    assert len({each["transient"]["display_id"] for each in shown}) == 1
    assert [each["update"] for each in shown] == [False] + [True] * (len(shown) - 1)
    pages = [each["data"]["text/html"] for each in shown]
    assert len(pages) >= run.steps
    assert re.search(r"loss</th><td[^>]*>\d\.\d+( → ≈\d\.\d+|, not moved)", pages[-1])
    assert f"{run.curve[-1]['value']:.1%} (best {max(p['value'] for p in run.curve):.1%})" in pages[-1]
    assert pages[-1].count("<circle") == len(run.curve)
    assert any("time left" in page for page in pages)
    assert "time left" not in pages[-1]
    shell.display_pub.outputs.clear()
    assert "<svg" in run._repr_html_()
    mezzo.finetune(**{**options, "out": options["out"] + "-2"}, observe=lambda event, values: None)
    assert shell.display_pub.outputs == [], "an observer of one's own replaces it"


def test_warnings_are_shown_as_text():
    table = LiveTable()
    table._show = lambda finished: None
    table("warning", {"step": 0, "text": "<script>"})
    assert "warning: &lt;script&gt;" in table._html(finished=False)
