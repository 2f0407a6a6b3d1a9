"""Where tests of kernels run: on a GPU, or interpreted (TRITON_INTERPRET=1) on a CPU. Elsewhere their modules are skipped."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
MARKS = [] if INTERPRETED else [pytest.mark.gpu]
