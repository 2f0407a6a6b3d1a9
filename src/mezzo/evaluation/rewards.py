"""Objectives over generated text: a question for continuations, and a reward of each."""

from __future__ import annotations

import inspect
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from mezzo.engines.base import Continuations
from mezzo.errors import ConfigError, LabelError
from mezzo.evaluation.figures import REWARD
from mezzo.evaluation.reward_calls import Call, Failure, Outcome, call_function
from mezzo.evaluation.reward_workers import RewardWorkers
from mezzo.method.objectives import Losses
from mezzo.tasks import countdown
from mezzo.types import Batch, Generation, Probe, Prompt, Question, Rewards

Reward = Callable[..., Any]
Decode = Callable[[Sequence[int]], str]
# What ends an answer: the end of its line.
LINE_END = ("\n",)
# What a reward may ask for, by the names of its parameters: of one text, or of all of them at once.
OF_ONE = ("prompt", "completion", "row", "answers")
OF_ALL = ("prompts", "completions", "rows", "answers")
NO_REWARD = "--method es trains on rewards of generated text: name one, such as --objective module:function"
EXPECTED = "A reward of generated text has a parameter 'completion', or 'completions' for all texts at once"


def is_reward(objective: Any) -> bool:
    """Whether a function rewards generated text: it has a parameter `completion`, or for all texts at once `completions`."""
    return callable(objective) and bool({"completion", "completions"} & _parameters(objective))


