"""Time of the parts of a step of `--method solve`, compared with bare forwards of as many rows, on random weights.

python benchmarks/solve_step.py [--model roberta-large] [--dtype float32] [--batch 64] [--length 32] [--directions 64]
python benchmarks/solve_step.py --model roberta-mini --batch 8 --directions 8 --rounds 3    # a CPU

A population is θ and one probe for each direction; candidates are θ and five moves, each a sum of all directions. Bare forwards
go through the same engine without noise. The solver is all that the host does between the two. All take turns in one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from mezzo.bench.contenders import Setting, Step
from mezzo.bench.shapes import SHAPES, find_shape, random_batch
from mezzo.bench.timing import time_in_turns
from mezzo.engines.torch import choose_for_probes
from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.loading import device_of
from mezzo.method.evidence import OFFSETS
from mezzo.method.noise import NOISES
from mezzo.method.solve import make_model
from mezzo.method.space import Space
from mezzo.types import Probe

EPS = 1e-3


def make_engine(setting: Setting, space: Space, noise: str = "rademacher") -> TorchEngine:
    engine = setting.engine(space, NOISES[noise].kind)
    engine.micro_batch = choose_for_probes(len(setting.batch), engine, generates=False)
    return engine


def bare_forward(setting: Setting, count: int) -> Step:
    engine = make_engine(setting, Space(setting.shape.small_tensor))
    return lambda number: engine.score(setting.batch, (Probe(),) * count)


def population(setting: Setting, space: Space, directions: int) -> Step:
    engine = make_engine(setting, space)

    def score(number: int) -> object:
        seeds = range(number * directions, (number + 1) * directions)
        return engine.score(setting.batch, (Probe(), *(Probe(((seed, EPS),)) for seed in seeds)))

    return score


def candidates(setting: Setting, space: Space, directions: int) -> Step:
    engine = make_engine(setting, space)

    def score(number: int) -> object:
        seeds = range(number * directions, (number + 1) * directions)
        moves = (Probe(tuple((seed, EPS / shrink) for seed in seeds)) for shrink in range(1, 1 + len(OFFSETS)))
        return engine.score(setting.batch, (Probe(), *moves))

    return score


def solver(setting: Setting, directions: int) -> Step:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(1 + directions, len(setting.batch), len(setting.batch.readout.words))).astype("float32")

    def solve(number: int) -> object:
        model, _ = make_model(scores, setting.batch, EPS, earlier_weight=1.0)
        assert model is not None
        ridges = [model.mean_curvature() / len(setting.batch) * 0.25**offset for offset in OFFSETS]
        fits = model.fit_path(ridges)
        return [model.left_out_gains(move, ridge) for move, ridge in zip(fits, ridges, strict=True)]

    return solve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="roberta-large", help=f"a shape: {', '.join(SHAPES)}")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--directions", type=int, default=64)
    parser.add_argument("--space", default="lora,full")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    shape, device = find_shape(options.model), device_of(options.device)
    batch = random_batch(shape, options.batch, options.length, 0.0)
    setting = Setting(shape, batch, None, 1, options.length, getattr(torch, options.dtype), device)
    directions, moves = options.directions, 1 + len(OFFSETS)
    floors = {"population": f"bare forward, {1 + directions} × {len(batch)} rows"}
    floors["candidates"] = f"bare forward, {moves} × {len(batch)} rows"
    contenders: dict[str, Callable[[], Step]] = {
        floors["population"]: partial(bare_forward, setting, 1 + directions),
        floors["candidates"]: partial(bare_forward, setting, moves),
    }
    for kind in options.space.split(","):
        for name, make in (("population", population), ("candidates", candidates)):
            contenders[f"{kind} {name}"] = partial(make, setting, Space(kind, factors="b"), directions)
    contenders["solver"] = partial(solver, setting, directions)
    timed = time_in_turns(contenders, device, options.rounds)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{options.model}, {options.dtype}, {len(batch)} rows of {options.length} tokens, {directions} directions, {where}"
    )
    print("| part | ms | range | × bare forward |\n|---|---|---|---|")
    for name, contender in timed.items():
        floor = timed.get(floors.get(name.rpartition(" ")[2], ""), timed[floors["population"]])
        ms = contender.ms
        print(
            f"| {name} | {contender.median:.1f} | {min(ms):.1f}–{max(ms):.1f} | {contender.median / floor.median:.3f} |"
        )


if __name__ == "__main__":
    main()
