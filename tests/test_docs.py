"""What is written runs: the blocks of every page, every example, and what pages quote of the code."""

from __future__ import annotations

import ast
import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mezzo.cli.parser import build_parser
from mezzo.config import option_names
from mezzo.engines.hf_hub import bundled_models
from mezzo.runs import defaults

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
DATA = ROOT / "src" / "mezzo" / "bundled" / "data"
FENCE = re.compile(r"^(?P<mark>(?:<!-- not run.*-->\n+)?)```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)

NEEDS_SGLANG = ("sglang",)
GIVEN = {
    # The page speaks of the reader's own file and tokenizer.
    "tasks.md": """
from pathlib import Path
from transformers import AutoTokenizer
from mezzo import MLMConfig
from mezzo.engines.hub import locate
tokenizer = AutoTokenizer.from_pretrained(locate("mezzo/roberta-mini"))
Path("SST-2").mkdir()
rows = [f"film number {n} is {('dull', 'a joy')[n % 2]}\\t{n % 2}" for n in range(80)]
Path("SST-2/train.tsv").write_text("\\n".join(["sentence\\tlabel", *rows]) + "\\n")
"""
}
"""What a page takes as given, by its name."""

DRIVER = """
import json, subprocess, sys
page, blocks = json.load(open(sys.argv[1]))
names = {"__name__": "__main__"}
for kind, line, text in blocks:
    print(f"--- {page}:{line}", flush=True)
    if kind == "sh":
        subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)
    else:
        exec(compile("\\n" * line + text, page, "exec"), names)
"""
"""Runs a page in its folder: shell blocks one by one, Python blocks in one interpreter, tracebacks with the page's lines."""


def blocks_of(page: Path) -> list[tuple[str, int, str]]:
    """(kind, line, text) of every block that is not marked as not to be run."""
    text = page.read_text(encoding="utf-8")
    found = [m for m in FENCE.finditer(text) if not m["mark"]]
    return [(m["kind"], text.count("\n", 0, m.start("text")), m["text"]) for m in found]


def environment() -> dict[str, str]:
    """As a user has it: the commands on PATH, no network, one thread where a program listens to it."""
    kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(("MEZZO", "PYTEST"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": ""}
    return {**kept, **quiet, "PATH": path}


def run(command: list[str], folder: Path, seconds: int = 600) -> tuple[int, str, str]:
    """Exit code, and the ends of what was printed and complained."""
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=seconds)
    return done.returncode, done.stdout[-4000:], done.stderr[-4000:]


def needs_sglang(path: Path) -> bool:
    return path.stem.startswith(NEEDS_SGLANG) and importlib.util.find_spec("sglang") is None


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page, tmp_path):
    blocks = blocks_of(page)
    runnable = [block for block in blocks if block[0] in ("sh", "python")]
    if not runnable:
        pytest.skip("a page without commands")
    if needs_sglang(page):
        pytest.skip("needs the SGLang environment")
    for kind, _, text in blocks:
        if kind == "toml" and (named := re.match(r"# (\S+\.toml)\n", text)):
            (tmp_path / named[1]).write_text(text)
    given = [("python", 0, GIVEN[page.name])] if page.name in GIVEN else []
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([str(page.relative_to(ROOT)), given + runnable]))
    code, printed, complaints = run([sys.executable, "-c", DRIVER, str(plan)], tmp_path)
    assert code == 0, f"{printed}\n{complaints}"


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs(example, tmp_path):
    if needs_sglang(example):
        pytest.skip("needs the SGLang environment")
    code, printed, complaints = run([sys.executable, str(example)], tmp_path)
    assert code == 0, f"{printed}\n{complaints}"
    assert printed.strip(), "an example shows what it did"
    assert "Traceback" not in complaints


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs_and_is_kept_without_outputs(notebook, tmp_path):
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    plan = tmp_path / "plan.json"
    blocks = [("python", 0, "".join(cell["source"])) for cell in cells]
    plan.write_text(json.dumps([str(notebook.relative_to(ROOT)), blocks]))
    code, printed, complaints = run([sys.executable, "-c", DRIVER, str(plan)], tmp_path)
    assert code == 0, f"{printed}\n{complaints}"


# --- what pages say of the code


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", *DATA.glob("README.md")]:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, anchor = target.partition("#")
            if "://" in target:
                continue
            path = (page.parent / name).resolve() if name else page
            assert path.exists(), f"{page.name} links to {target}"
            if anchor and path.suffix == ".md":
                assert anchor in anchors(path), f"{page.name} links to {target}, which has no such heading"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def literals() -> list[str]:
    """Every string constant of the package; the fixed parts of f-strings one by one."""
    found = []
    for path in (ROOT / "src" / "mezzo").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        found += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [" ".join(text.split()) for text in found]


