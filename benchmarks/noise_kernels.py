"""How fast a GPU perturbs and updates all matrices of a model: milliseconds and GB/s, beside a plain copy.

python benchmarks/noise_kernels.py --rounds 20
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from mezzo.engines.torch.forward.probe_point import DeviceUpdate, ProbePoint
from mezzo.method.noise import NOISES
from mezzo.types import Probe, TrainedTensor, Update

if TYPE_CHECKING:  # needs Triton
    from mezzo.engines.torch.gpu.noise_layout import Matrix

LAYER = [(1024, 1024)] * 4 + [(4096, 1024), (1024, 4096)]
ROBERTA_LARGE = [(50265, 1024), (514, 1024), *LAYER * 24, (1024, 1024)]
"""The matrices of RoBERTa-large: 355M weights."""


def milliseconds(work: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Median time of a CUDA graph of the work, and of launching it kernel by kernel."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return median_time(graph.replay, rounds), median_time(work, max(3, rounds // 4))


def median_time(work: Callable[[], None], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure(name: str, noises: list[str], rounds: int) -> Iterator[dict[str, object]]:
    """One row for a copy of the weights in a dtype, then rows for perturbing and updating them with each kind of noise."""
    from mezzo.engines.torch.gpu.fused_ops import DeviceNoise, FusedOps
    from mezzo.engines.torch.gpu.noise_layout import split_by_size

    device, dtype = torch.device("cuda"), getattr(torch, name)
    point = ProbePoint((Probe(((7, 1e-3),)), Probe(((7, -1e-3),))), device)
    device_update = DeviceUpdate(Update(((7, 2.0**-20),)), device)
    values = [torch.randn(shape, device=device).mul_(0.02).to(dtype) for shape in ROBERTA_LARGE]
    scratch = torch.empty(2 * max(value.numel() for value in values), dtype=dtype, device=device)

    def row(what: str, noise: str, work: Callable[[], None], passes: int) -> dict[str, object]:
        graph, eager = milliseconds(work, rounds)
        size = passes * sum(value.numel() for value in values) * dtype.itemsize
        figures = {"ms": round(graph, 3), "launched_ms": round(eager, 2), "GB/s": round(size / graph / 1e6)}
        return {"what": what, "noise": noise, "dtype": name, **figures}

    def copy() -> None:
        for value in values:
            scratch[: value.numel()].view_as(value).copy_(value)

    def perturb(fused: FusedOps, every: Sequence[Matrix]) -> None:
        fused.begin_forward(point)
        for trained, value in every:
            fused.perturb_matrix(trained, value, point, scratch[: 2 * value.numel()].view(2, *value.shape))

    def update(fused: FusedOps, every: Sequence[Matrix]) -> None:
        fused.update_matrices(every, device_update)

    yield row("copy", "", copy, 2)
    for noise in noises:
        fused = FusedOps(DeviceNoise(NOISES[noise].kind, device))
        rank = 8 if NOISES[noise].low_rank else 0
        every = [(TrainedTensor(f"t{n}", value.shape, "matrix", rank), value) for n, value in enumerate(values)]
        if not rank:  # low-rank noise is added to activations
            fused.group_signs([[(t.name, value.numel()) for t, value in group] for group in split_by_size(every)])
            yield row("both signs", noise, partial(perturb, fused, every), 3)
        yield row("update", noise, partial(update, fused, every), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", default="float32,bfloat16,float16")
    parser.add_argument("--noise", default="rademacher,gaussian,lowrank")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog}: this needs a GPU that torch can use\n")
    found = []
    for name in options.dtype.split(","):
        for row in measure(name, options.noise.split(","), options.rounds):
            print(json.dumps(row), flush=True)
            found.append(row)
    print("| what | noise | dtype | ms | GB/s |\n|---|---|---|---|---|")
    for row in sorted(found, key=lambda row: (str(row["what"]), str(row["noise"]))):
        print(f"| {row['what']} | {row['noise']} | {row['dtype']} | {row['ms']} | {row['GB/s']} |")


if __name__ == "__main__":
    main()
