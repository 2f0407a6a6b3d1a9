"""How good a model is on examples: metric, confidence interval, and the calibrated figure that honest gains are stated over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mezzo.engines.base import Engine, FeatureEngine
from mezzo.errors import ConfigError, DataError, ModelError
from mezzo.evaluation.figures import describe_failed, describe_loss, format_figure, is_reward_metric
from mezzo.evaluation.linear_probe import probe_scores
from mezzo.evaluation.rewards import LINE_END, Decode, RewardObjective, exact_match, read_texts, text_f1
from mezzo.method import noise
from mezzo.method.objectives import METRICS, cross_entropy, log_sum_exp
from mezzo.types import Batch, Generation, Probe, Prompt, Readout

Z95 = 1.959964
# The largest figure of an evaluation, and the first count, that no run has: a file that claims one was forged.
MAX_FIGURE, MAX_COUNT = 1e30, 2**53
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """A model on a set of examples. `metric` names `value`; `interval` is its 95% confidence interval. `calibrated` is the
    value without the prompt's prior; None where the answers are no labels, such as the candidates of a choice. Beside a
    reward, `accuracy` is the share of texts with a reward of at least 1, `loss` that of a held-out text, and `failed` the number
    of texts whose reward could not be computed."""

    metric: str
    value: float
    interval: tuple[float, float]
    accuracy: float
    loss: float
    n: int
    calibrated: float | None
    failed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The figures by name; those of rewards have `failed`."""
        names = [name for name in self.__slots__ if name != "failed" or is_reward_metric(self.metric)]
        return {name: getattr(self, name) for name in names} | {"interval": list(self.interval)}

    def __str__(self) -> str:
        value, low, high = (format_figure(figure, self.metric) for figure in (self.value, *self.interval))
        return f"{self.metric} {value} [{low}, {high}] on {self.n} examples{describe_failed(self.failed)}"

    def __repr__(self) -> str:
        calibrated = "" if self.calibrated is None else f", calibrated {self.calibrated:.1%}"
        return f"<{self}, {describe_loss(self.loss, self.metric)}{calibrated}>"


def rank(value: float, loss: float, step: int) -> tuple[float, float, int]:
    """What the best checkpoint has most of: a high figure; among equal ones, as few dev examples give them, a low loss."""
    return value, -loss if math.isfinite(loss) else -math.inf, -step


@dataclass(frozen=True, slots=True)
class DetailedEvaluation:
    """An evaluation with what it was made from: scores[B, C] or generated texts, and which examples were right."""

    evaluation: Evaluation
    right: tuple[bool, ...]
    scores: npt.NDArray[np.float64] | None = None
    texts: tuple[str, ...] | None = None
    rewards: tuple[float, ...] | None = None


def score_prompts(engine: Engine, prompts: Sequence[Prompt], readout: Readout) -> npt.NDArray[np.float64]:
    """scores[B, C] of the unperturbed model; all NaN for an example that it has no answer to."""
    scores = engine.score(Batch(tuple(prompts), readout), [Probe()])[0].astype(np.float64)
    return np.where(np.isfinite(scores.max(axis=1, keepdims=True)), scores, np.nan)


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    readout: Readout,
    metric: str = "accuracy",
    draws: Sequence[Sequence[Prompt]] = (),
    calibrate: bool = True,
) -> DetailedEvaluation:
    """Evaluate labelled prompts; `draws` are the same examples with other demonstrations, whose scores are averaged in."""
    if not prompts:
        raise DataError("there are no examples to evaluate")
    batch = Batch(tuple(prompts), readout)
    scores = score_prompts(engine, prompts, readout)
    if draws:
        drawn = [scores, *(score_prompts(engine, others, readout) for others in draws)]
        scores = np.mean([each - log_sum_exp(each) for each in drawn], axis=0)
    predicted, labels = compare_answers(scores.argmax(axis=1), scores, batch)
    right = predicted == labels
    return DetailedEvaluation(evaluate_scores(scores, batch, metric, calibrate), tuple(right.tolist()), scores)


def evaluate_linear_probe(
    engine: Engine, train: Sequence[Prompt], prompts: Sequence[Prompt], readout: Readout, classes: int, metric: str
) -> DetailedEvaluation:
    """Evaluate a new linear head, fitted to the training prompts, on what the frozen model's LM head reads."""
    if not isinstance(engine, FeatureEngine) or readout.kind == "head":
        raise ConfigError("a linear probe reads what an LM head does: use the torch engine, without --readout head")
    if not train or not prompts:
        raise DataError("a linear probe needs labelled examples to fit and to evaluate")
    batch = Batch(tuple(prompts), readout)
    fitted, tested = (engine.features(each).astype(np.float64) for each in (train, prompts))
    if not np.isfinite(fitted).all() or not np.isfinite(tested).all():
        raise ModelError("the model's hidden states are not finite numbers: its weights are damaged")
    scores = probe_scores(fitted, Batch(tuple(train), readout).labels, classes, tested)
    right = scores.argmax(axis=1) == batch.labels
    return DetailedEvaluation(evaluate_scores(scores, batch, metric), tuple(right.tolist()), scores)