def test_quoted_messages_are_the_programs_own():
    known = literals()

    def said(fragment: str) -> bool:
        return any(fragment.strip(" {}:;.") in text for text in known)

    quoted = [text for kind, _, text in blocks_of(ROOT / "docs" / "troubleshooting.md") if kind == "text"]
    lines = [line for text in quoted for line in text.splitlines()]
    assert len(lines) > 20
    for fragment in (part for line in lines for part in line.split("…")):
        # A message may be put together from two parts.
        spaces = [place for place, sign in enumerate(fragment) if sign == " "]
        parts = any(said(fragment[:place]) and said(fragment[place:]) for place in spaces)
        assert said(fragment) or parts, f"no message of the program says {fragment!r}"


def options_of(parser: Any) -> set[str]:
    commands = next(action for action in parser._actions if action.dest == "command").choices.values()
    return {name for each in (parser, *commands) for action in each._actions for name in action.option_strings}


ELSEWHERE = {
    "--nproc-per-node",
    "--max-restarts",
    "--head",
    "--local-dir",
    "--editable",
    "--constraint",
    "--fix",
    "--quiet",
    "--logdir",
}
"""Options of other programs that pages mention."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_that_pages_name_exist(page):
    if page.stem in ("log", "results", "sglang"):
        pytest.skip("commands of other programs")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text(encoding="utf-8")))
    assert named <= options_of(build_parser()) | ELSEWHERE, named - options_of(build_parser())


def test_the_tables_of_defaults_and_of_what_may_change_are_complete():
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    for (family, space), values in defaults.PUBLISHED.items():
        row = re.search(rf"^\| {family} \| {space} \| (\S+) \| (\S+) \| (\S+) \|$", text, re.M)
        assert row, f"no row for {family} {space}"
        assert [float(cell) for cell in row.groups()] == [values[name] for name in ("lr", "eps", "weight_decay")]
    for dtype, noise in defaults.NOISE.items():
        assert f"\n| {dtype} | {noise} |\n" in text
    for model in bundled_models():
        for space, values in ((s, v) for s, v in defaults.shipped(model).items() if isinstance(v, dict)):
            mark = " (default)" if defaults.shipped(model).get("space") == space else ""
            row = re.search(rf"^\| `{model}` \| {re.escape(space + mark)} \|(.*)\|$", text, re.M)
            assert row, f"no row for {model} {space}"
            lr, eps, decay, schedule, batch, steps = (cell.strip() for cell in row[1].split("|"))
            assert (float(lr), float(eps), float(decay)) == (values["lr"], values["eps"], values["weight_decay"])
            assert (schedule, int(batch), int(steps)) == (values["schedule"], values["batch_size"], values["steps"])
    journal = (ROOT / "docs" / "journal.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)`", journal[journal.index("may change:") : journal.index("A changed")])
    assert sorted(named) == sorted(option_names(resumable=True))


def test_every_page_is_in_the_navigation_once():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^  - [^:#]+: (\S+\.md)$", settings[settings.index("nav:") :], re.M)
    assert sorted(listed) == sorted(page.name for page in PAGES if page.parent.name == "docs")


def test_the_figures_are_those_of_their_script():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts" / "figures.py")
    assert spec and spec.loader
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    drawn = {f"{name}.svg": str(make()) for name, make in figures.FIGURES.items()}
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "figures").iterdir()}
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"](figures/{name})" in pages for name in drawn)


def test_the_layers_of_the_design_page_are_those_of_the_contract():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    pages = [text for kind, _, text in blocks_of(ROOT / "docs" / "design.md") if kind == "text"]
    shown = [re.split(r"\s{2,}", line)[0] for line in pages[0].splitlines()]
    assert shown == [line.replace("mezzo.", "") for line in contract]


def rows_of(name: str) -> dict[str, list[dict[str, str]]]:
    read = lambda path: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]  # noqa: E731
    return {split: read(DATA / name / f"{split}.jsonl") for split in ("train", "dev", "test")}


def test_the_data_card_says_what_is_there():
    card = (DATA / "README.md").read_text(encoding="utf-8")
    spec = importlib.util.spec_from_file_location("split_data", ROOT / "scripts" / "split_data.py")
    assert spec and spec.loader
    split_data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(split_data)
    for name in ("reviews", "pairs"):
        splits = rows_of(name)
        assert f"{' | '.join(str(len(rows)) for rows in splits.values())} |" in card
        assert all(split_data.split_of(row) == split for split, rows in splits.items() for row in rows)
        every = [row for rows in splits.values() for row in rows]
        assert len({json.dumps(row) for row in every}) == len(every)
        for label, count in collections.Counter(row["label"] for row in every).items():
            assert f"{label} {count}" in card
    reviews = [row for rows in rows_of("reviews").values() for row in rows]
    negation = r"\b(not|no|never|nothing|nobody|none|neither|nor|without|hardly|barely)\b|n't"
    patterns = {"nothing": r"\bnothing\b", "no": r"\bno\b", "not": r"\bnot\b|n't", "balanced": negation}
    for word, pattern in patterns.items():
        found = collections.Counter(row["label"] for row in reviews if re.search(pattern, row["text"], re.I))
        assert re.search(rf"{word}.{{0,40}} {found['negative']} .{{0,20}}{found['positive']}", card), (word, found)
