"""Layers in host memory, copied to the device when they run: the same scores, adapters and exports."""

from __future__ import annotations

import gc
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import mezzo
from mezzo.engines.torch.engine import TorchEngine
from mezzo.errors import ConfigError, SpaceError
from mezzo.method.space import Space
from mezzo.types import Generation, Probe, Update
from tests.conftest import VOCAB, make_batch, make_llama, make_roberta

PAIR = (Probe(((7, 1e-2),)), Probe(((7, -1e-2),)))


@pytest.mark.parametrize("make", [make_roberta, make_llama])
@pytest.mark.parametrize("space", [Space("lora", rank=2), Space("prefix"), Space("lora", rank=2, layers="1:")])
def test_offloaded_layers_compute_the_same(make, space):
    plain, offloaded = (TorchEngine(make(), space, offload=offload, cache_mb=1) for offload in (False, True))
    batch = make_batch(6)
    for engine in (plain, offloaded):
        engine.check(batch, 1e-2)
        engine.apply([Update(((5, 0.03125),))])
    np.testing.assert_array_equal(offloaded.score(batch, PAIR), plain.score(batch, PAIR))
    assert offloaded.digest() == plain.digest() and offloaded.base_digest == plain.base_digest
    stream = offloaded.layer_stream
    assert len(stream.slots) == 2 and stream.held != [None, None]
    for layer, host in zip(stream.parameters, stream.host, strict=True):
        assert all(p.data_ptr() == h.data_ptr() for p, h in zip(layer, host, strict=True)), "afterwards all are at home"
    if make is make_llama:
        assert offloaded.generate(batch, PAIR, Generation(3)) == plain.generate(batch, PAIR, Generation(3))
    if space.kind == "lora":
        pairs = zip(*(e.merged_model().named_parameters() for e in (offloaded, plain)), strict=True)
        assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
        assert np.isfinite(offloaded.score(batch, PAIR)).all(), "and it goes on"


@pytest.mark.parametrize(("cache_mb", "copies"), [(0, 5), (1, 0)])
def test_a_forward_copies_each_layer_once_and_cached_ones_never(cache_mb, copies):
    model, batch = make_roberta(num_hidden_layers=5), make_batch(6)
    engine = TorchEngine(model, Space("lora", rank=2, layers="4:"), offload=True, cache_mb=cache_mb)
    stream = engine.layer_stream
    engine.score(batch, PAIR)
    before = stream.copied_bytes
    engine.score(batch, PAIR)
    assert stream.copied_bytes - before == copies * stream.sizes[0]


def test_base_weights_cannot_be_trained_in_host_memory(tiny_run, tmp_path):
    with pytest.raises(SpaceError, match="lora or prefix"):
        TorchEngine(make_llama(), Space("full"), offload=True)
    with pytest.raises(ConfigError, match=r"with --offload: it goes with --space lora or prefix, not 'full'"):
        mezzo.finetune(**{**tiny_run, "space": "full"}, offload=True)
    run = mezzo.finetune(**tiny_run, steps=2, offload=True, out=str(tmp_path / "run"))
    assert mezzo.verify(run.out).ok


def test_benchmark_prints_a_table(capsys):
    script = Path(__file__).parents[2] / "benchmarks" / "offload.py"
    sizes = ["--shape", "opt-tiny", "--dtype", "float32", "--rows", "2", "--length", "8", "--rounds", "1"]
    placements = ["resident", "offload", "split"]
    runpy.run_path(str(script))["main"]([*sizes, "--device", "cpu", "--placements", *placements])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {placement}" for placement in placements]


def make_deep_llama() -> torch.nn.Module:
    """Sixteen layers of 12 MiB each, which outweigh everything beside them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1408}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=16, max_position_embeddings=128, pad_token_id=1, **sizes)
    return LlamaForCausalLM(config).eval()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_layers_need_less_memory_and_score_alike(dtype):
    batch, peaks, scores, size = make_batch(6), [], [], 0
    for offload in (False, True):
        model = make_deep_llama().to(dtype)
        size = sum(parameter.nbytes for parameter in model.parameters())
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine = TorchEngine(model, Space("lora", rank=2), device="cuda", offload=offload, pad_id=1)
        engine.check(batch, 1e-2)
        engine.apply([Update(((5, 0.03125),))])
        scores += [engine.score(batch, PAIR)]
        peaks += [torch.cuda.max_memory_allocated() - before]
        if offload:
            assert all(part.is_pinned() for part in engine.layer_stream.pool)
            assert engine.generate(batch, [Probe()], Generation(2))
            merged = dict(engine.merged_model().named_parameters())
            assert all(parameter.isfinite().all() for parameter in merged.values())
        engine.close()
        del engine, model
    np.testing.assert_allclose(scores[1], scores[0], atol=5e-4 if dtype == torch.float32 else 0.1)
    print(f"model {size / 2**20:.0f} MiB, peaks {peaks[0] / 2**20:.0f} and {peaks[1] / 2**20:.0f} MiB")
    assert peaks[1] < 0.75 * size < size < peaks[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
def test_the_next_layer_is_copied_while_one_computes():
    """By a profile of one forward: some copy to the device runs at the same time as some kernel."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    engine = TorchEngine(make_deep_llama(), Space("lora", rank=2), device="cuda", offload=True, pad_id=1)
    batch = make_batch(32, lengths=(60, 61))
    engine.score(batch, PAIR)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        engine.score(batch, PAIR)
        torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    copies = [e.time_range for e in events if "Memcpy HtoD" in e.name and e.time_range.elapsed_us() > 50]
    kernels = [e.time_range for e in events if "Mem" not in e.name]
    overlapping = [c for c in copies if any(k.start < c.end and c.start < k.end for k in kernels)]
    print(f"{len(overlapping)} of {len(copies)} copies overlap with kernels")
    assert len(copies) >= 15 and len(overlapping) > len(copies) / 2
