"""What a model costs that does not fit its GPU: layers in host memory (--offload) beside the resident model, and the path of
several devices. The model has random weights, made on the GPU: nothing is downloaded.

python benchmarks/offload.py [--shape opt-13b] [--gpu-gb 24] [--rows 8 32] [--length 256] [--placements offload resident split]

`resident` may use the whole GPU, the others `--gpu-gb` of it. `split` is --device all, or one GPU as two devices where there is
only one: the cost of the path without that of the wires. A forward is one pair of probes of all rows, with LoRA.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from mezzo.engines.torch.engine import TorchEngine
from mezzo.engines.torch.loading import device_of, gpu_count
from mezzo.engines.torch.offload import LayerStream
from mezzo.errors import RunFailed
from mezzo.method.space import Space
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout

PAIR = (Probe(((7, 1e-2),)), Probe(((7, -1e-2),)))
# hidden size, layers, heads, inner size, vocabulary
SIZES = {
    "opt-1.3b": (2048, 24, 32, 8192, 50272),
    "opt-13b": (5120, 40, 40, 20480, 50272),
    "opt-30b": (7168, 48, 56, 28672, 50272),
    "opt-tiny": (64, 4, 4, 128, 200),
    "llama-7b": (4096, 32, 32, 11008, 32000),
    "llama-13b": (5120, 40, 40, 13824, 32000),
    "llama-tiny": (64, 4, 4, 128, 200),
}


def make_config(shape: str) -> Any:
    from transformers import LlamaConfig, OPTConfig

    hidden, layers, heads, inner, vocabulary = SIZES[shape]
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocabulary}
    if shape.startswith("opt"):
        return OPTConfig(**sizes, ffn_dim=inner, word_embed_proj_dim=hidden, max_position_embeddings=2048)
    return LlamaConfig(**sizes, intermediate_size=inner, max_position_embeddings=4096)


def make_model(shape: str, dtype: torch.dtype, device: torch.device, keep_in: torch.device) -> nn.Module:
    """Weights are drawn on `device`, tensor by tensor, and kept in `keep_in`."""
    from transformers import AutoModelForCausalLM

    config = make_config(shape)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.empty(parameter.shape, dtype=dtype, device=device)
            value = value.fill_(float(name == "weight")) if value.ndim < 2 else value.normal_(std=0.02)
            module._parameters[name] = nn.Parameter(value.to(keep_in), requires_grad=False)
    model.tie_weights()
    _make_rotary(model, config)
    return model.eval()  # type: ignore[no-any-return]


def _make_rotary(model: Any, config: Any) -> None:
    """Tables of positions are no parameters, and must hold real numbers."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                setattr(module, name, type(child)(config=config))


def make_batch(rows: int, length: int, vocabulary: int) -> Batch:
    ids = np.random.default_rng(0).integers(5, vocabulary, size=(rows, length)).tolist()
    return Batch(tuple(Prompt(tuple(row), position=length - 1) for row in ids), Readout("words", words=(11, 47)))


def open_engine(placement: str, options: argparse.Namespace, device: torch.device) -> TorchEngine:
    dtype = getattr(torch, options.dtype)
    keep_in = device if placement == "resident" else torch.device("cpu")
    model = make_model(options.shape, dtype, device, keep_in)
    names = {"split": "all" if gpu_count() > 1 else f"{device},{device}"}.get(placement, str(device))
    rows = MicroBatch(rows=max(options.rows))
    # The digest of a base that nobody resumes from would take longest of all.
    settings: dict[str, Any] = {"device": names, "micro_batch": rows, "pad_id": 1, "base_digest": "random"}
    return TorchEngine(model, Space("lora"), offload=placement == "offload", **settings)


def measure(placement: str, options: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """Rows of the table."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        total = torch.cuda.get_device_properties(device).total_memory
        share = 1.0 if placement == "resident" else min(1.0, options.gpu_gb * 2**30 / total)
        torch.cuda.set_per_process_memory_fraction(share)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    try:
        engine = open_engine(placement, options, device)
    except (torch.OutOfMemoryError, RunFailed):
        yield f"| {placement} | | does not fit | | | |"
        return
    opened, stream = _now(device) - start, engine.layer_stream
    weights = sum(parameter.nbytes for parameter in engine.model.parameters())
    print(f"{placement}: {weights / 1e9:.1f} GB of weights, opened in {opened:.0f} s{_copy_alone(stream, device)}")
    for rows in options.rows:
        batch, times = make_batch(rows, options.length, SIZES[options.shape][-1]), []
        for _ in range(options.rounds + 2):  # two to warm up
            start, copied = _now(device), stream.copied_bytes if stream else 0
            scores = engine.score(batch, PAIR)
            times.append(_now(device) - start)
        assert np.isfinite(scores).all()
        seconds = statistics.median(times[2:])
        rate = f"{(stream.copied_bytes - copied) / seconds / 1e9:.1f}" if stream else ""
        peak = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if on_gpu else ""
        tokens = f"{2 * rows * options.length / seconds:,.0f}"
        yield f"| {placement} | {rows} | {seconds:.3f} | {tokens} | {rate} | {peak} |"
    engine.close()


def _copy_alone(stream: LayerStream | None, device: torch.device) -> str:
    """How long the layers take to be copied when nothing computes."""
    if stream is None:
        return ""
    times = []
    for _ in range(2):
        start = _now(device)
        for index in range(len(stream.layers)):
            stream.copy_layer(index, index % len(stream.slots))
        times.append(_now(device) - start)
    stream.held = [None] * len(stream.slots)
    return f"; copying all layers takes {times[1]:.3f} s, {sum(stream.sizes) / times[1] / 1e9:.1f} GB/s"


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="opt-13b", choices=SIZES)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--gpu-gb", type=float, default=24, help="GiB of the GPU that may be used")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--placements", nargs="+", default=["offload", "resident"])
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    device, table = device_of(options.device), list[str]()
    for placement in options.placements:
        table += measure(placement, options, device)
        gc.collect()
    print("| weights | rows | s a forward | tokens a second | GB/s copied | peak GiB |\n|---|---|---|---|---|---|")
    print("\n".join(table))


if __name__ == "__main__":
    main()
