"""Steps that a device runs by itself are those of the host: losses, updates, and the weights that a journal leads to."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mezzo.engines.torch.engine import TorchEngine
from mezzo.errors import RunFailed
from mezzo.journal.content import read
from mezzo.journal.header import Header
from mezzo.journal.journal import Journal
from mezzo.method.estimators import Spsa
from mezzo.method.method import EstimatorMethod
from mezzo.method.objectives import OBJECTIVES, ScoreObjective, cross_entropy
from mezzo.method.optimizers import LARGEST, Sgd
from mezzo.method.space import Space
from mezzo.runs.trainer import Limits, MeZOTrainer
from mezzo.types import Batch, DeviceStep, MicroBatch, PairRule, Probe, Prompt, Readout, StepRecord, Update
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


def computed_update(scores: np.ndarray, batch: Batch, rule: PairRule, seed: int) -> tuple[np.ndarray, Update]:
    from mezzo.engines.torch.forward.probe_point import words_on
    from mezzo.engines.torch.gpu.kernels.device_step import OUTCOME_SIZE, compute_update
    from mezzo.method.objectives import is_normalised

    rule_numbers = [rule.spread, rule.rate, rule.clip, rule.keep, rule.largest]
    numbers = torch.tensor(rule_numbers, dtype=torch.float64, device=DEVICE)
    words, outcome = words_on(DEVICE, [0, 0]), torch.zeros(OUTCOME_SIZE, dtype=torch.float64, device=DEVICE)
    coefs = words.view(torch.float32)[2:]
    flat = torch.from_numpy(scores.reshape(-1, scores.shape[2])).to(DEVICE)
    labels = torch.from_numpy(batch.labels).to(DEVICE)
    compute_update(flat, labels, numbers, words_on(DEVICE, [seed]), (words, coefs), outcome, is_normalised(batch))
    keep, coef = coefs.tolist()
    assert [keep, coef] == outcome[2:].tolist()
    return outcome[:2].cpu().numpy(), Update(((int(words[0]) % 2**64, coef),), keep)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("rows", [1, 6, 64])
@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("vocabulary", [False, True], ids=["candidates", "vocabulary"])
def test_the_kernel_computes_the_update_of_the_host(rows, classes, clip, vocabulary):
    rng = np.random.default_rng(rows)
    seed, rate, keep = 2**64 - 5, 3e-4, float(np.float32(0.999))
    readout = Readout("words", words=tuple(range(classes)), vocabulary=vocabulary)
    batch = Batch(tuple(Prompt((1,), label=int(rng.integers(classes)), position=0) for _ in range(rows)), readout)
    optimizer = Sgd(lambda step: rate, weight_decay=(1 - keep) / rate, clip=clip)
    for size in (1.0, 1e-3, 300.0):
        scores = (size * rng.normal(size=(2, rows, classes))).astype(np.float32)
        losses, update = computed_update(scores, batch, optimizer.pair_rule(0, 2 * EPS), seed)
        np.testing.assert_allclose(losses, cross_entropy(scores, batch), rtol=1e-13)
        slopes = Spsa(0, EPS).tell((Probe(((seed, EPS),)), Probe(((seed, -EPS),))), losses)
        assert update == optimizer.update(slopes, 0)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf], ids=str)
def test_a_loss_that_is_not_finite_gives_an_empty_update(wrong):
    batch = Batch((Prompt((1,), label=0, position=0),) * 2, Readout("words", words=(3, 4)))
    scores = np.zeros((2, 2, 2), dtype=np.float32)
    scores[1, 1, 0] = wrong
    with np.errstate(all="ignore"):
        losses, update = computed_update(scores, batch, PairRule(2 * EPS, 1e-3, 0.0, 0.5), 7)
    assert not np.isfinite(losses[1]) and update.empty
    scores[1, 1, 0] = 1.0
    for spread, rate, keep in ((2 * EPS, 1e300, 0.5), (2 * EPS, 1e-3, np.inf), (1e-320, 1e-3, 0.5)):
        with np.errstate(all="ignore"):
            assert computed_update(scores, batch, PairRule(spread, rate, 0.0, keep), 7)[1].empty


@pytest.mark.parametrize("largest", LARGEST.values(), ids=LARGEST)
def test_the_kernel_skips_what_the_weights_cannot_hold_as_the_host_does(largest):
    batch = Batch((Prompt((1,), label=0, position=0),) * 2, Readout("words", words=(3, 4)))
    scores = np.zeros((2, 2, 2), dtype=np.float32)
    scores[0, :, 1] = 1.0
    up, down = cross_entropy(scores, batch)
    for share in (0.5, 0.999, 1.001, 2.0):
        optimizer = Sgd(lambda step, share=share: share * largest * 2 * EPS / (up - down), largest=largest)
        losses, update = computed_update(scores, batch, optimizer.pair_rule(0, 2 * EPS), 7)
        (slope,) = Spsa(0, EPS).tell((Probe(((7, EPS),)), Probe(((7, -EPS),))), losses)
        (coef,) = (coef for _, coef in optimizer.update([slope], 0).terms)
        assert update.empty == (share > 1) == (not np.isfinite(coef))
        assert update.empty or update.terms == ((7, coef),)


# ---- runs


def make_engine(space: Space, dtype: torch.dtype = torch.float32, device: Any = DEVICE, **extra: Any) -> TorchEngine:
    return TorchEngine(make_roberta().to(dtype), space, seed=3, pad_id=1, device=device, **extra)


BATCHES = [make_batch(6, seed=seed, lengths=(9, 16) if seed else (20, 30)) for seed in range(4)]
USUAL = Sgd(lambda step: 1e-3 / (1 + step), weight_decay=0.1, clip=20.0)


def make_trainer(
    engine: TorchEngine, folder: Path, steps: int, on_device: bool = True, optimizer: Sgd = USUAL
) -> MeZOTrainer:
    folder.mkdir(exist_ok=True)
    objective = OBJECTIVES["cross_entropy"] if on_device else ScoreObjective(cross_entropy)
    method = EstimatorMethod(objective, Spsa(0, EPS), optimizer, lambda step: BATCHES[step % 4])
    return MeZOTrainer(engine, method, Journal.create(folder, Header()), Limits(steps))


def run_steps(trainer: MeZOTrainer, after_step: Any = lambda record: None) -> list[StepRecord]:
    records = []
    for record in trainer.run():
        after_step(record)
        records.append(record)
    trainer.journal.close()
    return records


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_a_run_on_the_device_is_that_of_the_host(space, dtype, tmp_path):
    """Also when batches are scored and digests taken between its steps."""
    engine, host = make_engine(space, dtype), make_engine(space, dtype)
    twin = make_engine(space, dtype, "cpu")
    digests: list[str] = []

    def look(record: StepRecord) -> None:
        if record.step % 3 == 2:
            engine.score(BATCHES[1], (Probe(), Probe()))
            digests.append(engine.digest())

    records = run_steps(make_trainer(engine, tmp_path / "device", 14), look)
    expected = run_steps(make_trainer(host, tmp_path / "host", 14, on_device=False))
    for record, theirs in zip(records, expected, strict=True):
        np.testing.assert_allclose(record.losses, theirs.losses, rtol=1e-5 if dtype == torch.float32 else 2e-2)
        assert record.lr == theirs.lr and record.update.keep == theirs.update.keep
    assert records[0].update == expected[0].update
    assert not any(key[0] == "step" for key in host.graphs.forwards)
    assert all(step.graph is not None for key, step in engine.graphs.forwards.items() if key[0] == "step")
    for record in read(tmp_path / "device").records:
        twin.apply([record.update])
        if record.step % 3 == 2:
            assert twin.digest() == digests[record.step // 3]
    assert twin.digest() == engine.digest()


RULE = PairRule(2 * EPS, 1e-2, 0.0, 1.0)


def pair_step(seed: int) -> DeviceStep:
    return DeviceStep(BATCHES[1], (Probe(((seed, EPS),)), Probe(((seed, -EPS),))), RULE)


def host_update(step: DeviceStep, losses: np.ndarray) -> Update:
    return Sgd(lambda _: RULE.rate).update(Spsa(0, EPS).tell(step.probes, losses), 0)


@on_a_gpu
def test_a_step_in_flight_is_cancelled_when_another_one_comes():
    engine, twin = make_engine(SPACES["lora"]), make_engine(SPACES["lora"], device="cpu")

    def run(seed: int, following: int | None) -> None:
        step = pair_step(seed)
        losses = engine.pipeline.run(step, None if following is None else lambda: pair_step(following))
        assert losses is not None
        update = host_update(step, losses)
        assert update.terms[0][1]
        engine.apply([update])
        twin.apply([update])

    for seed, following in ((1, 2), (2, 3), (4, 5), (5, None), (6, 7)):  # what is announced comes, or does not
        run(seed, following)
        assert engine.digest() == twin.digest()
    outside = Update(((99, float(np.float32(1e-2))),))
    for each in (engine, twin):  # step 7 was launched at weights that are no longer there
        each.apply([outside])
    run(7, 8)
    state = engine.state()
    for each in (engine, twin):
        each.load_state({name: value + np.float32(0.01) for name, value in state.items()})
    run(8, None)
    assert engine.digest() == twin.digest()
    engine.pipeline.run(pair_step(9), None)
    with pytest.raises(RunFailed, match="not recorded"):
        engine.pipeline.run(pair_step(10), None)
    with pytest.raises(RunFailed, match="moved the weights by"):
        engine.apply([outside])


@on_a_gpu
def test_a_following_step_that_fails_leaves_no_update():
    engine = make_engine(SPACES["lora"])
    before = engine.digest()

    def fail() -> DeviceStep:
        raise ValueError("no more data")

    for seed in (1, 2):
        with pytest.raises(ValueError, match="no more data"):
            engine.pipeline.run(pair_step(seed), fail)
    losses = engine.pipeline.run(pair_step(3), lambda: pair_step(4))
    assert losses is not None
    update = host_update(pair_step(3), losses)
    engine.apply([update])
    twin = make_engine(SPACES["lora"])
    assert twin.digest() == before
    twin.apply([update])
    assert engine.digest() == twin.digest(), "neither 1 nor 2 has moved anything"


@on_a_gpu
def test_steps_that_the_device_cannot_run_are_left_to_the_host(tmp_path):
    engine = make_engine(SPACES["lora"], micro_batch=MicroBatch(4))
    assert engine.pipeline.run(pair_step(1), None) is None
    assert len(run_steps(make_trainer(engine, tmp_path / "parts", 4))) == 4, "a batch in several micro-batches"
    assert not any(key[0] == "step" for key in engine.graphs.forwards)


@on_a_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_no_step_waits_for_the_device_but_for_its_outcome(space, tmp_path):
    """Once its shapes are captured: torch raises where an operation would make the host wait. Waiting for events is allowed."""
    trainer = make_trainer(make_engine(space), tmp_path / "r", 12)
    seen: list[int] = []

    def watch(record: StepRecord) -> None:
        seen.append(record.step)
        torch.cuda.set_sync_debug_mode("error" if 6 <= record.step < 10 else "default")

    try:
        run_steps(trainer, watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen == list(range(12))


@on_a_gpu
def test_a_skipped_step_moves_nothing(tmp_path):
    engine = make_engine(SPACES["lora"])
    before = engine.digest()
    trainer = make_trainer(engine, tmp_path / "r", 5, optimizer=Sgd(lambda step: 1e300, weight_decay=0.1))
    records = run_steps(trainer)
    assert all(record.skipped and record.update == Update() for record in records) and engine.digest() == before


# ---- garbage collection and the end of an engine


@contextmanager
def frequent_collections() -> Iterator[list[bool]]:
    """Collect garbage far more often than usual, and list for every collection whether it ran during a capture."""
    during_capture: list[bool] = []

    def note(phase: str, info: dict[str, int]) -> None:
        during_capture.append(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())

    threshold = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(50, 2, 2)
    try:
        yield during_capture
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)


def test_garbage_collection_is_paused_and_resumed_after_an_error():
    from mezzo.engines.torch.gpu.captured_graph import pause_garbage_collection

    def fail() -> None:
        with pause_garbage_collection():
            collections.clear()
            garbage = [[] for _ in range(1000)]
            assert not collections and len(garbage) == 1000
            raise ValueError("inside")

    with frequent_collections() as collections:
        with pytest.raises(ValueError, match="inside"):
            fail()
        assert gc.isenabled()
    gc.disable()
    try:
        with pause_garbage_collection():
            pass
        assert not gc.isenabled(), "as it was before"
    finally:
        gc.enable()


@on_a_gpu
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_no_garbage_is_collected_during_a_capture(space):
    """Engines that were dropped without `close` are garbage while the next one captures."""
    update = Update(((11, 2.0**-9),))
    with frequent_collections() as during_capture:
        for _ in range(3):
            engine = make_engine(space)
            for seed in range(1, 4):
                engine.score(BATCHES[1], pair_step(seed).probes)
                engine.apply([update])
                losses = engine.pipeline.run(pair_step(seed), None)
                engine.apply([host_update(pair_step(seed), losses)])
            assert engine.graphs.capture_error == ""
            assert all(forward.graph is not None for forward in engine.graphs.forwards.values())
    assert during_capture and not any(during_capture)


@on_a_gpu
def test_twenty_engines_in_one_process():
    """Each is opened, used until it has captured graphs, and dropped: every other one without being closed."""
    updates = [Update(((11, 2.0**-9),)), Update(((12, -(2.0**-8)), (13, 2.0**-9)))]
    digests: dict[str, set[str]] = {name: set() for name in SPACES}
    for number in range(20):
        name = list(SPACES)[number % len(SPACES)]
        engine = make_engine(SPACES[name])
        for _ in range(3):  # launched one by one, captured, replayed
            engine.score(BATCHES[1], pair_step(7).probes)
            engine.apply(updates)
        assert engine.graphs.forwards and engine.graphs.updates and engine.graphs.capture_error == ""
        digests[name].add(engine.digest())
        if number % 2:
            engine.close()
            assert not engine.graphs.forwards and not engine.graphs.updates
            assert engine.digest() in digests[name]
        del engine
    gc.collect()
    for name, space in SPACES.items():
        twin = make_engine(space, device="cpu")
        for _ in range(3):
            twin.apply(updates)
        assert digests[name] == {twin.digest()}


@on_a_gpu
def test_a_closed_engine_captures_again_when_it_is_used():
    engine = make_engine(SPACES["lora"])
    before = [engine.score(BATCHES[1], pair_step(7).probes) for _ in range(3)]
    engine.close()
    after = [engine.score(BATCHES[1], pair_step(7).probes) for _ in range(3)]
    for scores in (*before, *after):
        np.testing.assert_array_equal(scores, before[0])
    assert all(forward.graph is not None for forward in engine.graphs.forwards.values())
