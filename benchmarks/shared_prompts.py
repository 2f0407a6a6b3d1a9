"""What sharing a prompt among its candidates saves: the same scores with and without it, interleaved in one process.

python benchmarks/shared_prompts.py [--model mezzo/llama-mini] [--prompt 384] [--candidates 2 4] [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from mezzo.engines.hf_hub import load_config
from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.loading import device_of, load_model
from mezzo.method.space import Space
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout


def make_batch(prompts: int, length: int, candidates: int, vocabulary: int) -> Batch:
    rng = np.random.default_rng(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.integers(5, vocabulary, size=count))

    rows = (
        Prompt(tokens(length), label=0, candidates=tuple(tokens(4) for _ in range(candidates))) for _ in range(prompts)
    )
    return Batch(tuple(rows), Readout("candidates"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mezzo/llama-mini")
    parser.add_argument("--prompt", type=int, default=384, help="tokens of a prompt")
    parser.add_argument("--candidates", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model(options.model, "causal")
    engine = TorchEngine(model, Space("lora"), micro_batch=MicroBatch(options.batch), device=device_of(options.device))
    probes = (Probe(((1, 1e-2),)), Probe(((1, -1e-2),)))
    print("| candidates | shared ms | unshared ms | ratio | largest difference |\n|---|---|---|---|---|")
    for count in options.candidates:
        batch = make_batch(options.batch, options.prompt, count, int(load_config(options.model).vocab_size))
        times: dict[bool, list[float]] = {True: [], False: []}
        scores = {}
        for _ in range(options.rounds + 1):
            for shared in (True, False):
                engine.share_prompts = shared
                start = time.perf_counter()
                scores[shared] = engine.score(batch, probes)
                times[shared].append(1e3 * (time.perf_counter() - start))
        fast, slow = (statistics.median(times[shared][1:]) for shared in (True, False))
        print(
            f"| {count} | {fast:.0f} | {slow:.0f} | {slow / fast:.2f} | {np.abs(scores[True] - scores[False]).max():.1e} |"
        )


if __name__ == "__main__":
    main()
