"""Steps that a device judges and makes by itself are those of the host: losses, updates, and the weights a journal leads to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mezzo.engines.base import Autonomous
from mezzo.engines.torch.engine import TorchEngine
from mezzo.errors import RunFailed
from mezzo.journal.journal import Journal, read
from mezzo.method.estimators import Spsa
from mezzo.method.objectives import cross_entropy
from mezzo.method.optimizers import Sgd
from mezzo.method.space import Space
from mezzo.runs.trainer import Limits, MeZOTrainer
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Question, Readout, Rule, StepRecord, Update
from tests.conftest import make_batch, make_roberta
from tests.torch_engine.triton_device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="graphs need a GPU")
SPACES = {
    "full": Space("full"),
    "matrices-lowrank": Space("matrices", noise_rank=8),
    "lora": Space("lora", rank=4, alpha=8),
}
EPS = 1e-2


# ---- the kernel


def judged(scores: np.ndarray, batch: Batch, rule: Rule, seed: int) -> tuple[np.ndarray, Update]:
    from mezzo.engines.torch.forward.probe_point import words_on
    from mezzo.engines.torch.gpu.kernels.device_step import OUTCOME, judge
    from mezzo.method.objectives import is_normalised

    numbers = torch.tensor([rule.spread, rule.rate, rule.clip, rule.keep], dtype=torch.float64, device=DEVICE)
    words, outcome = words_on(DEVICE, [0, 0]), torch.zeros(OUTCOME, dtype=torch.float64, device=DEVICE)
    coefs = words.view(torch.float32)[2:]
    flat = torch.from_numpy(scores.reshape(-1, scores.shape[2])).to(DEVICE)
    labels = torch.from_numpy(batch.labels).to(DEVICE)
    judge(flat, labels, numbers, words_on(DEVICE, [seed]), (words, coefs), outcome, is_normalised(batch))
    keep, coef = coefs.tolist()
    assert [keep, coef] == outcome[2:].tolist()
    return outcome[:2].cpu().numpy(), Update(((int(words[0]) % 2**64, coef),), keep)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("rows", [1, 6, 64])
@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("vocabulary", [False, True], ids=["candidates", "vocabulary"])
def test_a_kernel_judges_as_the_host_does(rows, classes, clip, vocabulary):
    rng = np.random.default_rng(rows)
    seed, rate, keep = 2**64 - 5, 3e-4, float(np.float32(0.999))
    readout = Readout("words", words=tuple(range(classes)), vocabulary=vocabulary)
    batch = Batch(tuple(Prompt((1,), label=int(rng.integers(classes)), position=0) for _ in range(rows)), readout)
    optimizer = Sgd(lambda step: rate, weight_decay=(1 - keep) / rate, clip=clip)
    for size in (1.0, 1e-3, 300.0):
        scores = (size * rng.normal(size=(2, rows, classes))).astype(np.float32)
        losses, moved = judged(scores, batch, optimizer.rule(0, 2 * EPS), seed)
        np.testing.assert_allclose(losses, cross_entropy(scores, batch), rtol=1e-13)
        slopes = Spsa(0, EPS).tell((Probe(((seed, EPS),)), Probe(((seed, -EPS),))), losses)
        assert moved == optimizer.step(slopes, 0)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf], ids=str)
def test_a_loss_that_is_no_number_moves_nothing(wrong):
    batch = Batch((Prompt((1,), label=0, position=0),) * 2, Readout("words", words=(3, 4)))
    scores = np.zeros((2, 2, 2), dtype=np.float32)
    scores[1, 1, 0] = wrong
    with np.errstate(all="ignore"):
        losses, moved = judged(scores, batch, Rule(2 * EPS, 1e-3, 0.0, 0.5), 7)
    assert not np.isfinite(losses[1]) and moved.empty
    scores[1, 1, 0] = 1.0
    for rule in (Rule(2 * EPS, 1e300, 0.0, 0.5), Rule(2 * EPS, 1e-3, 0.0, np.inf), Rule(1e-320, 1e-3, 0.0, 0.5)):
        with np.errstate(all="ignore"):
            assert judged(scores, batch, rule, 7)[1].empty


# ---- runs


def engine_of(space: Space, dtype: torch.dtype = torch.float32, device: Any = DEVICE, **extra: Any) -> TorchEngine:
    return TorchEngine(make_roberta().to(dtype), space, seed=3, pad_id=1, device=device, **extra)


BATCHES = [make_batch(6, seed=seed, lengths=(9, 16) if seed else (20, 30)) for seed in range(4)]


def trainer_of(engine: TorchEngine, folder: Path, steps: int, alone: bool = True) -> MeZOTrainer:
    folder.mkdir(exist_ok=True)
    return MeZOTrainer(
        engine,
        Spsa(0, EPS),
        Sgd(lambda step: 1e-3 / (1 + step), weight_decay=0.1, clip=20.0),
        cross_entropy if alone else lambda scores, batch: cross_entropy(scores, batch),
        lambda step: BATCHES[step % 4],
        Journal.create(folder, {}),
        Limits(steps),
    )


def steps_of(trainer: MeZOTrainer, between: Any = lambda record: None) -> list[StepRecord]:
    found = []
    for record in trainer.run():
        between(record)
        found.append(record)
    trainer.journal.close()
    return found


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_a_run_is_that_of_the_host(space, dtype, tmp_path):
    """Also when weights are looked at, scores are asked for and digests taken between its steps."""
    engine, other = engine_of(space, dtype), engine_of(space, dtype)
    assert isinstance(engine, Autonomous)
    twin = engine_of(space, dtype, "cpu")
    digests: list[str] = []

    def look(record: StepRecord) -> None:
        if record.step % 3 == 2:
            engine.score(BATCHES[1], (Probe(), Probe()))
            digests.append(engine.digest())

    found = steps_of(trainer_of(engine, tmp_path / "alone", 14), look)
    expected = steps_of(trainer_of(other, tmp_path / "host", 14, alone=False))
    for one, its in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.losses, its.losses, rtol=1e-5 if dtype == torch.float32 else 2e-2)
        assert one.lr == its.lr and one.update.keep == its.update.keep
    assert found[0].update == expected[0].update
    assert not any(key[0] == "judged" for key in other.graphs.captured)
    assert all(one.graph is not None for key, one in engine.graphs.captured.items() if key[0] == "judged")
    for record in read(tmp_path / "alone").records:
        twin.apply([record.update])
        if record.step % 3 == 2:
            assert twin.digest() == digests[record.step // 3]
    assert twin.digest() == engine.digest()


@on_a_gpu
def test_what_was_begun_is_dropped_where_another_question_comes(tmp_path):
    engine, twin = engine_of(SPACES["lora"]), engine_of(SPACES["lora"], device="cpu")
    rule = Rule(2 * EPS, 1e-2, 0.0, 1.0)

    def question(seed: int) -> Question:
        return Question(BATCHES[1], (Probe(((seed, EPS),)), Probe(((seed, -EPS),))), rule)

    def moved(seed: int, after: int | None) -> None:
        losses = engine.advance(question(seed), None if after is None else lambda: question(after))
        assert losses is not None
        update = Sgd(lambda step: rule.rate).step(Spsa(0, EPS).tell(question(seed).probes, losses), 0)
        assert update.terms[0][1]
        engine.apply([update])
        twin.apply([update])

    for seed, after in ((1, 2), (2, 3), (4, 5), (5, None), (6, 7)):  # what is announced comes, or does not
        moved(seed, after)
        assert engine.digest() == twin.digest()
    outside = Update(((99, float(np.float32(1e-2))),))
    for one in (engine, twin):  # 7 has begun at weights that are left behind
        one.apply([outside])
    moved(7, 8)
    state = engine.state()
    for one in (engine, twin):
        one.load_state({name: value + np.float32(0.01) for name, value in state.items()})
    moved(8, None)
    assert engine.digest() == twin.digest()
    engine.advance(question(9), None)
    with pytest.raises(RunFailed, match="not recorded"):
        engine.advance(question(10), None)
    with pytest.raises(RunFailed, match="moved the weights by"):
        engine.apply([outside])


@on_a_gpu
def test_a_next_question_that_fails_leaves_no_move():
    engine = engine_of(SPACES["lora"])
    rule, before = Rule(2 * EPS, 1e-2, 0.0, 1.0), engine.digest()

    def question(seed: int) -> Question:
        return Question(BATCHES[1], (Probe(((seed, EPS),)), Probe(((seed, -EPS),))), rule)

    def fails() -> Question:
        raise ValueError("no more data")

    for seed in (1, 2):
        with pytest.raises(ValueError, match="no more data"):
            engine.advance(question(seed), fails)
    losses = engine.advance(question(3), lambda: question(4))
    assert losses is not None
    update = Sgd(lambda step: rule.rate).step(Spsa(0, EPS).tell(question(3).probes, losses), 0)
    engine.apply([update])
    twin = engine_of(SPACES["lora"])
    assert twin.digest() == before
    twin.apply([update])
    assert engine.digest() == twin.digest(), "neither 1 nor 2 has moved anything"


@on_a_gpu
def test_questions_that_only_the_host_can_judge(tmp_path):
    engine = engine_of(SPACES["lora"], micro_batch=MicroBatch(4))
    assert engine.advance(Question(BATCHES[1], (Probe(((1, EPS),)), Probe(((1, -EPS),)))), None) is None
    assert len(steps_of(trainer_of(engine, tmp_path / "parts", 4))) == 4, "a batch in several parts"
    assert not any(key[0] == "judged" for key in engine.graphs.captured)


@on_a_gpu
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_no_step_waits_for_the_device_but_for_its_outcome(space, tmp_path):
    """Once its shapes are captured: torch raises where an operation would make the host wait. Events are waited for by hand."""
    trainer = trainer_of(engine_of(space), tmp_path / "r", 12)
    seen: list[int] = []

    def watch(record: StepRecord) -> None:
        seen.append(record.step)
        torch.cuda.set_sync_debug_mode("error" if 6 <= record.step < 10 else "default")

    try:
        steps_of(trainer, watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen == list(range(12))


@on_a_gpu
def test_a_skipped_step_moves_nothing(tmp_path):
    engine = engine_of(SPACES["lora"])
    before = engine.digest()
    trainer = trainer_of(engine, tmp_path / "r", 5)
    trainer.optimizer = Sgd(lambda step: 1e300, weight_decay=0.1)
    records = steps_of(trainer)
    assert all(record.skipped and record.update == Update() for record in records) and engine.digest() == before
