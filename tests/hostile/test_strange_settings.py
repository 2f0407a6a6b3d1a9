"""Settings, tasks and model folders of another shape than any program writes: one line, and neither a wait nor a memory full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mezzo.errors import TaskError
from mezzo.tasks import get_task
from mezzo.untrusted import read_settings
from tests.hostile.files import copy_run, read_json_lines, write_journal

Refusal = Callable[..., str]
HEAD = 'columns = ["text"]\ntemplate = "{text} It was [MASK]."\n'
WORDS = 'labels = ["a", "b"]\nwords = ["bad", "good"]\n'
ANSWER = 'columns = ["text"]\ntemplate = "{text} Answer:"\nfamily = "causal"\n'
HUGE = "0x" + "f" * 6000
STRANGE_TASKS = {
    "id_orders": HEAD + WORDS + 'id_order = ["a"]\nid_orders = "x"',
    "rewrite": HEAD + WORDS + 'rewrite = {text = "x"}',
    "rewrite: text: a": HEAD + WORDS + "rewrite = {text = {a = 1}}",
    "labels": HEAD + 'labels = 5\nwords = {a = "bad"}',
    "words": HEAD + 'labels = ["a", "b"]\nwords = ["bad", {x = 1}]',
    "label_aliases: x": HEAD + WORDS + "label_aliases = {x = [1]}",
    "id_orders: data": HEAD + WORDS + "id_order = {x = 1}",
    "id_order": ANSWER + 'kind = "generation"\nid_order = "nowhere"',
    "id_order 'nowhere'": ANSWER + 'kind = "choice"\ncandidates = ["c"]\nid_order = "nowhere"',
    "fill": ANSWER + 'kind = "choice"\ncandidates = ["c"]\nfill = ["text"]',
    "space_prefix": HEAD + WORDS + "space_prefix = [1]",
    "sample: text": HEAD + WORDS + "sample = {text = 2020-01-01}",
    "more than 100 digits": HEAD + WORDS + f"max_length = {HUGE}",
}


@pytest.mark.parametrize("part", STRANGE_TASKS)
def test_a_task_of_another_shape_is_refused_by_the_name_of_its_part(
    part: str, workspace: Path, expect_refusal: Refusal
) -> None:
    (workspace / "t.toml").write_text(STRANGE_TASKS[part])
    assert part in expect_refusal("tasks", "show", str(workspace / "t.toml"))


@pytest.mark.parametrize("text", ["1: 2", "method:\n  3: 4", "seed: !!bool maybe", f"steps: {HUGE}"])
def test_yaml_of_another_shape_is_refused(text: str, workspace: Path, expect_refusal: Refusal) -> None:
    (workspace / "c.yaml").write_text(text + "\n")
    assert "not valid YAML" in expect_refusal("train", "--config", str(workspace / "c.yaml"))


def test_a_hexadecimal_integer_of_any_length_is_refused(workspace: Path, expect_refusal: Refusal) -> None:
    (workspace / "c.toml").write_text(f"steps = {HUGE}\n")
    assert "more than 100 digits" in expect_refusal("train", "--config", str(workspace / "c.toml"))
    (workspace / "d.toml").write_text(f"[[a.b]]\nc = [-{int(HUGE[:300], 16)}]\n")
    with pytest.raises(ValueError, match="more than 100 digits"):
        read_settings(workspace / "d.toml")


def test_a_journal_with_a_task_of_another_shape_is_refused(
    valid_run: Path, workspace: Path, expect_refusal: Refusal
) -> None:
    run = copy_run(valid_run, workspace)
    lines = read_json_lines(run / "journal.jsonl")
    lines[0]["task"]["labels"] = 5
    lines[0]["task"]["words"] = {"a": "bad"}
    write_journal(run / "journal.jsonl", lines)
    assert "labels is 5" in expect_refusal("train", "--resume", str(run))


@pytest.mark.parametrize(
    "changes",
    [
        {"template": "x" * 100_001 + "{text} [MASK]"},
        {"words": ["bad", "g" * 100_000]},
        {"answer_end": "." * 100_001},
        {"rewrite": {"text": {"a": "b" * 100_000}}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_text_of_a_task_has_a_greatest_length(changes: dict[str, Any]) -> None:
    plain = {"columns": ["text"], "template": "{text} [MASK]", "labels": ["a", "b"], "words": ["bad", "good"]}
    get_task(plain)
    with pytest.raises(TaskError, match="characters; 100,000 are allowed"):
        get_task(plain | changes)
