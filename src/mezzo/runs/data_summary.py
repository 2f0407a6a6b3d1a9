"""A look at the data before training: one line for each thing that is worth knowing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from mezzo.errors import join_names
from mezzo.runs.setup import Setup
from mezzo.types import Example

# A label that is this many times as frequent as another is worth a word.
IMBALANCED = 3

Texts = tuple[str, ...]


def describe_data(setup: Setup) -> list[str]:
    """Rows per label, and what may surprise: rows that are skipped, empty, repeated, cut, or in train and test."""
    splits = setup.splits
    texts = [_texts(setup, example) for example in splits.train]
    lines = [*_labels(setup)]
    if splits.skipped:
        lines.append(f"rows without a label, which are skipped: {splits.skipped:,}")
    if empty := sum(not any(each) for each in texts):
        lines.append(f"rows without a text: {empty:,}")
    lines += _repeated(splits.train, texts)
    known = {each for each in texts if any(each)}
    for name, examples in {"dev": splits.dev, "test": splits.test if splits.has_test else []}.items():
        if both := sum(_texts(setup, example) in known for example in examples):
            lines.append(
                f"rows of {name} that are also in train: {both:,} of {len(examples):,}; figures will be too good"
            )
    return [*lines, *_cut(setup)]


def _labels(setup: Setup) -> Iterator[str]:
    train, labels = setup.splits.train, setup.task.labels
    if setup.task.kind != "classification":
        return
    counts = Counter(dict.fromkeys(labels, 0)) + Counter(labels[example.label] for example in train)
    ranked = [(label, counts[label]) for label in sorted(labels, key=lambda label: -counts[label])]
    line = f"{len(train):,} rows to train on: {join_names([f'{label} {count:,}' for label, count in ranked])}"
    most, largest = ranked[0]
    if largest >= IMBALANCED * ranked[-1][1]:
        line += f"; imbalanced: always answering {most!r} would be right for {largest / len(train):.0%}"
    yield line


def _repeated(examples: Sequence[Example], texts: Sequence[Texts]) -> Iterator[str]:
    labels: dict[Texts, list[int]] = {}
    for example, each in zip(examples, texts, strict=True):
        labels.setdefault(each, []).append(example.label)
    repeated = [found for each, found in labels.items() if any(each) and len(found) > 1]
    if repeated:
        disputed = sum(len(set(found)) > 1 for found in repeated)
        and_labels = f"; texts with different labels: {disputed:,}" if disputed else ""
        yield f"rows that repeat the text of another: {sum(len(found) - 1 for found in repeated):,}{and_labels}"


def _cut(setup: Setup) -> Iterator[str]:
    encoder, limit = setup.encoder, setup.encoder.max_length
    # Only a prompt that fills the limit can have been cut.
    lengths = (len(prompt.ids) + max(map(len, prompt.candidates), default=0) for prompt in setup.train_prompts)
    full = [example for example, length in zip(setup.splits.train, lengths, strict=True) if length == limit]
    needed = [length for example in full if (length := encoder.full_length(example, 0)) > limit]
    if needed:
        rows = f"{len(needed):,} of {len(setup.splits.train):,}"
        yield f"rows cut to {limit} tokens: {rows}, the longest from {max(needed):,} (--max-length takes more if the model does)"


def _texts(setup: Setup, example: Example) -> Texts:
    return tuple(text.strip() for text in setup.task.texts(example))