def evaluate_texts(
    engine: Engine,
    prompts: Sequence[Prompt],
    readout: Readout,
    decode: Decode,
    generation: Generation,
    stop: Sequence[str] = LINE_END,
) -> DetailedEvaluation:
    """Evaluate generated answers: mean F1 of words, with exact match as the accuracy and the answers' LM loss. Of several
    draws for a prompt, figures are means and the answer that is shown is the first."""
    if not prompts:
        raise DataError("there are no examples to evaluate")
    batch = Batch(tuple(prompts), readout)
    loss = float(cross_entropy(engine.score(batch, [Probe()]), batch)[0])
    (texts,) = read_texts(engine.generate(batch, [Probe()], generation), decode, stop)
    pairs = list(zip(texts, prompts, strict=True))
    values, exact = (
        np.array([np.mean([metric(text, prompt.answers) for text in drawn]) for drawn, prompt in pairs])
        for metric in (text_f1, exact_match)
    )
    mean, (low, high) = float(values.mean()), mean_interval(values)
    interval = (max(0.0, low), min(1.0, high))
    found = Evaluation("f1", mean, interval, float(np.mean(exact)), loss, len(values), None)
    right = tuple(bool(exact_match(drawn[0], prompt.answers)) for drawn, prompt in pairs)
    return DetailedEvaluation(found, right, texts=tuple(drawn[0] for drawn in texts))


def evaluate_rewards(engine: Engine, batch: Batch, objective: RewardObjective, held_out: Batch) -> DetailedEvaluation:
    """Evaluate generated texts by their reward, beside the loss of a held-out text."""
    if not batch.prompts:
        raise DataError("there are no examples to evaluate")
    loss = float(cross_entropy(engine.score(held_out, [Probe()]), held_out)[0])
    texts = read_texts(engine.generate(batch, [Probe()], objective.generation), objective.decode, objective.stop)
    rewarded = objective.reward_texts(texts, batch.prompts)
    (rewards,), failed = rewarded.values, rewarded.failed
    values = rewards.mean(axis=1)
    mean, solved = float(values.mean()), float((rewards >= 1).mean())
    found = Evaluation(objective.name, mean, mean_interval(values), solved, loss, len(values), None, failed)
    right = tuple((rewards[:, 0] >= 1).tolist())
    return DetailedEvaluation(found, right, None, tuple(drawn[0] for drawn in texts[0]), tuple(values.tolist()))


def mean_interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The 95% interval of a mean, by its standard error."""
    half, mean = Z95 * float(values.std()) / math.sqrt(len(values)), float(values.mean())
    return mean - half, mean + half


def evaluate_scores(scores: npt.NDArray[np.float64], batch: Batch, metric: str, calibrate: bool = True) -> Evaluation:
    """Figures from scores[B, C]."""
    classes = scores.shape[1]
    predicted, labels = compare_answers(scores.argmax(axis=1), scores, batch)
    loss = float(cross_entropy(scores[None].astype(np.float32), batch)[0])
    accuracy = METRICS["accuracy"](predicted, labels, classes)
    if metric == "accuracy":
        interval = wilson_interval(accuracy, len(labels))
    else:
        interval = bootstrap_interval(predicted, labels, metric, classes)
    value = METRICS[metric](predicted, labels, classes)
    calibrated = None
    if calibrate:
        calibrated = METRICS[metric](*compare_answers(calibrated_predictions(scores), scores, batch), classes)
    return Evaluation(metric, value, interval, accuracy, loss, len(labels), calibrated)


def refuse_nan(scores: npt.NDArray[np.float64]) -> None:
    """Raise ModelError where a model gives no answer; a run goes on after such an evaluation, which is its worst."""
    if np.isnan(scores).any():
        raise ModelError(
            "the model gives scores that are not finite numbers: its weights are damaged, or a run has diverged "
            "(choose another step with --at), or --dtype cannot hold its activations"
        )


def compare_answers(predicted: Labels, scores: npt.NDArray[np.float64], batch: Batch) -> tuple[Labels, Labels]:
    """Predictions and what they are compared with: the label, or of several right candidates the one that was predicted."""
    pairs = zip(predicted.tolist(), batch.prompts, strict=True)
    labels = np.array([index if index in prompt.right else prompt.label for index, prompt in pairs], dtype=np.int64)
    return wrong_where_nan(predicted, scores, labels), labels


def wrong_where_nan(predicted: Labels, scores: npt.NDArray[np.float64], labels: Labels) -> Labels:
    """Predictions, with another label than the right one where there is no score: NaN must not pass for label 0."""
    return np.where(np.isnan(scores).any(axis=1), (labels + 1) % scores.shape[1], predicted)


def probabilities(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.exp(scores - log_sum_exp(scores))


def calibrated_predictions(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Predictions after removing the prompt's prior: every label is predicted equally often on these unlabelled examples.

    With two labels the threshold moves to the median of the margins. With more, an offset per label is found by moving each
    label's offset against its surplus, in ever smaller steps.
    """
    if not np.isfinite(scores).all():  # ragged candidates have no common prior to remove
        return scores.argmax(axis=1)
    count, labels = scores.shape
    if labels == 2:
        margins = scores[:, 1] - scores[:, 0]
        return (margins > np.median(margins)).astype(np.int64)
    offsets = -scores.mean(axis=0)
    pace = float(scores.std()) or 1.0
    for round_ in range(500):
        share = np.bincount((scores + offsets).argmax(axis=1), minlength=labels) / count
        offsets -= pace / math.sqrt(1 + round_) * (share - 1 / labels)
    return (scores + offsets).argmax(axis=1)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    centre = share + Z95**2 / (2 * count)
    spread = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    scale = 1 + Z95**2 / count
    return (max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale))


def bootstrap_interval(
    predicted: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], metric: str, classes: int = 0, rounds: int = 1000
) -> tuple[float, float]:
    """Percentile interval of a metric over resampled examples; the resampling is fixed."""
    count = len(labels)
    draws = noise.words(0, "bootstrap", 0, rounds * count).reshape(rounds, count) % np.uint64(count)
    values = [METRICS[metric](predicted[draw], labels[draw], classes) for draw in draws.astype(np.int64)]
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
