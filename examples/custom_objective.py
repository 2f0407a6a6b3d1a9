"""Train on an objective without a gradient: mistakes with different costs.

python examples/custom_objective.py
"""

import tempfile
from pathlib import Path

import numpy as np

import mezzo

COST = np.array(
    [
        [0.0, 5.0],  # a negative review predicted as positive costs five points
        [1.0, 0.0],  # a positive review predicted as negative costs one point
    ]
)


def cost(scores, batch):
    """Return one loss per probe from scores[probe, example, label]; lower is better."""
    predicted = scores.argmax(axis=2)
    return COST[batch.labels, predicted].mean(axis=1)


def main(folder: Path) -> None:
    # Small perturbations rarely change a prediction, so eps is larger than for cross-entropy.
    run = mezzo.finetune(
        task="reviews",
        objective=cost,
        space="lora",
        eps=0.1,
        lr=1e-3,
        steps=20,
        batch_size=16,
        eval_every=10,
        eval_limit=50,
        threads=1,
        out=str(folder / "run"),
    )
    print(run)
    print(f"steps without a slope: {run.zero_slope_share:.0%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
