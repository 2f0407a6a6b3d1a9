"""Time of a step on vLLM, compared with the torch engine and with bare prefill of the same prompts by vLLM itself.

python benchmarks/vllm_step.py [--model mezzo/llama-mini] [--batch 16] [--length 32] [--shared 96] [--rounds 7]

The engines run in one process and take turns. A step is both signs of one direction and the update; bare prefill is one call of
`LLM.generate` with every prompt twice, without scores, and without adapters or under two. With --shared, a second table has
prompts that begin with that many common tokens, which vLLM takes from its prefix cache.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from sglang_step import TARGETS, make_batch, step, time_in_turns

from mezzo.engines import open_engine
from mezzo.engines.base import EngineSpec
from mezzo.method.space import Space
from mezzo.types import Batch


def prefill(engine: Any, batch: Batch, adapters: bool = False) -> None:
    """Every prompt twice, as both signs have it, and one token, which vLLM always makes."""
    from vllm import SamplingParams

    assert engine.llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": list(prompt.ids)} for _ in range(2) for prompt in batch.prompts]
    requests = [request for request in engine.adapters[:2] for _ in batch.prompts] if adapters else None
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    engine.llm.generate(prompts, sampling, lora_request=requests, use_tqdm=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mezzo/llama-mini")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--shared", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    space = Space("lora", rank=8, alpha=16, factors="b", targets=TARGETS)
    spec = EngineSpec(
        options.model, "causal", space, rows=options.batch, seed=1, dtype=options.dtype, threads=options.threads
    )
    vllm, torch = open_engine("vllm", spec), open_engine("torch", spec)
    cases = {
        "torch step": lambda batch, number: step(torch, batch, number),
        "vLLM step": lambda batch, number: step(vllm, batch, number),
        "bare vLLM prefill": lambda batch, number: prefill(vllm, batch),
        "prefill under adapters": lambda batch, number: prefill(vllm, batch, adapters=True),
    }
    try:
        for shared in (0, options.shared)[: 2 if options.shared else 1]:
            batches = [make_batch(options.batch, options.length, shared, seed) for seed in range(options.rounds + 2)]
            times = time_in_turns(cases, batches)
            print(f"{options.batch} prompts of {shared + options.length} tokens, {shared} of them shared: milliseconds")
            for name, values in times.items():
                print(f"  {name:23} {statistics.median(values):8.1f} ({min(values):.1f}–{max(values):.1f})")
            for other in ("bare vLLM prefill", "prefill under adapters", "torch step"):
                ratios = [ours / theirs for ours, theirs in zip(times["vLLM step"], times[other], strict=True)]
                print(f"  vLLM step ÷ {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})")
    finally:
        vllm.close()


if __name__ == "__main__":
    main()
