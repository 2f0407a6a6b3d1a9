"""Whether kernels can run."""

from __future__ import annotations

import importlib.util
import os

import torch


def kernel_refusal(device: torch.device) -> str:
    """Why there are no kernels on a device; empty where there are."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # kernels on a CPU, for tests
    if device.type != "cuda" and not interpreted:
        return "they need a GPU"
    return "" if importlib.util.find_spec("triton") is not None else "Triton is not installed"
