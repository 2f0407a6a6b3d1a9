"""The design page shows the code as it is: quoted functions, layers, and the files it names."""

from __future__ import annotations

import inspect
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

from mezzo.method.method import EstimatorMethod
from mezzo.runs.trainer import MeZOTrainer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "design.md").read_text()
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("function", [MeZOTrainer.one_step, EstimatorMethod.step], ids=["one_step", "step"])
def test_quoted_functions_are_the_code(function):
    assert textwrap.dedent(inspect.getsource(function)) in PAGE


def test_one_step_fits_a_screen():
    assert len(inspect.getsource(MeZOTrainer.one_step).splitlines()) <= 24


def test_listed_layers_are_the_contract():
    block = re.search(r"```text\n(cli .*?)```", PAGE, re.S)[1]
    listed = [set(re.split(r"\s{2,}", line)[0].split(" | ")) for line in block.splitlines()]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert listed == [{name.strip().removeprefix("mezzo.") for name in line.split("|")} for line in layers]
    assert len(layers) <= 12


def test_every_package_is_in_a_layer():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    named = {name.strip().removeprefix("mezzo.") for line in layers for name in line.split("|")}
    source = ROOT / "src" / "mezzo"
    there = {path.stem for path in source.glob("*.py")} | {path.parent.name for path in source.glob("*/__init__.py")}
    assert there - {"__init__", "__main__"} == named


@pytest.mark.parametrize("page", ["design", "guide"])
def test_named_files_exist(page):
    text = PAGE if page == "design" else GUIDE
    names = [name for quoted in re.findall(r"`([\w/{},.]+/[\w/{},.]*)`", text) for name in expand(quoted)]
    assert len(names) > 15
    for name in names:
        places = (ROOT / name, ROOT / "src" / "mezzo" / name, ROOT / "src" / "mezzo" / "engines" / "torch" / name)
        assert any(place.exists() for place in places) or name.startswith("."), name


def expand(name: str) -> list[str]:
    """`a/{b,c}.py` is `a/b.py` and `a/c.py`."""
    braces = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    return [braces[1] + each + braces[3] for each in braces[2].split(",")] if braces else [name]


def test_every_extension_touches_at_most_three_files():
    table = GUIDE[GUIDE.index("| to add |") : GUIDE.index("A method that is not")]
    rows = re.findall(r"^\| an? (.+?) \| (.+) \|$", table, re.M)
    assert len(rows) >= 10
    for what, files in rows:
        assert 1 <= len(re.findall(r"`[\w/]+(?:\.py|/)`", files)) <= 3, what
