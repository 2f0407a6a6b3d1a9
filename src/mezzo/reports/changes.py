"""What training changed, as sections of the page: labels by recall and confusion, and examples before and after.

Both come from metrics.jsonl, which may be untrusted: what does not have the expected shape is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from mezzo.reports import html
from mezzo.reports.metrics import finite_number


def classes_section(classes: Any) -> str:
    """Recall of each label, with the confusion matrix where there is one: rows are the right labels."""
    labels = classes.get("labels") if isinstance(classes, Mapping) else None
    size = len(labels) if isinstance(labels, list) else 0
    counts, recalls, matrix = (
        (_list(classes.get(key), size) for key in ("n", "recall", "confusion")) if size else ([],) * 3
    )
    if not counts or not recalls:
        return ""
    names = [str(label) for label in labels or ()]
    cells = [_list(row, size) for row in matrix]
    given = names if cells and all(cells) else []
    rows = (
        f"<tr><td>{escape(name)}</td>{_matrix_cells(cells[place], place) if given else ''}"
        f"{html.number_cells((html.percent(finite_number(recalls[place])), html.count(counts[place])))}</tr>"
        for place, name in enumerate(names)
    )
    note = '<p class="note">Rows are the right labels, columns the predicted ones.</p>' if given else ""
    return html.heading("By label") + html.table(("right label", *given, "recall", "n"), rows, text_columns=1) + note


def _list(value: Any, length: int) -> list[Any]:
    """The value if it is a list of that length, else an empty one."""
    return value if isinstance(value, list) and len(value) == length else []


def _matrix_cells(row: list[Any], place: int) -> str:
    """Counts, those on the diagonal in bold, shaded by their share of the row."""
    counts = [max(0.0, finite_number(value) or 0.0) for value in row]
    total = sum(counts) or 1.0
    cells = (
        f'<td class="number" style="background: color-mix(in srgb, var(--c0, #2563eb) {30 * count / total:.0f}%, transparent)">'
        f"{f'<b>{count:,.0f}</b>' if column == place else f'{count:,.0f}'}</td>"
        for column, count in enumerate(counts)
    )
    return "".join(cells)


def changes_section(result: Mapping[str, Any]) -> str:
    """Test examples with the answers before and after training."""
    examples = result.get("examples")
    rows = [row for row in examples if isinstance(row, Mapping)] if isinstance(examples, list) else []
    if not rows:
        return ""
    better, worse = ("improved", "worsened") if "rewards" in rows[0] else ("corrected", "broke")
    corrected, broken, count = (html.count(result.get(key)) for key in ("corrected", "broken", "n_test"))
    note = f"Training {better} {corrected} answers and {worse} {broken}, of {count}."
    return f'{html.heading("Before and after")}<p class="note">{note}</p>{"".join(map(_card, rows))}'


def _card(row: Mapping[str, Any]) -> str:
    fields = row.get("fields")
    texts = fields.values() if isinstance(fields, Mapping) else [fields]
    shown = "".join(f"<p>{escape(str(text))}</p>" for text in texts)
    before, after, right = (escape(str(row.get(key))) for key in ("before", "after", "right"))
    ending = "right" if row.get("right_after") is True else f"wrong: correct is <b>{right}</b>"
    if isinstance(rewards := row.get("rewards"), list):
        ending = "reward " + " → ".join(f"{value:.4g}" for value in map(finite_number, rewards) if value is not None)
    return f'<div class="card change">{shown}<div class="soft"><b>{before}</b> → <b>{after}</b>, {ending}</div></div>'
