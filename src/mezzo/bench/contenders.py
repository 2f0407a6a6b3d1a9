"""What is compared, each as a function that makes one step: the recipe twice, a bare doubled forward, mezzo's own step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mezzo.bench import published_step
from mezzo.bench.shapes import Shape, random_model
from mezzo.engines.torch import choose_micro_batch
from mezzo.engines.torch.engine import TorchEngine
from mezzo.journal.header import Header
from mezzo.journal.journal import Journal
from mezzo.method.estimators import Spsa
from mezzo.method.method import EstimatorMethod
from mezzo.method.noise import Kind
from mezzo.method.objectives import OBJECTIVES
from mezzo.method.optimizers import Sgd
from mezzo.method.space import Space
from mezzo.runs.trainer import Limits, MeZOTrainer
from mezzo.types import Batch, Probe, Question, Scores

EPS, LR = 1e-3, 1e-7
PAD = 1
Step = Callable[[int], object]


@dataclass(frozen=True)
class Setting:
    """What every contender of one comparison has in common."""

    shape: Shape
    batch: Batch
    micro_batch: int | None
    samples: int
    max_length: int
    dtype: torch.dtype
    device: torch.device

    def engine(self, space: Space, kind: Kind = "rademacher") -> TorchEngine:
        model = random_model(self.shape, self.dtype, self.device)
        micro_batch = choose_micro_batch(
            self.micro_batch or len(self.batch), self.micro_batch is None, self.device.type
        )
        return TorchEngine(
            model,
            space,
            noise_kind=kind,
            micro_batch=micro_batch,
            pad_id=PAD,
            device=self.device,
            base_digest="random weights",
        )


def published(setting: Setting, dynamic: bool) -> Step:
    """The released step on all parameters: whole logits, four passes of `torch.normal` in place, two forwards."""
    model = random_model(setting.shape, setting.dtype, setting.device)
    model.requires_grad_(True)
    longest = max(len(p.ids) for p in setting.batch.prompts)
    inputs = collated(setting.batch, longest if dynamic else setting.max_length, setting.device)

    def step(number: int) -> None:
        for sample in range(setting.samples):
            published_step.step(
                model, partial(_loss, model, setting.batch, *inputs), seed=number + sample, eps=EPS, lr=LR
            )

    return step


def collated(batch: Batch, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, every row padded to `length`."""
    ids = torch.full((len(batch), length), PAD)
    for row, prompt in enumerate(batch.prompts):
        ids[row, : len(prompt.ids)] = torch.tensor(prompt.ids)
    return ids.to(device), (ids != PAD).long().to(device)


def _loss(model: nn.Module, batch: Batch, ids: Tensor, mask: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask).logits
    places = torch.tensor([p.position for p in batch.prompts], device=ids.device)
    at = logits[torch.arange(len(ids), device=ids.device), places][:, list(batch.readout.words)]
    return torch.nn.functional.cross_entropy(at, torch.tensor(batch.labels, device=ids.device))


def bare(setting: Setting) -> Step:
    """Both rows of a pair through the unperturbed model, by the engine's own path: the floor of a step."""
    engine = setting.engine(Space(setting.shape.small_tensor))
    pair = (Probe(),) * (2 * setting.samples)

    def step(number: int) -> Scores:
        if engine.pipeline is not None:
            engine.pipeline.prefetch(lambda: Question(setting.batch, pair))
        return engine.score(setting.batch, pair)

    return step


def mezzo_step(setting: Setting, space: Space, kind: Kind, folder: Path) -> Step:
    """The trainer's step as users run it, journal and update included."""
    method = EstimatorMethod(
        OBJECTIVES["cross_entropy"],
        Spsa(seed=0, eps=EPS, samples=setting.samples),
        Sgd(lambda step: LR),
        lambda step: setting.batch,
    )
    trainer = MeZOTrainer(
        setting.engine(space, kind), method, Journal.create(folder, Header()), Limits(steps=sys.maxsize)
    )
    return trainer.one_step
