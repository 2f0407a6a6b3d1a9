"""The convex problem of `--method solve`, against torch's autograd and against its own definition."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mezzo.method.score_model import ABSENT, ScoreModel, cross_entropies, logits_of
from mezzo.types import Batch, Prompt, Readout


def make_model(
    seed: int,
    directions: int = 7,
    examples: int = 40,
    classes: int = 5,
    signal: float = 1.0,
    earlier_weight: float = 0.0,
) -> ScoreModel:
    """A random problem in which the first direction moves the right class up."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=examples)
    changes = rng.normal(size=(directions, examples, classes))
    changes[0, np.arange(examples), labels] += signal
    return ScoreModel(rng.normal(size=(examples, classes)), changes.astype(np.float32), labels, earlier_weight)


def torch_loss(model: ScoreModel, alpha: torch.Tensor, ridge: float = 0.0) -> torch.Tensor:
    logits = torch.from_numpy(model.base) + torch.tensordot(alpha, torch.from_numpy(model.changes).double(), 1)
    return F.cross_entropy(logits, torch.from_numpy(model.labels)) + ridge / 2 * alpha @ alpha


@pytest.mark.parametrize("seed", range(3))
def test_slopes_and_curvature_are_those_of_autograd(seed):
    model = make_model(seed)
    zero = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(torch_loss(model, zero), zero)
    hessian = torch.autograd.functional.hessian(lambda a: torch_loss(model, a), zero)
    np.testing.assert_allclose(model.slopes(), gradient.numpy(), atol=1e-6)
    assert model.mean_curvature() == pytest.approx(float(hessian.trace()) / 7)


@pytest.mark.parametrize("ridge", [1e-3, 0.1, 10.0])
def test_the_fit_is_where_autograd_finds_no_slope(ridge):
    model = make_model(5, directions=20, examples=60)
    alpha = torch.tensor(model.fit(ridge), requires_grad=True)
    (gradient,) = torch.autograd.grad(torch_loss(model, alpha, ridge), alpha)
    assert float(gradient.norm()) < 1e-3 * max(1.0, float(np.linalg.norm(model.slopes())))


@pytest.mark.parametrize("earlier", [0.5, 8.0])
def test_earlier_examples_add_the_curvature_at_the_present_weights(earlier):
    model = make_model(5, directions=20, examples=60, earlier_weight=earlier)
    hessian = torch.autograd.functional.hessian(lambda a: torch_loss(model, a), torch.zeros(20, dtype=torch.float64))
    alpha = torch.tensor(model.fit(0.01), requires_grad=True)
    loss = torch_loss(model, alpha, 0.01) + earlier / 2 * alpha @ hessian @ alpha
    (gradient,) = torch.autograd.grad(loss, alpha)
    assert float(gradient.norm()) < 1e-3 * float(np.linalg.norm(model.slopes()))


def test_separable_examples_do_not_send_the_fit_to_infinity():
    labels = np.array([0, 1] * 8)
    changes = np.zeros((1, 16, 2), np.float32)
    changes[0, np.arange(16), labels] = 1.0
    alpha = ScoreModel(np.zeros((16, 2)), changes, labels).fit(1e-3)
    assert np.isfinite(alpha).all() and 1 < alpha[0] < 20


def test_directions_without_effect_get_no_coefficient():
    model = make_model(0)
    model.changes[3] = 0.0
    assert model.fit(0.1)[3] == 0.0
    still = ScoreModel(model.base, np.zeros_like(model.changes), model.labels)
    assert not still.fit(1e-12).any()


def test_a_path_of_ridges_has_the_fit_of_each():
    model, ridges = make_model(2, directions=12), [0.3, 0.01, 3.0]
    for ridge, alpha in zip(ridges, model.fit_path(ridges), strict=True):
        np.testing.assert_allclose(alpha, model.fit(ridge), atol=1e-2 * np.abs(alpha).max())


@pytest.mark.parametrize(("ridge", "earlier"), [(0.03, 0.0), (0.3, 0.0), (3.0, 0.0), (0.03, 2.0)])
def test_the_gain_on_examples_left_out_is_that_of_fits_without_them(ridge, earlier):
    model = make_model(3, directions=10, examples=80, signal=0.5, earlier_weight=earlier)
    expected = 0.0
    for out in range(80):
        kept = np.arange(80) != out
        others = ScoreModel(model.base[kept], model.changes[:, kept], model.labels[kept], earlier * 80 / 79)
        alpha = others.fit(ridge * 80 / 79)  # the ridge is of the mean over all 80
        one = ScoreModel(model.base[[out]], model.changes[:, [out]], model.labels[[out]])
        expected += float((one.losses(np.zeros(10)) - one.losses(alpha)).sum())
    within = float((model.losses(np.zeros(10)) - model.losses(model.fit(ridge))).sum())
    found = float(model.left_out_gains(model.fit(ridge), ridge).sum())
    assert found == pytest.approx(expected, abs=0.03 * within) and found < within


def test_log_probabilities_of_a_vocabulary_keep_their_loss():
    """One more candidate stands for all other words: the softmax then gives the log-probabilities back."""
    rng = np.random.default_rng(0)
    vocabulary = torch.log_softmax(torch.from_numpy(rng.normal(size=(2, 9, 50))), dim=-1).numpy()
    prompts = tuple(Prompt((1, 2), label=int(label), position=1) for label in rng.integers(4, size=9))
    batch = Batch(prompts, Readout("words", words=(0, 1, 2, 3), vocabulary=True))
    logits = logits_of(vocabulary[..., :4].astype(np.float32), batch)
    assert logits.shape == (2, 9, 5)
    expected = -vocabulary[:, np.arange(9), batch.labels]
    np.testing.assert_allclose(cross_entropies(logits, batch.labels), expected, atol=1e-5)


def test_a_certain_answer_stays_finite():
    batch = Batch((Prompt((1,), label=0, position=0),), Readout("words", words=(5,), vocabulary=True))
    assert np.isfinite(logits_of(np.zeros((1, 1, 1), np.float32), batch)).all()


def test_absent_candidates_have_no_part_in_the_loss():
    prompts = tuple(Prompt((1,), label=0, candidates=((1,),) * count) for count in (2, 3))
    batch = Batch(prompts, Readout("candidates"))
    scores = np.array([[[0.0, 1.0, -np.inf], [0.0, 1.0, 2.0]]], np.float32)
    logits = logits_of(scores, batch)
    assert logits[0, 0, 2] == ABSENT
    expected = F.cross_entropy(torch.tensor([[0.0, 1.0]]), torch.tensor([0]))
    assert cross_entropies(logits, batch.labels)[0, 0] == pytest.approx(float(expected))


def test_a_move_has_the_same_bits_with_any_number_of_threads():
    script = """
        import hashlib, sys
        import numpy as np
        from threadpoolctl import threadpool_limits
        from mezzo.method.score_model import ScoreModel
        rng = np.random.default_rng(0)
        base, labels = rng.normal(size=(512, 6)), rng.integers(0, 6, size=512)
        model = ScoreModel(base, rng.normal(size=(132, 512, 6)).astype(np.float32), labels, 0.5)
        with threadpool_limits(limits=int(sys.argv[1])):
            moves = model.fit_path([0.1, 0.01])
            found = [*moves, model.slopes(), model.losses(moves[0]), model.left_out_gains(moves[1], 0.01)]
        print(hashlib.sha256(b"".join(map(bytes, found))).hexdigest())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    one, two = (subprocess.check_output([*command, count], text=True) for count in "12")
    assert one == two
