"""The documentation is true: commands and code on every page run, examples run, and pages agree with the code they describe."""

from __future__ import annotations

import ast
import collections
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mezzo
from mezzo import api
from mezzo.cli.parser import build_parser, given_options
from mezzo.config import option_names
from mezzo.engines.hf_hub import bundled_models
from mezzo.runs import defaults
from mezzo.runs.sweep import parse_grid
from mezzo.tasks import get_task
from tests.processes import patience

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
DATA = ROOT / "src" / "mezzo" / "bundled" / "data"
FENCE = re.compile(r"^(?P<mark>(?:<!-- not run.*-->\n+)?)```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)

NEEDS_SGLANG = ("sglang",)
SETUP = {
    # The page uses the reader's own file and tokenizer.
    "tasks.md": """
from pathlib import Path
from transformers import AutoTokenizer
from mezzo import MLMConfig
from mezzo.engines.hf_hub import locate
tokenizer = AutoTokenizer.from_pretrained(locate("mezzo/roberta-mini"))
Path("SST-2").mkdir()
rows = [f"film number {n} is {('dull', 'a joy')[n % 2]}\\t{n % 2}" for n in range(80)]
Path("SST-2/train.tsv").write_text("\\n".join(["sentence\\tlabel", *rows]) + "\\n")
"""
}
"""Code that runs before the blocks of a page, by page name."""

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
"""Runs a page in its folder: shell blocks one by one, Python blocks in one interpreter, with the page's lines in tracebacks."""

KERNEL = """
import json, sys
from collections import defaultdict
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
shell.kernel, shell.display_pub = object(), CapturingDisplayPublisher()
shell.displayhook.write_format_data = lambda data, _=None: shell.display_pub.publish(data)
for cell in json.load(open(sys.argv[1])):
    shell.run_cell(cell).raise_error()
shown = defaultdict(list)
for output in shell.display_pub.outputs:
    for kind, data in output["data"].items():
        shown[kind].append(data if isinstance(data, str) else "bytes")
print("\\n" + json.dumps(shown))
"""
"""Runs the cells of a notebook in a shell of IPython, as a kernel does, and prints what was displayed."""


def blocks_of(page: Path) -> list[tuple[str, int, str]]:
    """(kind, line, text) of every code block that is not marked as not run."""
    text = page.read_text(encoding="utf-8")
    blocks = [match for match in FENCE.finditer(text) if not match["mark"]]
    return [(block["kind"], text.count("\n", 0, block.start("text")), block["text"]) for block in blocks]


def user_environment() -> dict[str, str]:
    """The environment of a user: mezzo on PATH, no network, one thread."""
    inherited = {key: value for key, value in os.environ.items() if not key.upper().startswith(("MEZZO", "PYTEST"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', '')}"
    fixed = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": ""}
    return {**inherited, **fixed, "PATH": path}


def run(command: list[str], folder: Path, seconds: int = 600) -> tuple[int, str, str]:
    """Exit code and the ends of standard output and standard error."""
    done = subprocess.run(
        command, cwd=folder, env=user_environment(), capture_output=True, text=True, timeout=patience(seconds)
    )
    return done.returncode, done.stdout[-200_000:], done.stderr[-4000:]


def run_blocks(source: Path, blocks: list[tuple[str, int, str]], folder: Path) -> tuple[int, str]:
    """The exit code, and everything that was printed."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps([str(source.relative_to(ROOT)), blocks]))
    code, out, errors = run([sys.executable, "-c", DRIVER, str(plan)], folder)
    return code, f"{out}\n{errors}"


def lacks_sglang(path: Path) -> bool:
    return path.stem.startswith(NEEDS_SGLANG) and importlib.util.find_spec("sglang") is None


def import_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What the pages that a newcomer reads first should print about the text they ask about.
FIRST_ANSWERS = {
    "README.md": "Why is the sky blue.*prediction.: .reason",
    "index.md": "Who taught you to whistle.*prediction.: .person",
}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_a_page_run(page, tmp_path):
    blocks = blocks_of(page)
    runnable = [block for block in blocks if block[0] in ("sh", "python")]
    if not runnable:
        pytest.skip("the page has no commands")
    if lacks_sglang(page):
        pytest.skip("needs the SGLang environment")
    for kind, _, text in blocks:
        if kind == "toml" and (named := re.match(r"# (\S+\.toml)\n", text)):
            (tmp_path / named[1]).write_text(text)
    setup = [("python", 0, SETUP[page.name])] if page.name in SETUP else []
    code, printed = run_blocks(page, setup + runnable, tmp_path)
    assert code == 0, printed
    assert re.search(FIRST_ANSWERS.get(page.name, ""), printed), "a reader's first prediction should be right"


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_runs_and_prints_its_result(example, tmp_path):
    if lacks_sglang(example):
        pytest.skip("needs the SGLang environment")
    code, out, errors = run([sys.executable, str(example)], tmp_path)
    assert code == 0, f"{out}\n{errors}"
    assert out.strip()
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_runs_and_is_stored_without_outputs(notebook, tmp_path):
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    (tmp_path / "cells.json").write_text(json.dumps(["".join(cell["source"]) for cell in cells]))
    code, out, errors = run([sys.executable, "-c", KERNEL, "cells.json"], tmp_path)
    assert code == 0, f"{out}\n{errors}"
    shown = json.loads(out.splitlines()[-1])
    assert any("<svg" in page for page in shown["text/html"]), "the curve while it trains"
    assert shown["image/png"], "the plot"


# --- agreement of pages and code


def test_readme_is_short():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 120] == []


def test_readme_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\S+)", README.read_text(encoding="utf-8"), re.M)
    assert {"demo", "test"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def test_links_lead_to_files_and_headings():
    cards = (ROOT / "src" / "mezzo" / "bundled").rglob("README.md")
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *cards]:
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


def resolve(path: str) -> Any:
    """The object at a dotted path, imported as far as there are modules."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            value = getattr(value, name)
        return value
    raise AssertionError(f"{path} cannot be imported")


def test_names_of_the_api_page_exist():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    entries = re.findall(r"^::: (\S+)(?:\n    options: \{ members: \[([^\]]*)\])?", text, re.M)
    assert len(entries) > 20
    for path, members in entries:
        documented = resolve(path)
        for member in filter(None, members.split(", ")):
            assert hasattr(documented, member), f"{path} has no {member}"


def test_public_names_are_on_the_api_page():
    documented = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(), re.M)}
    undocumented = {
        "__version__",
        "MLMConfig",
        "MezzoError",
        "RunConfig",
        "Task",
    }  # tables, the errors module, other pages
    assert set(mezzo.__all__) - undocumented <= documented


def test_imports_on_pages_resolve():
    for page in PAGES:
        for module, names in re.findall(
            r"^from (mezzo[\w.]*) import ([\w, ]+)$", page.read_text(encoding="utf-8"), re.M
        ):
            for name in names.split(", "):
                assert resolve(f"{module}.{name}") is not None, page.name


def string_literals() -> list[str]:
    """Every string constant of the package; the fixed parts of f-strings one by one."""
    literals = []
    for path in (ROOT / "src" / "mezzo").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        literals += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [" ".join(text.split()) for text in literals]


def test_quoted_messages_are_in_the_source():
    literals = string_literals()

    def in_source(fragment: str) -> bool:
        return any(fragment.strip(" {}:;.") in text for text in literals)

    quoted = [text for kind, _, text in blocks_of(DOCS / "troubleshooting.md") if kind == "text"]
    lines = [line for text in quoted for line in text.splitlines()]
    assert len(lines) > 20
    for fragment in (part for line in lines for part in line.split("…")):
        # A message may be composed of two parts.
        spaces = [place for place, sign in enumerate(fragment) if sign == " "]
        composed = any(in_source(fragment[:place]) and in_source(fragment[place:]) for place in spaces)
        assert in_source(fragment) or composed, f"no message of the program contains {fragment!r}"


def options_of(parser: Any) -> set[str]:
    commands = next(action for action in parser._actions if action.dest == "command").choices.values()
    return {name for each in (parser, *commands) for action in each._actions for name in action.option_strings}


def options_of_benchmarks(text: str) -> set[str]:
    """The options of the benchmarks whose commands a page shows."""
    sources = [(ROOT / path).read_text() for path in set(re.findall(r"benchmarks/\w+\.py", text))]
    return {name for source in sources for name in re.findall(r'"(--[a-z][a-z-]+)"', source)}


OTHER_PROGRAMS = {
    "--nproc-per-node",
    "--max-restarts",
    "--head",
    "--local-dir",
    "--editable",
    "--enable-custom-logit-processor",
    "--constraint",
    "--fix",
    "--quiet",
    "--logdir",
}
"""Options of other programs that pages mention."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_on_pages_exist(page):
    if page.stem in ("log", "methods", "results", "serving", "sglang"):
        pytest.skip("the page has commands of other programs")
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert named <= options_of(build_parser()) | options_of_benchmarks(text) | OTHER_PROGRAMS


def test_commands_and_tasks_of_the_paper_page_exist():
    text = (DOCS / "paper.md").read_text(encoding="utf-8")
    commands = [block for kind, _, block in blocks_of(DOCS / "paper.md") if kind == "text"]
    lines = [line for block in commands for line in block.replace("\\\n", " ").splitlines()]
    assert len(lines) == 3
    for line in lines:
        options = build_parser().parse_args(line.split()[1:])
        parse_grid(getattr(options, "seeds", None), getattr(options, "sweep", None) or ())
        api.resolve(given_options(options))
    rows = re.findall(r"^\| full .*|^\| LoRA .*|^\| prefix .*|^\| fine-tuning .*", text, re.M)
    assert len(rows) == 7
    for row in rows:
        options, grid = (" ".join(re.findall(r"`(--[^`]*\d[^`]*)`", cell)) for cell in row.split("|")[2:4])
        given = build_parser().parse_args(["train", *options.split(), *grid.split()])
        for lr in parse_grid(None, given.sweep)["lr"]:
            api.resolve({"method": "spsa", **given_options(given), "lr": lr})
    named = re.findall(r"^\| [\w-]+ \| `([\w-]+)` \| [\d.]+ \|", text, re.M)
    assert [get_task(name, "causal").name for name in named] == named and len(named) == 11


def test_tables_of_defaults_are_complete():
    text = (DOCS / "choosing.md").read_text(encoding="utf-8")
    for (family, space), values in defaults.PUBLISHED.items():
        row = re.search(rf"^\| {family} \| {space} \| (\S+) \| (\S+) \|$", text, re.M)
        assert row, f"no row for {family} {space}"
        assert [float(cell) for cell in row.groups()] == [values[name] for name in ("eps", "weight_decay")]
    for dtype, noise in defaults.NOISE.items():
        assert f"\n| {dtype} | {noise} |\n" in text
    for model in bundled_models():
        settings = defaults.model_settings(model)
        for space, values in ((name, value) for name, value in settings.items() if isinstance(value, dict)):
            mark = " (default)" if settings.get("space") == space else ""
            row = re.search(rf"^\| `{model}` \| {re.escape(space + mark)} \|(.*)\|$", text, re.M)
            assert row, f"no row for {model} {space}"
            lr, eps, decay, schedule, batch, steps = (cell.strip() for cell in row[1].split("|"))
            assert (float(lr), float(eps), float(decay)) == (values["lr"], values["eps"], values["weight_decay"])
            assert (schedule, int(batch), int(steps)) == (values["schedule"], values["batch_size"], values["steps"])


def test_list_of_resumable_options_is_complete():
    journal = (DOCS / "journal.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)`", journal[journal.index("may change:") : journal.index("A changed")])
    assert sorted(named) == sorted(option_names(resumable=True))


def test_every_guarantee_names_tests_that_exist():
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    rows = re.findall(r"^\| (?!promise|-)(.+) \| (.+) \|$", (DOCS / "guarantees.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) > 15
    for promise, shown in rows:
        names = re.findall(r"`(test_\w+)`", shown)
        assert names, promise
        for name in names:
            assert f"def {name}(" in tests, name


def test_every_page_is_in_the_navigation_once():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^      - [^:#]+: (\S+\.md)$", settings[settings.index("nav:") :], re.M)
    groups = re.findall(r"^  - ([^:#]+):$", settings[settings.index("nav:") :], re.M)
    assert groups == ["Start", "Guides", "Reference", "Explanation"]
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


def test_figures_are_those_of_their_script():
    figures = import_script("figures")
    drawn = {f"{name}.svg": str(draw()) for name, draw in figures.FIGURES.items()}
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "figures").iterdir()}
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"](figures/{name})" in pages for name in drawn)


def read_splits(name: str) -> dict[str, list[dict[str, str]]]:
    paths = {split: DATA / name / f"{split}.jsonl" for split in ("train", "dev", "test")}
    return {
        split: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for split, path in paths.items()
    }


def test_data_card_describes_the_data():
    card = " ".join((DATA / "README.md").read_text(encoding="utf-8").split())
    split_data = import_script("split_data")
    for name in ("questions", "reviews", "pairs"):
        splits = read_splits(name)
        assert f"{' | '.join(str(len(rows)) for rows in splits.values())} |" in card
        assert all(split_data.split_of(row) == split for split, rows in splits.items() for row in rows)
        every = [row for rows in splits.values() for row in rows]
        assert len({json.dumps(row) for row in every}) == len(every)
        for label, count in collections.Counter(row["label"] for row in every).items():
            assert f"{label} {count}" in card
    reviews = [row for rows in read_splits("reviews").values() for row in rows]
    negation = r"\b(not|no|never|nothing|nobody|none|neither|nor|without|hardly|barely)\b|n't"
    patterns = {"nothing": r"\bnothing\b", "no": r"\bno\b", "not": r"\bnot\b|n't", "balanced": negation}
    for word, pattern in patterns.items():
        counts = collections.Counter(row["label"] for row in reviews if re.search(pattern, row["text"], re.I))
        assert re.search(rf"{word}.{{0,40}} {counts['negative']} .{{0,20}}{counts['positive']}", card), (word, counts)
