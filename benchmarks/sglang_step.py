"""Time of a step on SGLang, compared with the torch engine and with bare prefill by SGLang itself.

python benchmarks/sglang_step.py [--model llama-1b] [--dtype bfloat16] [--batch 64] [--length 32] [--shared 480] [--directions 16]

Both engines run on one device and take turns in one process. A step is both signs of one direction and the update; a population
is θ and one probe for each direction, as `--method solve` asks for. `llama-1b` is a Llama of that shape with random weights. Bare
prefill are as many different prompts, by SGLang's own requests for one token, under no adapter; bare scoring also reads the
log-probabilities. With --shared, a second table has prompts that begin with that many common tokens, as prompts with
demonstrations do; bare prompts have as many different beginnings as there are probes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mezzo.engines import open_engine
from mezzo.engines.base import EngineSpec
from mezzo.engines.sglang.requests import scoring_body
from mezzo.engines.token_rows import MIN_SHARED_TOKENS, token_rows
from mezzo.engines.torch import choose_micro_batch
from mezzo.method.space import Space
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout, Update

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
EPS = 1e-2
# Of a batch and the number of its round.
Case = Callable[[Batch, int], object]


def save_llama_1b(folder: Path, dtype: str) -> str:
    """Save a Llama of 1B shape with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return str(folder)


def make_batch(count: int, length: int, shared: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)

    def tokens(size: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.integers(5, 7000, size=size))

    prefix = tokens(shared)
    return Batch(
        tuple(Prompt(prefix + tokens(length), label=index % 2) for index in range(count)),
        Readout("words", words=(300, 900)),
    )


def step(engine: Any, batch: Batch, number: int) -> Any:
    scores = engine.score(batch, (Probe(((number, EPS),)), Probe(((number, -EPS),))))
    engine.apply([Update(((number, float(np.float32(1e-5))),))])
    return scores


def score_population(engine: Any, batch: Batch, number: int, directions: int) -> Any:
    return engine.score(batch, (Probe(), *(Probe(((1000 * number + index, EPS),)) for index in range(directions))))


