"""Countdown: reach a number from given numbers. Problems are made from a seed, and answers are checked by a few lines."""

from __future__ import annotations

import ast
import itertools
import math
import random
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

# Problems by split, all different.
SIZES = {"train": 2000, "dev": 100, "test": 500}
# Numbers of a problem, the smallest and the largest of them, and the largest target.
COUNT, NUMBERS, LARGEST = 3, (1, 20), 99
# The largest share of a split that one expression, such as `a + b - c`, solves.
MOST_SOLVED = 0.08
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
# Of an expression that is right but for its value, and what is added as the value gets close to the target. Without the
# latter, a model that uses the right numbers would learn only from the few problems that it happens to solve.
FORM, NEAR = 0.1, 0.3
LONGEST = 200


def make_rows(split: str, seed: int = 0) -> list[dict[str, str]]:
    """The problems of a split: numbers and a target that they reach."""
    return [dict(row) for row in _make_splits(seed)[split]]


@cache
def _make_splits(seed: int) -> dict[str, list[dict[str, str]]]:
    """A model must not be rewarded for a habit: no target is the plain sum or product, and no one expression of the numbers,
    as they are given or by size, solves many problems of a split."""
    generator, known = random.Random(f"countdown/{seed}"), set[tuple[int, ...]]()
    splits: dict[str, list[dict[str, str]]] = {split: [] for split in SIZES}
    for split, rows in splits.items():
        solved = Counter[tuple[str, int]]()
        while len(rows) < SIZES[split]:
            numbers = [generator.randint(*NUMBERS) for _ in range(COUNT)]
            values = _values(numbers)
            targets = {value for value in values if 0 < value <= LARGEST} - {sum(numbers), math.prod(numbers)}
            if not targets:
                continue
            target = generator.choice(sorted(targets))
            problem = (*sorted(numbers), target)
            orders = {"given": values, "by size": _values(sorted(numbers))}
            right = [(order, at) for order, found in orders.items() for at, v in enumerate(found) if v == target]
            if problem not in known and all(solved[each] < MOST_SOLVED * SIZES[split] for each in right):
                known.add(problem)
                solved.update(right)
                rows.append({"numbers": " ".join(map(str, numbers)), "target": str(target)})
    return splits


def _values(numbers: Sequence[int]) -> list[int]:
    """The values of all expressions of the numbers, each used once, with + - and *; always in the same order of expressions."""
    if len(numbers) == 1:
        return list(numbers)
    found = []
    for first, second in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[first], numbers[second]
        others = [number for place, number in enumerate(numbers) if place not in (first, second)]
        for value in (a + b, a - b, a * b):
            found += _values([value, *others])
    return found


def reward(completion: str, row: Mapping[str, Any]) -> float:
    """1 for an expression of all the numbers, each used once, that equals the target; less for one with another value: from 0.1,
    where its ratio to the target is far from 1, to less than 0.4."""
    numbers = sorted(map(int, str(row["numbers"]).split()))
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of `2and`, say
            tree = ast.parse(find_expression(completion), mode="eval")
        used, value = sorted(_numbers(tree)), _value(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    if used != numbers:
        return 0.0
    target = Fraction(str(row["target"]))
    if value == target:
        return 1.0
    return FORM + NEAR * float(min(value, target) / max(value, target)) if value > 0 else FORM


def find_expression(text: str) -> str:
    """Between <answer> tags, else the last line that has digits; without what follows an equals sign."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    lines = [line for line in text.splitlines() if any(character.isdigit() for character in line)]
    chosen = tagged[-1] if tagged else lines[-1] if lines else ""
    return chosen.split("=")[0].strip().strip("`$.").strip()[:LONGEST]


def _numbers(tree: ast.AST) -> list[int]:
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, int)]


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return _apply(SIGNS[type(node.op)], _value(node.left), _value(node.right))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    raise ValueError("not an expression of + - * / and whole numbers")


def _apply(sign: str, left: Fraction, right: Fraction) -> Fraction:
    return {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}[sign](right)
