"""Kernels leave the bits of plain torch, which are those of NumPy: on a GPU, or interpreted (TRITON_INTERPRET=1) on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mezzo.engines.torch.forward.probe_point import DeviceUpdate, ProbePoint
from mezzo.engines.torch.weights.flat_buffer import FlatBuffer
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.engines.torch.weights.reference_ops import ReferenceOps
from mezzo.method import noise
from mezzo.types import Probe, TrainedTensor, Update
from tests.torch_engine.triton_device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
TYPES = [torch.float32, torch.bfloat16, torch.float16]
SEEDS = (2**64 - 3, 12345)
SHAPES = [(7, 5), (33, 40), (64, 64)] if INTERPRETED else [(33, 41), (1000, 1030), (4096, 1024)]
TERMS = ((SEEDS[0], float(np.float32(3e-3))), (17, 0.0), (SEEDS[1], float(np.float32(-1e-5))))
UPDATES = {
    "one": Update(TERMS[:1]),
    "several": Update(TERMS, keep=float(np.float32(0.999))),
    "zero-first": Update(((17, 0.0), *TERMS[2:])),
    "decay": Update(((5, 0.0),), keep=0.5),
    "subnormal": Update(((9, float(np.float32(1e-40))),)),
}


def make_ops(kind: noise.Kind) -> tuple[Any, ReferenceOps]:
    from mezzo.engines.torch.gpu.fused_ops import DeviceNoise, FusedOps

    return FusedOps(DeviceNoise(kind, DEVICE)), ReferenceOps(NoiseSource(kind, torch.device("cpu")))


def make_weights(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Ordinary weights, with a few of every special magnitude among them."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 0.02, shape).astype(np.float32).ravel()
    special = [0.0, -0.0, 1e-40, -3e-39, 6e-8, -5e-5, 6.2e-5, 1.0, -1.0, 60_000.0]
    values[: len(special)] = special[: len(values)]
    return torch.from_numpy(values).view(shape).to(dtype)


def bit_patterns(tensor: torch.Tensor) -> np.ndarray:
    kind = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return tensor.detach().cpu().contiguous().view(kind).numpy()


@pytest.mark.parametrize("kind", noise.KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_streams_are_those_of_numpy(kind, seed):
    fused, _ = make_ops(kind)
    for first, last in ((0, 1), (0, 700), (3, 9), (1001, 1024)):
        found = fused.source.stream(seed, "a.weight", first, last).cpu().numpy().view("<u8")
        np.testing.assert_array_equal(found, noise.words(seed, "a.weight", first, last))
    np.testing.assert_array_equal(
        fused.source.dense(seed, "w", 130).cpu().numpy(), noise.dense(kind, seed, "w", 0, 130)
    )
    ids = torch.tensor([[3, 0, 3], [6, 1, 2]])
    for width in (64, 5, 128):
        whole = noise.dense(kind, seed, f"e{width}", 0, 7 * width).reshape(7, width)
        found = fused.source.rows(seed, f"e{width}", (7, width), ids.to(DEVICE))
        np.testing.assert_array_equal(found.cpu().numpy(), whole[ids.numpy()])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", noise.KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_updated_matrices_are_those_of_plain_torch(shape, kind, dtype):
    fused, plain = make_ops(kind)
    for rank, decay in ((0, True), (3, False), (8, True)):
        trained = TrainedTensor(f"w{rank}", shape, "matrix", rank=rank if rank < min(shape) else 0, decay=decay)
        for name, update in UPDATES.items():
            here, there = make_weights(shape, dtype), make_weights(shape, dtype).to(DEVICE)
            plain.update_matrices([(trained, here)], DeviceUpdate(update, here.device))
            fused.update_matrices([(trained, there)], DeviceUpdate(update, DEVICE))
            np.testing.assert_array_equal(bit_patterns(there), bit_patterns(here), err_msg=f"{name}, rank {rank}")


def make_flat_buffer(dtype: torch.dtype, device: torch.device) -> FlatBuffer:
    shapes = ((70,), (5, 9), (1,), (64,), (300,))
    return FlatBuffer(
        [
            (TrainedTensor(f"t{i}", shape, "bias"), make_weights(shape, dtype, i).to(device))
            for i, shape in enumerate(shapes)
        ]
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", noise.KINDS)
def test_updated_flat_buffers_are_those_of_plain_torch(kind, dtype):
    fused, plain = make_ops(kind)
    for name, update in UPDATES.items():
        here, there = make_flat_buffer(dtype, torch.device("cpu")), make_flat_buffer(dtype, DEVICE)
        plain.update_flat(here, DeviceUpdate(update, torch.device("cpu")))
        fused.update_flat(there, DeviceUpdate(update, DEVICE))
        for entry, other in zip(here.entries, there.entries, strict=True):
            np.testing.assert_array_equal(bit_patterns(there.view(other)), bit_patterns(here.view(entry)), err_msg=name)


PROBES = {
    "pair": (Probe(((SEEDS[0], 1e-3),)), Probe(((SEEDS[0], -1e-3),))),
    "mixed": (Probe(), Probe(((1, 0.02), (2, -0.01))), Probe(((2, 0.03),))),
}


@pytest.mark.parametrize("probes", PROBES.values(), ids=PROBES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", noise.KINDS)
def test_perturbed_tensors_are_those_of_plain_torch(kind, dtype, probes):
    """Each member is θ ± ε·z in float32, rounded once to the dtype of the members."""
    fused, plain = make_ops(kind)
    shape = SHAPES[-1]
    trained = TrainedTensor("some.weight", shape, "matrix")
    value = make_weights(shape, dtype)
    found = torch.empty(len(probes), *shape, dtype=dtype, device=DEVICE)
    fused.perturb_matrix(trained, value.to(DEVICE), ProbePoint(probes, DEVICE), found)
    wide = torch.empty(len(probes), *shape)
    plain.perturb_matrix(trained, value, ProbePoint(probes, torch.device("cpu")), wide)
    allowed = 1e-7 if dtype == torch.float32 else float(torch.finfo(dtype).eps)
    np.testing.assert_allclose(found.float().cpu().numpy(), wide.numpy(), rtol=allowed, atol=1e-7)

    here, there = make_flat_buffer(dtype, torch.device("cpu")), make_flat_buffer(dtype, DEVICE)
    small = fused.perturb_flat(there, ProbePoint(probes, DEVICE))
    assert small.dtype == torch.float32
    expected = plain.perturb_flat(here, ProbePoint(probes, torch.device("cpu")))
    for entry in here.entries:
        part = slice(entry.start, entry.start + entry.count)
        np.testing.assert_allclose(small[:, part].cpu().numpy(), expected[:, part].numpy(), rtol=1e-6, atol=1e-7)