def run_requests(engine: Any, batch: Batch, scored: bool) -> None:
    """Prefill, or score, the batch by SGLang's own requests, under no adapter."""
    rows = token_rows(batch)
    body = scoring_body(rows, [None] * len(rows), batch.readout)
    if not scored:
        body = {"input_ids": body["input_ids"], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    engine.engine.generate(**body)


def empty_cache(engine: Any) -> None:
    while not engine.engine.flush_cache().success:
        time.sleep(0.001)


def with_micro_batch(engine: Any, micro_batch: MicroBatch, run: Case) -> Case:
    """The case with work cut in another way."""

    def cut(batch: Batch, number: int) -> None:
        usual, engine.micro_batch = engine.micro_batch, micro_batch
        run(batch, number)
        engine.micro_batch = usual

    return cut


def time_in_turns(
    cases: dict[str, Case], batches: list[Batch], prepare: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Milliseconds of each case on each batch, without what `prepare` does before it; the first two batches warm up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number, batch in enumerate(batches):
        for name, run in cases.items():
            prepare()
            start = time.perf_counter()
            run(batch, number + 1)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: values[2:] for name, values in times.items()}


def agreement(sglang: Any, reference: Any, batch: Batch) -> dict[str, float]:
    """The largest difference of scores, and the correlation of the differences between signs, which give the slope."""
    ours, theirs = (step(engine, batch, 77) for engine in (sglang, reference))
    ours, theirs = (scores - scores.mean(-1, keepdims=True) for scores in (ours, theirs))
    signs = np.corrcoef((ours[0] - ours[1]).ravel(), (theirs[0] - theirs[1]).ravel())[0, 1]
    return {"largest": float(np.abs(ours - theirs).max()), "correlation of signs": float(signs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--shared", type=int, default=480)
    parser.add_argument("--directions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("sglang_step.json"))
    options = parser.parse_args()
    start = time.perf_counter()
    results: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}, "seconds": {}}

    def note(what: str) -> None:
        results["seconds"][what] = round(time.perf_counter() - start, 1)
        options.out.write_text(json.dumps(results, indent=1))
        print(f"[{results['seconds'][what]:6.1f} s] {what}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        model = save_llama_1b(Path(folder), options.dtype) if options.model == "llama-1b" else options.model
        note("checkpoint")
        spec = EngineSpec(
            model,
            "causal",
            Space("lora", rank=8, alpha=16, factors="b", targets=TARGETS),
            rows=options.batch,
            seed=1,
            device=options.device,
            dtype=options.dtype,
            many_probes=True,
            fewer_rows=True,
        )
        sglang = open_engine("sglang", spec)
        note("sglang started")
        try:
            reference = open_engine("torch", spec)
            note("torch started")
            measure(sglang, reference, options, results, note)
        finally:
            sglang.close()


def measure(sglang: Any, reference: Any, options: Any, results: dict[str, Any], note: Callable[[str], None]) -> None:
    count, length, directions = options.batch, options.length, options.directions
    pairs = MicroBatch(rows=count), choose_micro_batch(count, fewer=True, device=reference.device.type)

    def step_without_sharing(batch: Batch, number: int) -> None:
        sglang.channel.call("set_min_shared_tokens", count=10**9)
        step(sglang, batch, number)
        sglang.channel.call("set_min_shared_tokens", count=MIN_SHARED_TOKENS)

    def bare(shared: int, members: int, scored: bool = False) -> Case:
        def run(batch: Batch, number: int) -> None:
            parts = [make_batch(count, length, shared, 1000 * number + member) for member in range(members)]
            prompts = tuple(prompt for part in parts for prompt in part.prompts)
            run_requests(sglang, Batch(prompts, batch.readout), scored)

        return run

    first = Update(((5, float(np.float32(0.01))),))  # LoRA's B starts at zero, where noise on A changes nothing
    for engine in (sglang, reference):
        engine.apply([first])
    results["sglang"], results["torch"] = sglang.describe(), reference.describe()
    if not sglang.builds_batches:
        note("MIND: SGLang is used by its requests; what is timed is not what mezzo does with a version that it knows")
    results["agreement"] = agreement(sglang, reference, make_batch(count, length, 0, 99))
    results["agreement"]["same weights"] = sglang.digest() == reference.digest()
    note(f"agreement {results['agreement']}")
    for name, shared in (("short", 0), ("shared", options.shared))[: 2 if options.shared else 1]:
        batches = [make_batch(count, length, shared, seed) for seed in range(options.rounds + 2)]
        one_step: dict[str, Case] = {
            "torch step": with_micro_batch(reference, pairs[1], lambda batch, n: step(reference, batch, n)),
            "sglang step": with_micro_batch(sglang, pairs[0], lambda batch, n: step(sglang, batch, n)),
            "bare prefill": bare(shared, 2),
            "bare scoring": bare(shared, 2, scored=True),
        }
        if shared:
            one_step["sglang step, nothing shared"] = with_micro_batch(sglang, pairs[0], step_without_sharing)
        population: dict[str, Case] = {
            "torch population": lambda batch, n: score_population(reference, batch, n, directions),
            "sglang population": lambda batch, n: score_population(sglang, batch, n, directions),
            "sglang population, two probes a forward": with_micro_batch(
                sglang, pairs[0], lambda batch, n: score_population(sglang, batch, n, directions)
            ),
            "bare prefill": bare(shared, 1 + directions),
        }
        for kind, cases, probes in (("step", one_step, 2), ("population", population, 1 + directions)):
            times = time_in_turns(cases, batches, lambda: empty_cache(sglang))
            results[f"{name} {kind}"] = times
            note(f"{name} {kind}")
            print(table(times, kind, probes * count * (shared + length)), flush=True)


def table(times: dict[str, list[float]], kind: str, tokens: int) -> str:
    """Ratios are medians of those of each round: its cases ran right after each other."""
    lines = []
    for case, values in times.items():
        against = [times[name] for name in (f"torch {kind}", "bare prefill")]
        ratios = [statistics.median(a / b for a, b in zip(values, other, strict=True)) for other in against]
        middle = statistics.median(values)
        figures = f"{middle:.1f} | {min(values):.1f}–{max(values):.1f} | {1e3 * tokens / middle:,.0f}"
        lines.append(f"| {case} | {figures} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    head = f"| {kind} | ms | range | prompt tokens/s | × torch | × bare prefill |"
    return "\n".join([head, "|---|---|---|---|---|---|", *lines])


if __name__ == "__main__":
    main()
