"""Objectives, metrics and intervals against plain formulas, and rewards of generated text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.errors import ConfigError
from mezzo.evaluation.evaluate import bootstrap_interval, calibrated_predictions, evaluate_scores, wilson_interval
from mezzo.evaluation.rewards import exact_match, text_f1
from mezzo.method.objectives import METRICS, OBJECTIVES, cross_entropy, get_objective
from mezzo.types import Batch, Prompt, Readout


def batch_of(labels: list[int], readout: Readout | None = None) -> Batch:
    return Batch(tuple(Prompt((1,), label=y) for y in labels), readout or Readout("words", words=(1, 2, 3)))


def scores_and_labels(seed: int = 0, classes: int = 3, n: int = 40) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(4, n, classes)).astype(np.float32), rng.integers(classes, size=n).tolist()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_gives_one_loss_per_probe_and_prefers_correct_scores(name):
    scores, labels = scores_and_labels()
    vocabulary = OBJECTIVES[name].vocabulary
    batch = batch_of(labels, Readout("words", words=(1, 2, 3), vocabulary=vocabulary))
    losses = get_objective(name).losses(scores, batch)
    assert losses.shape == (4,)
    assert losses.dtype == np.float64
    correct = np.eye(3, dtype=np.float32)[labels][None] * 10
    assert get_objective(name).losses(correct, batch)[0] < losses.min()


def test_cross_entropy_equals_torch_and_ignores_a_constant_per_row():
    scores, labels = scores_and_labels()
    expected = [
        float(torch.nn.functional.cross_entropy(torch.tensor(s).double(), torch.tensor(labels))) for s in scores
    ]
    np.testing.assert_allclose(cross_entropy(scores, batch_of(labels)), expected, rtol=1e-12)
    shifted = scores.astype(np.float64) + np.random.default_rng(1).normal(size=(4, 40, 1))
    np.testing.assert_allclose(cross_entropy(shifted.astype(np.float32), batch_of(labels)), expected, rtol=1e-5)


def test_log_probabilities_are_not_normalised_again():
    scores, labels = scores_and_labels()
    vocabulary_batch = batch_of(labels, Readout("words", words=(1, 2, 3), vocabulary=True))
    picked = np.take_along_axis(scores, np.array(labels)[None, :, None], 2)[:, :, 0].astype(np.float64)
    np.testing.assert_allclose(cross_entropy(scores, vocabulary_batch), -picked.mean(1))
    candidate_batch = Batch(tuple(Prompt((1,), label=0, candidates=((5, 6),)) for _ in labels), Readout("candidates"))
    np.testing.assert_allclose(
        cross_entropy(scores[:, :, :1], candidate_batch), -scores[:, :, 0].astype(np.float64).mean(1)
    )


def test_metrics_match_their_definitions():
    predicted, labels = np.array([1, 1, 0, 1, 0, 0, 1, 0]), np.array([1, 0, 0, 1, 1, 0, 1, 0])
    assert METRICS["accuracy"](predicted, labels) == 6 / 8
    assert METRICS["f1"](predicted, labels) == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert METRICS["matthews"](predicted, labels) == pytest.approx((3 * 3 - 1 * 1) / np.sqrt(4 * 4 * 4 * 4))
    assert METRICS["matthews"](np.zeros(8, int), labels) == 0.0
    assert METRICS["f1"](np.zeros(8, int), np.zeros(8, int)) == 0.0
    three = np.array([0, 1, 2, 2])
    assert METRICS["matthews"](three, three) == pytest.approx(1.0)
    assert METRICS["f1"](three, three) == pytest.approx(1.0)


@given(st.integers(0, 10**6), st.integers(2, 5))
def test_calibrated_predictions_use_every_label_about_equally(seed, classes):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(200, classes)) + rng.normal(size=classes) * 3
    counts = np.bincount(calibrated_predictions(scores), minlength=classes)
    assert counts.min() >= 200 / classes * 0.7
    if classes == 2:
        assert abs(int(counts[0]) - int(counts[1])) <= 1


def test_any_of_several_right_candidates_counts():
    prompts = (Prompt((1,), label=0, right=(0, 2)), Prompt((1,), label=1, right=(1,)), Prompt((1,), label=1))
    batch = Batch(prompts, Readout("candidates"))
    assert evaluate_scores(np.eye(3)[[2, 1, 1]], batch, "accuracy").value == 1
    assert evaluate_scores(np.eye(3)[[1, 2, 2]], batch, "accuracy").value == 0
    assert evaluate_scores(np.eye(3)[[0, 0, 0]], batch, "accuracy").value == pytest.approx(1 / 3)


def test_confidence_intervals():
    low, high = wilson_interval(0.8, 400)
    assert (round(low, 3), round(high, 3)) == (0.758, 0.836)
    assert wilson_interval(1.0, 10)[1] == pytest.approx(1.0)
    labels = np.array([0, 1] * 100)
    low, high = bootstrap_interval(labels, labels, "f1")
    assert low == high == 1.0
    evaluation = evaluate_scores(np.eye(3)[[0, 1, 2, 1]], batch_of([0, 1, 2, 2]), "accuracy")
    assert (evaluation.accuracy, evaluation.n) == (0.75, 4)


def test_objectives_of_the_user_are_checked(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def good(scores, batch):\n    return scores.sum((1, 2))\n\nbad = 3\n")
    monkeypatch.chdir(tmp_path)
    scores, labels = scores_and_labels()
    np.testing.assert_allclose(
        get_objective("mine:good").losses(scores, batch_of(labels)), scores.sum((1, 2)), rtol=1e-6
    )
    for name, message in {
        "mine:bad": "is not a function",
        "mine:missing": "cannot be imported",
        "no_such_module:f": "cannot be imported",
        "acuracy": "did you mean 'accuracy'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            get_objective(name)
    (tmp_path / "broken.py").write_text("import numpy\n\ndef f(s, b):\n    return numpy.ones(3).reshape(7)\n")
    with pytest.raises(ConfigError, match=r"'f' failed: ValueError: .* \(broken.py, line 4\)$"):
        get_objective("broken:f").losses(scores, batch_of(labels))
    (tmp_path / "unfinished.py").write_text("x = 1\ndef f(s, b\n")
    with pytest.raises(ConfigError, match=r"cannot be imported: SyntaxError: .* \(unfinished.py, line 2\)$"):
        get_objective("unfinished:f")
    with pytest.raises(ConfigError, match="one loss per probe"):
        get_objective(lambda s, b: s).losses(scores, batch_of(labels))


def test_text_rewards_compare_normalised_answers():
    answers = ("The Eiffel Tower", "Eiffel tower, Paris")
    assert text_f1("the eiffel tower!", answers) == 1.0
    assert text_f1("tower", answers) == pytest.approx(2 / 3)
    assert text_f1("", answers) == 0.0
    assert exact_match("Eiffel Tower.", answers) == 1.0
    assert text_f1("anything", ()) == 0.0
