"""Names of the same column in common data sets."""

from __future__ import annotations

from collections.abc import Sequence

SYNONYMS = (
    ("text", "sentence", "review", "content", "comment", "tweet", "utterance", "document", "body", "question"),
    ("premise", "sentence1", "question1", "text1", "text_a", "s1", "#1 string"),
    ("hypothesis", "sentence2", "question2", "text2", "text_b", "s2", "#2 string"),
    ("label", "labels", "gold_label", "coarse_label", "label-coarse", "is_duplicate", "class", "target", "sentiment"),
    ("answers", "answer"),
)


def find_column(name: str, columns: Sequence[str]) -> str | None:
    """The task's column that a template means by `name`: the one of that name, or the only one it is a synonym of."""
    lowered = {column.lower(): column for column in columns}
    if name.lower() in lowered:
        return lowered[name.lower()]
    groups = [group for group in SYNONYMS if name.lower() in group and (len(columns) == 1 or "text" not in group)]
    matches = [column for column in columns for group in groups if column.lower() in group]
    return matches[0] if len(matches) == 1 else None
