"""Countdown: reach a number from given numbers. Problems are made from a seed, and answers are checked by a few lines."""

from __future__ import annotations

import ast
import random
import re
import warnings
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

# Problems by split, all different.
SIZES = {"train": 2000, "dev": 100, "test": 500}
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
# Of an expression that is right but for its value.
CLOSE = 0.1
LONGEST = 200


def make_rows(split: str, seed: int = 0, count: int = 3) -> list[dict[str, str]]:
    """The problems of a split: `count` numbers and a target that they reach."""
    generator, rows = random.Random(f"countdown/{seed}/{count}"), dict[str, dict[str, str]]()
    while len(rows) < sum(SIZES.values()):
        numbers = [generator.randint(1, 20) for _ in range(count)]
        value, mixed = Fraction(numbers[0]), list(numbers)
        for number in numbers[1:]:
            value = _apply(generator.choice("+-*"), value, Fraction(number))
        generator.shuffle(mixed)
        row = {"numbers": " ".join(map(str, mixed)), "target": str(value)}
        if 0 < value < 100:
            rows[f"{sorted(mixed)} {value}"] = row
    start = {"train": 0, "dev": SIZES["train"], "test": SIZES["train"] + SIZES["dev"]}[split]
    return list(rows.values())[start : start + SIZES[split]]


def reward(completion: str, row: Mapping[str, Any]) -> float:
    """1 for an expression of all the numbers, each used once, that equals the target; a little for one with another value."""
    numbers = sorted(map(int, str(row["numbers"]).split()))
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of `2and`, say
            tree = ast.parse(find_expression(completion), mode="eval")
        used, value = sorted(_numbers(tree)), _value(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    if used != numbers:
        return 0.0
    return 1.0 if value == Fraction(str(row["target"])) else CLOSE


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
