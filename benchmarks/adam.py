"""An upper bound: the model, prompt, label words and examples of a mezzo run, fine-tuned by AdamW with gradients."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from mezzo.config import from_mapping
from mezzo.engines.torch.forward.inputs import PaddedRows, make_rows
from mezzo.engines.torch.loading import device_of, load_model
from mezzo.evaluation.evaluate import Evaluation, evaluate_scores
from mezzo.runs.setup import resolve_setup
from mezzo.types import Batch, MicroBatch, Prompt


def finetune(
    options: dict[str, Any],
    lr: float = 3e-5,
    epochs: int = 10,
    batch_size: int = 16,
    dropout: float = 0.0,
    by_loss: bool = False,
) -> dict[str, Any]:
    """AdamW with a linear schedule; the epoch with the best dev value, or the lowest dev loss, is tested."""
    config = from_mapping(options)
    setup = resolve_setup(config)
    splits = setup.splits
    train, dev, test = (setup.encode(examples) for examples in (splits.train, splits.dev, splits.test))
    device = device_of(config.device)
    model = load_model(config.model, setup.family).to(device).requires_grad_(True)
    words = torch.tensor(setup.readout.words, device=device)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout

    def logits(rows: PaddedRows) -> torch.Tensor:
        assert rows.positions is not None
        hidden = model(input_ids=rows.ids.to(device), attention_mask=rows.mask.to(device)).logits
        return hidden[torch.arange(len(hidden), device=device), rows.positions[:, 0].to(device)][:, words].float()

    def evaluate(prompts: tuple[Prompt, ...]) -> Evaluation:
        batch = Batch(prompts, setup.readout)
        out = np.zeros((1, len(prompts), len(words)), dtype=np.float32)
        with torch.no_grad():
            for rows in make_rows(batch, MicroBatch(256), setup.pad_id):
                rows.write_scores(out, logits(rows).cpu().numpy()[None])
        return evaluate_scores(out[0].astype(np.float64), batch, setup.task.metric)

    start, zero_shot = time.monotonic(), evaluate(test)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    rng = np.random.default_rng(config.seed)
    size = min(batch_size, len(train))
    total = epochs * (len(train) // size)
    best_dev, best_test, step = evaluate(dev), zero_shot, 0
    for _ in range(epochs):
        order = rng.permutation(len(train))
        model.train()
        for first in range(0, len(train) - size + 1, size):
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 - step / total)
            chosen = Batch(tuple(train[i] for i in order[first : first + size]), setup.readout)
            (rows,) = make_rows(chosen, MicroBatch(size), setup.pad_id)
            labels = torch.tensor([chosen.prompts[example].label for example in rows.places[0]], device=device)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits(rows), labels).backward()
            optimizer.step()
            step += 1
        model.eval()
        evaluation = evaluate(dev)
        if evaluation.loss < best_dev.loss if by_loss else evaluation.value > best_dev.value:
            best_dev, best_test = evaluation, evaluate(test)
    return {
        "value": best_test.value,
        "accuracy": best_test.accuracy,
        "loss": best_test.loss,
        "zero_shot": zero_shot.value,
        "zero_shot_calibrated": zero_shot.calibrated,
        "dev": best_dev.value,
        "dev_loss": best_dev.loss,
        "steps": step,
        "seconds": round(time.monotonic() - start, 1),
    }
