"""Choosing demonstrations, never the example itself, the same on every machine: one per label for masked models, any number
for causal ones."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

from mezzo.errors import ConfigError, TaskError
from mezzo.tasks import templates
from mezzo.tasks.task import Task
from mezzo.types import Example


class Demonstrations:
    """A pool to choose one example per label from, by (seed, example index, sampling number) and nothing else."""

    def __init__(self, task: Task, pool: Sequence[Example], seed: int = 0) -> None:
        if task.kind != "classification":
            raise TaskError(f"task {task.name!r} is a {task.kind} task; demonstrations need a task with labels")
        self.task, self.seed = task, seed
        labels = range(len(task.labels))
        self.by_label = [[(each, task.texts(each)) for each in pool if each.label == label] for label in labels]
        for label, examples in zip(task.labels, self.by_label, strict=True):
            if not examples:
                raise TaskError(f"no demonstration of label {label!r}; give at least one example per label")

    def choose(self, example: Example, index: int | None = None, sampling: int = 0) -> list[Example]:
        """One example per label, in label order. Samplings of one example differ until its pool is used up.

        Without an index, a checksum of the example's texts replaces it, so that batching changes nothing.
        """
        texts = self.task.texts(example)
        key = index if index is not None else _checksum(texts)
        labels = range(len(self.by_label))
        return [self._choose_one(label, texts, f"{self.seed}/{key}/{label}", sampling) for label in labels]

    def _choose_one(self, label: int, texts: list[str], key: str, sampling: int) -> Example:
        others = [other for other, other_texts in self.by_label[label] if other_texts != texts]
        if not others:
            name = self.task.labels[label]
            raise TaskError(f"the only demonstration of label {name!r} is the example itself; give at least two")
        order = random.Random(key).sample(range(len(others)), len(others))
        return others[order[sampling % len(others)]]


class InContextExamples:
    """Solved examples to put before a causal prompt: `count` of the pool at random, drawn anew for every prompt."""

    def __init__(self, task: Task, pool: Sequence[Example], count: int, seed: int = 0) -> None:
        if count > len(pool):
            raise TaskError(
                f"{count} demonstrations of {len(pool)} training examples; give more data, or ask for fewer"
            )
        if unsolved := sum(each.label < 0 for each in pool):
            raise ConfigError(
                f"demonstrations show right answers, and {unsolved:,} of {len(pool):,} training examples have none: leave out "
                "--demonstrations, or such examples with --skip-unlabelled"
            )
        self.task, self.pool, self.count, self.seed = task, pool, count, seed

    def choose(self, example: Example) -> list[Example]:
        """The choice depends on the seed and the example's texts, and on nothing else."""
        texts = self.task.texts(example)
        order = random.Random(f"{self.seed}/{_checksum(texts)}")
        # One more: it takes the place of an example that would demonstrate itself.
        chosen = order.sample(self.pool, min(self.count + 1, len(self.pool)))
        return [each for each in chosen if self.task.texts(each) != texts][: self.count]

    def solve(self, example: Example) -> str:
        """The prompt of an example with its right answer."""
        task = self.task
        answer = task.answers(example)[0 if task.kind == "generation" else example.label]
        gap = "" if templates.ends_with_space(task.nodes) else " "
        return (templates.render(task.nodes, task.texts(example)) + gap + answer).strip()


def _checksum(texts: Sequence[str]) -> int:
    return zlib.crc32("\x1f".join(texts).encode())
