"""Tensors as arrays on the host, and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.generic]


def to_tensor(values: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def to_numpy(value: Tensor) -> Array:
    """A float32 copy on the host."""
    return value.detach().float().cpu().numpy().copy()