def check_function(function: Any) -> None:
    """Refuse a user's own objective that cannot be called: neither as a reward of texts nor with (scores, batch)."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function that is not written in Python
        return
    name = getattr(function, "__name__", type(function).__name__)
    if not is_reward(function):
        try:
            signature.bind("scores", "batch")
        except TypeError:
            raise ConfigError(
                f"objective {name!r} takes {signature}. {EXPECTED}; an objective of scores takes (scores, batch)"
            ) from None
        return
    filled = OF_ALL if "completions" in signature.parameters else OF_ONE
    for each in signature.parameters.values():
        named = each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and each.name in filled
        if not named and each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise ConfigError(
                f"the reward function {name!r} needs {each.name!r}, which nobody gives it: it is called with "
                f"{', '.join(filled)} by their names. Fields of the data are in {filled[2]}; give other parameters a default"
            )


def explain_no_reward(function: Any, error: LabelError) -> LabelError:
    """The error with what a function must take: data without labels shows that it may be meant as a reward."""
    return error if function is None or is_reward(function) else LabelError(f"{error}. {EXPECTED}")


def _parameters(function: Reward) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function that is not written in Python
        return set()


def text_f1(completion: str, answers: Sequence[str]) -> float:
    """Word overlap with the best of the right answers; case, punctuation and articles do not count."""
    return max((_overlap(_words(completion), _words(answer)) for answer in answers), default=0.0)


def exact_match(completion: str, answers: Sequence[str]) -> float:
    return float(any(_words(completion) == _words(answer) for answer in answers))


# Rewards that `--objective` names. They come with this package and need no processes of their own.
REWARDS: dict[str, Reward] = {"f1": text_f1, "exact_match": exact_match, "countdown": countdown.reward}
# Those that compare with right answers, which the data must have.
COMPARING = (text_f1, exact_match)
# The names of their means as metrics.
REWARD_METRICS = (REWARD, *(f"{name} {REWARD}" for name in REWARDS))


def read_texts(continuations: Continuations, decode: Decode, stop: Sequence[str] = LINE_END) -> list[list[list[str]]]:
    """The generated texts by probe, example and draw, each up to the first of the texts in `stop`."""
    return [[[_cut(decode(ids), stop) for ids in draws] for draws in row] for row in continuations]


def _cut(text: str, stop: Sequence[str]) -> str:
    ends = [at for end in stop if (at := text.find(end)) >= 0]
    return text[: min(ends, default=None)].strip()


@dataclass(frozen=True)
class RewardObjective:
    """Rewards of what is generated at each probe. A call that fails has the reward `failed`, and is counted."""

    reward: Reward
    decode: Decode
    generation: Generation
    stop: tuple[str, ...] = LINE_END
    workers: RewardWorkers | None = None
    """Processes that run the reward; None: it comes with this package and runs here."""
    failed: float = 0.0
    name: str = REWARD
    """Of the metric that its mean is."""
    failures: Counter[str] = field(default_factory=Counter, compare=False)
    """How often calls failed so far, by kind."""
    messages: dict[str, str] = field(default_factory=dict, compare=False)
    """The first failure of each kind, in words."""
    on_device: bool = False

    @property
    def needs_answers(self) -> bool:
        return self.reward in COMPARING

    def close(self) -> None:
        """End the processes of the reward."""
        if self.workers:
            self.workers.close()

    def question(self, batch: Batch, probes: tuple[Probe, ...]) -> Question:
        return Question(batch, probes, self.generation)

    def losses(self, answer: Continuations, batch: Batch) -> Losses:
        """Minus the mean reward of each probe."""
        losses: Losses = -self.rewards(answer, batch).values.mean(axis=(1, 2))
        return losses

    def rewards(self, answer: Continuations, batch: Batch) -> Rewards:
        """By probe, example and draw."""
        rewards = self.reward_texts(read_texts(answer, self.decode, self.stop), batch.prompts)
        return replace(rewards, tokens=sum(len(ids) for member in answer for drawn in member for ids in drawn))

    def reward_texts(self, texts: list[list[list[str]]], prompts: Sequence[Prompt]) -> Rewards:
        shape = len(texts), len(prompts), len(texts[0][0])
        rewarded = [(text, p) for member in texts for p, drawn in zip(prompts, member, strict=True) for text in drawn]
        before = self.failures.total()
        values = self._reward_all(rewarded)
        return Rewards(np.array(values, dtype=np.float64).reshape(shape), self.failures.total() - before)

    def _reward_all(self, rewarded: Sequence[tuple[str, Prompt]]) -> list[float]:
        columns = (
            [self._text_of(prompt) for _, prompt in rewarded],
            [text for text, _ in rewarded],
            [dict(prompt.row) for _, prompt in rewarded],
            [list(prompt.answers) for _, prompt in rewarded],
        )
        asked = _parameters(self.reward)
        if "completions" in asked:
            calls = [{name: column for name, column in zip(OF_ALL, columns, strict=True) if name in asked}]
            return self._read(self._call(calls)[0], len(rewarded))
        calls = [
            {name: value for name, value in zip(OF_ONE, values, strict=True) if name in asked}
            for values in zip(*columns, strict=True)
        ]
        return [value for outcome in self._call(calls) for value in self._read(outcome, 1)]

    def _call(self, calls: Sequence[Call]) -> list[Outcome]:
        return self.workers(calls) if self.workers else [call_function(self.reward, call) for call in calls]

    def _read(self, outcome: Outcome, count: int) -> list[float]:
        if not isinstance(outcome, Failure) and len(outcome) != count:
            outcome = Failure("error", f"it returned {len(outcome)} rewards for {count} texts")
        if isinstance(outcome, Failure):
            self.failures[outcome.kind] += count
            self.messages.setdefault(outcome.kind, outcome.text)
            return [self.failed] * count
        return outcome

    @cached_property
    def _text_of(self) -> Callable[[Prompt], str]:
        """A prompt's text, decoded once: the same prompts come again with every probe and draw."""
        known: dict[tuple[int, ...], str] = {}

        def text_of(prompt: Prompt) -> str:
            if prompt.ids not in known:
                known[prompt.ids] = self.decode(prompt.ids)
            return known[prompt.ids]

        return text_of


def _words(text: str) -> list[str]:
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _overlap(given: list[str], expected: list[str]) -> float:
    if not given or not expected:
        return float(given == expected)
    common = sum((Counter(given) & Counter(expected)).values())
    return 2 * common / (len(given) + len(expected))
